"""BERT's input form: texts as one sequence of two segments (Devlin et al. 2019, section 3.2 and figure 4).

    single               CLS text SEP
    entailment           CLS first SEP second SEP
    similarity           the same: an encoder is bidirectional, so one order is enough
    choice               CLS context SEP choice SEP, one sequence per choice; of two texts (article and question) the
                         second segment is the question and the choice; without a context it is CLS choice SEP

Sequences that are too long are truncated as in the original (`run_classifier.py`, `_truncate_seq_pair`): one token at a
time at the end of the longer segment, of the second if both are equal. Of an article with a question only the article
is truncated, as long as any of it is left.
"""

from collections.abc import Mapping, Sequence

from jaxlm.errors import InputError
from jaxlm.tasks.batching.input_format import MINIMUM_LENGTH, Arranged, Ids, InputFormat, Texts
from jaxlm.tasks.examples import Example
from jaxlm.tasks.task import Form, SpecialTokens, Task

ENCODER_ROLES = ("cls", "sep")
"""Special tokens that an encoder's input needs; a BERT vocabulary has them."""


def read(example: Example, task: Task) -> tuple[Texts, Texts]:
    """Return texts and choices. The second text of a choice task is prepended to each choice, or the choice replaces
    the blank of a question, as is usual."""
    if task.form != "choice" or len(example.texts) < 2:
        return example.texts, example.choices
    context, second = example.texts
    if task.second == "cloze" and "_" in second:
        return (context,), tuple(second.replace("_", choice) for choice in example.choices)
    return (context,), tuple(f"{second} {choice}" for choice in example.choices)


def arrange_segments(
    texts: Sequence[Ids],
    choices: Sequence[Ids],
    form: Form,
    specials: Mapping[str, int],
    length: int,
    *,
    special_tokens: SpecialTokens = "gpt1",
    keep_second: bool = False,
) -> Arranged:
    """Return the sequences of one example, where their second segments begin, and whether any was truncated.

    See `InputFormat`. specials: the ids of cls and sep. special_tokens is not used: they are the ones of pretraining.
    """
    cls, sep = special_ids(specials, length)
    pairs: list[tuple[Ids, Ids | None]]
    if form == "choice":
        pairs = [(texts[0], choice) for choice in choices] if texts else [(choice, None) for choice in choices]
    else:
        pairs = [(texts[0], texts[1] if len(texts) > 1 else None)]
    sequences, seconds, truncated = [], [], False
    for first, second in pairs:
        if second is None:
            kept, rest = min(len(first), length - 2), 0
            sequences.append([cls, *first[:kept], sep])
            seconds.append(kept + 2)
        else:
            kept, rest = truncate_pair(len(first), len(second), length - 3, keep_second=keep_second)
            sequences.append([cls, *first[:kept], sep, *second[:rest], sep])
            seconds.append(kept + 2)
        truncated = truncated or kept < len(first) or rest < len(second or ())
    return sequences, seconds, truncated


def truncate_pair(first: int, second: int, room: int, *, keep_second: bool = False) -> tuple[int, int]:
    """Return the number of tokens that two segments of these lengths keep in `room`; see the module docstring."""
    excess = first + second - room
    if excess <= 0:
        return first, second
    if keep_second:
        return max(0, first - excess), min(second, room)
    if first > second:
        taken = min(excess, first - second)
        first, excess = first - taken, excess - taken
    else:
        taken = min(excess, second - first)
        second, excess = second - taken, excess - taken
    # The remaining excess is removed from the equal segments in turn, from the second first.
    return first - excess // 2, second - (excess - excess // 2)


def special_ids(specials: Mapping[str, int], length: int) -> tuple[int, int]:
    """Return the ids of CLS and SEP. InputError if the vocabulary lacks them or `length` has room for no others."""
    if missing := [role.upper() for role in ENCODER_ROLES if role not in specials]:
        raise InputError(
            f"the tokenizer must have CLS and SEP tokens for an encoder, got no {' and no '.join(missing)}; "
            "use a BERT vocabulary, for example train-wordpiece:SIZE or wordpiece:VOCAB.txt"
        )
    if length < MINIMUM_LENGTH:
        raise InputError(
            f"length must be at least {MINIMUM_LENGTH} to hold a pair and its special tokens, got {length}"
        )
    return specials["cls"], specials["sep"]


BERT = InputFormat(arrange=arrange_segments, read=read, needs=ENCODER_ROLES, every_token=True)
