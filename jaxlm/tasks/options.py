"""How questions and sentences are cut to a model's length, and how answers are chosen: what a user may set.

The values for questions are the original's (google-research/bert, `run_squad.py`, lines 66 to 154).
"""

from dataclasses import dataclass
from typing import Literal

from jaxlm.errors import InputError


@dataclass(frozen=True)
class TaskOptions:
    """Settings of the tasks that answer questions and tag tokens; others ignore them."""

    stride: int = 128
    """Tokens from the start of one window of a long text to the start of the next (the original's doc_stride)."""
    question_length: int = 64
    """Tokens of a question that are read."""
    answer_length: int = 30
    """Tokens of the longest answer that can be predicted."""
    num_best: int = 20
    """Starts and ends looked at in each window, and answers listed for each question."""
    context: Literal["document", "sentence"] = "document"
    """Tagging. document: each sentence is read amid as many neighbours as fit, where documents are marked. sentence:
    alone."""

    def check(self) -> None:
        """Refuse what cannot be."""
        for name in ("stride", "question_length", "answer_length", "num_best"):
            if getattr(self, name) < 1:
                raise InputError(f"options.{name} {getattr(self, name)}: a number above 0")
        if self.context not in ("document", "sentence"):
            raise InputError(f"options.context {self.context!r}: document or sentence")
