"""User options for span and tagging tasks: windows over long texts, predicted answers, and document context.

The values for questions are the original's (google-research/bert, `run_squad.py`, lines 66 to 154).
"""

from dataclasses import dataclass
from typing import Literal

from jaxlm.errors import InputError


@dataclass(frozen=True)
class TaskOptions:
    """Options of tasks that answer questions or tag tokens. Other tasks ignore them."""

    stride: int = 128
    """Tokens from the start of one window of a long text to the start of the next (the original's doc_stride)."""
    question_length: int = 64
    """Maximum number of question tokens. Longer questions are truncated."""
    answer_length: int = 30
    """Maximum number of tokens in a predicted answer."""
    num_best: int = 20
    """Number of starts and ends considered in each window, and of answers listed for each question."""
    context: Literal["document", "sentence"] = "document"
    """Context of a sentence in tagging. document: as many neighbouring sentences of the same document as fit.
    sentence: none."""

    def check(self) -> None:
        """Raise InputError for values out of range."""
        for name in ("stride", "question_length", "answer_length", "num_best"):
            if getattr(self, name) < 1:
                raise InputError(f"options.{name} must be positive, got {getattr(self, name)}")
        if self.context not in ("document", "sentence"):
            raise InputError(f"options.context must be document or sentence, got {self.context!r}")
