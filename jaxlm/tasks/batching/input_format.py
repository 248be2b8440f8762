"""The arrangement of a task's texts and choices as the token sequences that a model reads."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxlm.tasks.examples import Example
from jaxlm.tasks.task import Task

if TYPE_CHECKING:
    from jaxlm.text import Tokenizer

Ids = Sequence[int]
Texts = tuple[str, ...]
Arranged = tuple[list[list[int]], list[int], bool]
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
    orders: the sequences of a symmetric pair. reads_last: True if heads read the last token of a sequence; otherwise
    the first. every_token: True if there are heads for spans and tags, which read every token. whole_batches: whether
    an epoch has a whole number of updates.
    """

    read: Callable[[Example, Task], tuple[Texts, Texts]]
    arrange: Callable[..., Arranged]
    roles: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    orders: int = 1
    reads_last: bool = False
    every_token: bool = False
    whole_batches: bool = False

    def with_special_tokens(self, tokenizer: "Tokenizer", special_tokens: str = "gpt1") -> "Tokenizer":
        """Return the tokenizer with the special tokens that can be added: those of GPT-1."""
        return tokenizer.with_specials(self.roles) if special_tokens == "gpt1" else tokenizer

    def num_sequences(self, task: Task) -> int:
        """Return the token sequences per example: the choices, the orders of a symmetric pair, or one."""
        if task.form == "choice":
            return task.num_choices
        return self.orders if task.form == "similarity" else 1
