"""Input formats: the arrangement of a task's texts and choices as the token sequences that a model reads.

GPT-1's (Radford et al. 2018, section 3.3):

    single      start text extract
    entailment  start first delimiter second extract
    similarity  both orders of the pair, whose representations the head adds
    choice      start context delimiter choice extract, one sequence per choice; of two texts (article and question) the
                context is both, concatenated; without a context it is start choice extract

    text        start source delimiter target end, for tasks whose target is generated

With special_tokens `end` the language model has read all of these tokens: start and delimiter are the end of a
document, which comes before each document of its text, and there is no extract token (ULMFiT, Howard and Ruder, 2018,
whose code begins texts in both stages alike and adds nothing at their end).

Sequences that are too long are truncated by one rule. With `room` = length less the special tokens, a single text keeps
its first `room` tokens. Of two texts, one that needs no more than half of the room is kept whole and leaves the rest of
the room to the other, whose first tokens are kept; if both need more, the first keeps room - room // 2 and the second
room // 2 tokens. The original (`train.py`, n_ctx // 2 - 2) keeps the first half of the room of each text, even if the
other leaves room unused. All choices of a row share one context, truncated for the longest of them; of two context
texts the first is truncated, and the second only when nothing of the first is left.

A source keeps the tokens that leave room for the longest target that is allowed, whatever its own target is: a target
that is unknown leaves it the same.

T5's (Raffel et al. 2020, section 2.1) has a source for the encoder and a target for the decoder, each of a length of
its own, and no head:

    source      text end
    target      pad text end, of which the first is an input alone

BERT's, one sequence of two segments (Devlin et al. 2019, section 3.2 and figure 4):

    single      CLS text SEP
    entailment  CLS first SEP second SEP
    similarity  the same: an encoder is bidirectional, so one order is enough
    choice      CLS context SEP choice SEP, one sequence per choice; of two texts (article and question) the second
                segment is the question and the choice; without a context it is CLS choice SEP

Sequences that are too long are truncated as in the original (`run_classifier.py`, `_truncate_seq_pair`): one token at a
time at the end of the longer segment, of the second if both are equal. Of an article with a question only the article
is truncated, as long as any of it is left.

That of the networks over words (Peters et al. 2018, for example) has no special tokens, and the characters of each word
beside its id:

    single      the words of the text, of which the first are kept
    entailment  two sequences, the words of each text
    similarity  the same
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from jaxlm.errors import InputError
from jaxlm.tasks.examples import Example
from jaxlm.tasks.task import Form, SpecialTokens, Task
from jaxlm.text.tokenizer import target_marks

if TYPE_CHECKING:
    from jaxlm.text import Tokenizer


Ids = Sequence[int]
Texts = tuple[str, ...]
Arranged = tuple[list[list[int]], list[int], bool]


class TextIds(NamedTuple):
    """The ids of an example whose target is generated.

    source: those that an encoder reads; empty for models that read one sequence. prompt: those before the target, at
    least one. target: those of the target with its end; empty where there is none.
    """

    source: Ids
    prompt: Ids
    target: Ids


PAIRS: tuple[Form, ...] = ("entailment", "similarity")
MINIMUM_LENGTH = 5  # three special tokens and one token of each text


@dataclass(frozen=True, kw_only=True)
class InputFormat:
    """An input format: one object for everything that depends on it.

    read: returns the texts and choices of an example as a model reads them, with a choice task's second text placed by
    its role. arrange: takes their ids, the input form, the ids of the special tokens by role, and the maximum length;
    special_tokens (those around the texts that a decoder reads) and keep_second (whether an encoder truncates the
    second segment only when nothing is left of the first). It returns the sequences of the example, the index at which
    the second segment of each begins, or its length if there is none, and whether any sequence was truncated.

    roles: the special tokens that fine-tuning adds to a vocabulary without them. needs: those that it must have.
    orders: the sequences of a symmetric pair. apart: True if the texts of a pair are sequences of their own.
    reads_last: True if heads read the last token of a sequence; otherwise the first. around: takes the ids of the
    special tokens and the maximum length, and returns those before and after a tagged sentence; None if there are no
    heads for spans and tags, which read every token. characters: True if a model reads the characters of each token
    beside its id. whole_batches: whether an epoch has a whole number of updates. has_source: True if an encoder reads
    the source apart. arrange_text: takes the ids of a source and of a target, None without one, the ids of the special
    tokens, the maximum length and that of a target with its end, and special_tokens. It returns the ids of an example
    whose target is generated, and whether any side was truncated; None for models that do not generate. text_roles: the
    special tokens that fine-tuning on such a task adds.
    """

    read: Callable[[Example, Task], tuple[Texts, Texts]]
    arrange: Callable[..., Arranged]
    roles: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    orders: int = 1
    apart: bool = False
    reads_last: bool = False
    around: Callable[[Mapping[str, int], int], tuple[Ids, Ids]] | None = None
    characters: bool = False
    whole_batches: bool = False
    has_source: bool = False
    arrange_text: Callable[..., tuple[TextIds, bool]] | None = None
    text_roles: tuple[str, ...] = ()

    @property
    def every_token(self) -> bool:
        """True if there are heads for spans and tags, which read every token."""
        return self.around is not None

    def with_special_tokens(self, tokenizer: "Tokenizer", task: Task) -> "Tokenizer":
        """Return the tokenizer with the special tokens that can be added: those of GPT-1."""
        return tokenizer.with_specials(self.roles_of(task)) if task.special_tokens == "gpt1" else tokenizer

    def roles_of(self, task: Task) -> tuple[str, ...]:
        """Return the special tokens that fine-tuning on a task adds to a vocabulary without them."""
        return self.text_roles if task.generates else self.roles

    def text_arrangement(self, task: Task) -> Callable[..., tuple[TextIds, bool]]:
        """Return `arrange_text`. InputError for a model that does not generate."""
        if self.arrange_text is None:
            raise InputError(
                f"task {task.name} needs a model that generates texts, got an encoder; start from a decoder"
            )
        return self.arrange_text

    def num_sequences(self, task: Task) -> int:
        """Return the token sequences per example: the choices, the texts or the orders of a pair, or one."""
        if task.form == "choice":
            return task.num_choices
        if self.apart and task.form in PAIRS:
            return 2
        return self.orders if task.form == "similarity" else 1


ROLES = ("start", "delimiter", "extract")
"""Special tokens that the transformations need; `tokenizer.with_specials(ROLES)` adds the missing ones."""
TEXT_ROLES = ("start", "delimiter", "end")
_ROLES_OF: Mapping[str, Sequence[str]] = {"gpt1": ROLES, "end": ("end", "end")}
_TEXT_ROLES_OF: Mapping[str, Sequence[str]] = {"gpt1": TEXT_ROLES, "end": ("end", "end", "end")}


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
    _check_length(length)
    start, delimiter, *extract = _ids_of(_ROLES_OF[special_tokens], specials, special_tokens)

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


def arrange_text(
    source: Ids,
    target: Ids | None,
    specials: Mapping[str, int],
    length: int,
    target_length: int,
    *,
    special_tokens: SpecialTokens = "gpt1",
) -> tuple[TextIds, bool]:
    """Return the ids of an example that a decoder reads as one sequence, and whether a side was truncated.

    specials: those of start, delimiter and end, or of end. target_length: the most ids of a target, with its end.
    """
    start, delimiter, end = _ids_of(_TEXT_ROLES_OF[special_tokens], specials, special_tokens)
    room = length - 2 - target_length
    if room < 1:
        raise InputError(
            f"length must be at least {target_length + 3} to hold a source, its special tokens and a target of "
            f"options.target_length {target_length}, got {length}; give a longer length or a smaller "
            "--options.target-length"
        )
    truncated = len(source) > room or len(target or ()) >= target_length
    ids = () if target is None else (*target[: target_length - 1], end)
    return TextIds((), (start, *source[:room], delimiter), ids), truncated


def arrange_sides(
    source: Ids,
    target: Ids | None,
    specials: Mapping[str, int],
    length: int,
    target_length: int,
    *,
    special_tokens: SpecialTokens = "gpt1",
) -> tuple[TextIds, bool]:
    """Return the ids of an example whose source an encoder reads apart, and whether a side was truncated.

    specials: those of end and pad. length: the most ids of a source, target_length those of a target, each with an end.
    """
    begin, end = target_marks(specials, "the tokenizer")
    truncated = len(source) >= length or len(target or ()) >= target_length
    ids = () if target is None else (*target[: target_length - 1], end)
    return TextIds((*source[: length - 1], end), (begin,), ids), truncated


def no_arrangement(*_: object, **__: object) -> Arranged:
    """Raise InputError: a model that writes its answers has no head that reads a sequence."""
    raise InputError("the task must be text to text for an encoder-decoder, which has no head; give --as-text")


def _ids_of(roles: Sequence[str], specials: Mapping[str, int], special_tokens: SpecialTokens) -> list[int]:
    """Return the ids of special tokens. InputError for a tokenizer without them."""
    if missing := [role for role in roles if role not in specials]:
        if special_tokens == "end":
            raise InputError(
                "special_tokens must be gpt1 for a tokenizer without an end-of-document token, got end; give "
                "--special-tokens gpt1"
            )
        raise InputError(
            f"the tokenizer must have {roles[0]}, {roles[1]} and {roles[2]} tokens, got no {', '.join(missing)}: the "
            "model was not fine-tuned by jaxlm and has another input form; fine-tune it with python -m jaxlm.finetune "
            "--start"
        )
    return [specials[role] for role in roles]


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


ENCODER_ROLES = ("cls", "sep")
"""Special tokens that an encoder's input needs; a BERT vocabulary has them."""


def read_segments(example: Example, task: Task) -> tuple[Texts, Texts]:
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

    specials: the ids of cls and sep. special_tokens is not used: they are the ones of pretraining.
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
            after = []
        else:
            kept, rest = truncate_pair(len(first), len(second), length - 3, keep_second=keep_second)
            after = [*second[:rest], sep]
        sequences.append([cls, *first[:kept], sep, *after])
        seconds.append(kept + 2)
        truncated = truncated or kept < len(first) or rest < len(second or ())
    return sequences, seconds, truncated


def around_segment(specials: Mapping[str, int], length: int) -> tuple[Ids, Ids]:
    """Return the ids before and after a sentence: CLS and SEP."""
    cls, sep = special_ids(specials, length)
    return (cls,), (sep,)


def arrange_words(
    texts: Sequence[Ids],
    choices: Sequence[Ids],
    form: Form,
    specials: Mapping[str, int],
    length: int,
    *,
    special_tokens: SpecialTokens = "gpt1",
    keep_second: bool = False,
) -> Arranged:
    """Return the words of each text, their numbers, and whether any was truncated. InputError for choices."""
    if choices:
        raise InputError(f"the rows of the task must be texts for a network over words, got the form {form}")
    sequences = [list(text[:length]) for text in texts]
    return sequences, [len(sequence) for sequence in sequences], max(map(len, texts)) > length


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
    _check_length(length)
    return specials["cls"], specials["sep"]


def _check_length(length: int) -> None:
    if length < MINIMUM_LENGTH:
        raise InputError(
            f"length must be at least {MINIMUM_LENGTH} to hold a pair and its special tokens, got {length}"
        )


# By the names that families give; those first that need more special tokens.
FORMATS = {
    "bert": InputFormat(arrange=arrange_segments, read=read_segments, needs=ENCODER_ROLES, around=around_segment),
    "gpt1": InputFormat(
        arrange=arrange,
        read=read,
        roles=ROLES,
        orders=2,
        reads_last=True,
        whole_batches=True,
        arrange_text=arrange_text,
        text_roles=TEXT_ROLES,
    ),
    "t5": InputFormat(arrange=no_arrangement, read=read, has_source=True, arrange_text=arrange_sides),
    "words": InputFormat(
        arrange=arrange_words, read=read, apart=True, around=lambda specials, length: ((), ()), characters=True
    ),
}
