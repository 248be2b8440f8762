"""GPT-1's input transformations of texts to token sequences (Radford et al. 2018, section 3.3).

    single      start text extract
    entailment  start first delimiter second extract
    similarity  both orders of the pair, whose representations the head adds
    choice      start context delimiter choice extract, one sequence per choice; of two texts (article and question) the
                context is both, concatenated; without a context it is start choice extract

Sequences that are too long are truncated by one rule. With `room` = length less the special tokens, a single text keeps
its first `room` tokens. Of two texts, one that needs no more than half of the room is kept whole and leaves the rest of
the room to the other, whose first tokens are kept; if both need more, the first keeps room - room // 2 and the second
room // 2 tokens. The original (`train.py`, n_ctx // 2 - 2) keeps the first half of the room of each text, even if the
other leaves room unused. All choices of a row share one context, truncated for the longest of them; of two context
texts the first is truncated, and the second only when nothing of the first is left.
"""

from collections.abc import Mapping, Sequence

from jaxlm.errors import InputError
from jaxlm.tasks.task import Form

Ids = Sequence[int]
MINIMUM_LENGTH = 5  # three special tokens and one token of each text

ROLES = ("start", "delimiter", "extract")
"""Special tokens that the transformations need; `tokenizer.with_specials(ROLES)` adds the missing ones."""


def arrange(
    texts: Sequence[Ids], choices: Sequence[Ids], form: Form, specials: Mapping[str, int], length: int
) -> tuple[list[list[int]], bool]:
    """Return the token sequences of one example, each of at most `length`, and whether any was truncated.

    One sequence for `single` and `entailment`, two for `similarity` (both orders), one per choice for `choice`.
    texts, choices: their ids. specials: role -> id, of start, delimiter and extract.
    """
    if length < MINIMUM_LENGTH:
        raise InputError(
            f"length must be at least {MINIMUM_LENGTH} to hold a pair and its special tokens, got {length}"
        )
    missing = [role for role in ROLES if role not in specials]
    if missing:
        raise InputError(
            f"the tokenizer must have start, delimiter and extract tokens, got no {', '.join(missing)}: the model was "
            "not fine-tuned by jaxlm and has another input form; fine-tune it with python -m jaxlm.finetune --start"
        )
    start, delimiter, extract = (specials[role] for role in ROLES)

    def pair(first: Ids, second: Ids) -> list[int]:
        return [start, *first, delimiter, *second, extract]

    if form == "single":
        (text,) = texts
        return [[start, *text[: length - 2], extract]], len(text) > length - 2
    if form == "choice" and not texts:
        cut = max(len(choice) for choice in choices) > length - 2
        return [[start, *choice[: length - 2], extract] for choice in choices], cut
    room = length - 3
    if form == "choice":
        longest = max(len(choice) for choice in choices)
        before, question = (texts[0], []) if len(texts) == 1 else texts
        keep_context, keep_choice = split_room(len(before) + len(question), longest, room)
        kept_before = max(0, keep_context - len(question))
        context = [*before[:kept_before], *question[:keep_context]]
        cut = keep_context < len(before) + len(question) or keep_choice < longest
        return [pair(context, choice[:keep_choice]) for choice in choices], cut
    first, second = texts
    keep_first, keep_second = split_room(len(first), len(second), room)
    first, second, cut = first[:keep_first], second[:keep_second], keep_first + keep_second < len(first) + len(second)
    if form == "similarity":
        return [pair(first, second), pair(second, first)], cut
    return [pair(first, second)], cut


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
