"""GPT-1's input transformations of texts to token sequences (Radford et al. 2018, section 3.3).

    single      start text extract
    entailment  start first delimiter second extract
    similarity  both orders of the pair, whose representations the head adds
    choice      start context delimiter choice extract, one sequence per choice; of two texts (article and question) the
                context is both, concatenated; without a context it is start choice extract

With special_tokens `end` the language model has read all of these tokens: start and delimiter are the end of a
document, which comes before each document of its text, and there is no extract token (ULMFiT, Howard and Ruder, 2018,
whose code begins texts in both stages alike and adds nothing at their end).

Sequences that are too long are truncated by one rule. With `room` = length less the special tokens, a single text keeps
its first `room` tokens. Of two texts, one that needs no more than half of the room is kept whole and leaves the rest of
the room to the other, whose first tokens are kept; if both need more, the first keeps room - room // 2 and the second
room // 2 tokens. The original (`train.py`, n_ctx // 2 - 2) keeps the first half of the room of each text, even if the
other leaves room unused. All choices of a row share one context, truncated for the longest of them; of two context
texts the first is truncated, and the second only when nothing of the first is left.
"""

from collections.abc import Mapping, Sequence

from jaxlm.errors import InputError
from jaxlm.tasks.batching.input_format import MINIMUM_LENGTH, Arranged, Ids, InputFormat, Texts
from jaxlm.tasks.examples import Example
from jaxlm.tasks.task import Form, SpecialTokens, Task

ROLES = ("start", "delimiter", "extract")
"""Special tokens that the transformations need; `tokenizer.with_specials(ROLES)` adds the missing ones."""
_ROLES_OF: Mapping[str, Sequence[str]] = {"gpt1": ROLES, "end": ("end", "end")}


def read(example: Example, task: Task) -> tuple[Texts, Texts]:
    """Return texts and choices. A question stays with its article; a beginning is prepended to each choice."""
    if task.form == "choice" and len(example.texts) > 1 and task.second == "beginning":
        context, second = example.texts
        return (context,), tuple(f"{second} {choice}" for choice in example.choices)
    return example.texts, example.choices


def arrange(
    texts: Sequence[Ids],
    choices: Sequence[Ids],
    form: Form,
    specials: Mapping[str, int],
    length: int,
    *,
    special_tokens: SpecialTokens = "gpt1",
    keep_second: bool = False,
) -> Arranged:
    """Return the sequences of one example, their lengths, and whether any was truncated; see `InputFormat`.

    One sequence for `single` and `entailment`, two for `similarity` (both orders), one per choice for `choice`.
    specials: those of start, delimiter and extract, or of end. keep_second is not used: there is one segment.
    """
    if length < MINIMUM_LENGTH:
        raise InputError(
            f"length must be at least {MINIMUM_LENGTH} to hold a pair and its special tokens, got {length}"
        )
    roles = _ROLES_OF[special_tokens]
    if missing := [role for role in roles if role not in specials]:
        if special_tokens == "end":
            raise InputError(
                "special_tokens must be gpt1 for a tokenizer without an end-of-document token, got end; give "
                "--special-tokens gpt1"
            )
        raise InputError(
            f"the tokenizer must have start, delimiter and extract tokens, got no {', '.join(missing)}: the model was "
            "not fine-tuned by jaxlm and has another input form; fine-tune it with python -m jaxlm.finetune --start"
        )
    start, delimiter, *extract = (specials[role] for role in roles)

    def pair(first: Ids, second: Ids) -> list[int]:
        return [start, *first, delimiter, *second, *extract]

    room = length - 1 - len(extract)
    if form == "single" or not texts:
        alone = texts or choices
        sequences = [[start, *text[:room], *extract] for text in alone]
        return sequences, [len(sequence) for sequence in sequences], max(map(len, alone)) > room
    room -= 1
    if form == "choice":
        longest = max(len(choice) for choice in choices)
        before, question = (texts[0], []) if len(texts) == 1 else texts
        keep_context, keep_choice = split_room(len(before) + len(question), longest, room)
        kept_before = max(0, keep_context - len(question))
        context = [*before[:kept_before], *question[:keep_context]]
        truncated = keep_context < len(before) + len(question) or keep_choice < longest
        sequences = [pair(context, choice[:keep_choice]) for choice in choices]
    else:
        first, second = texts
        kept, rest = split_room(len(first), len(second), room)
        first, second, truncated = first[:kept], second[:rest], kept + rest < len(first) + len(second)
        sequences = [pair(first, second), pair(second, first)] if form == "similarity" else [pair(first, second)]
    return sequences, [len(sequence) for sequence in sequences], truncated


def split_room(first: int, second: int, room: int) -> tuple[int, int]:
    """Return the number of tokens that two texts of these lengths keep in `room`; see the module docstring."""
    if first + second <= room:
        return first, second
    half_second = room // 2
    half_first = room - half_second
    if second <= half_second:
        return room - second, second
    if first <= half_first:
        return first, room - first
    return half_first, half_second


GPT1 = InputFormat(arrange=arrange, read=read, roles=ROLES, orders=2, reads_last=True, whole_batches=True)
