"""User options for span and tagging tasks: windows over long texts, predicted answers, and document context.

The values for questions are the original's (google-research/bert, `run_squad.py`, lines 66 to 154).
"""

from dataclasses import dataclass
from typing import Literal

from jaxlm.ranges import Count


@dataclass(frozen=True)
class TaskOptions:
    """Options of tasks that answer questions or tag tokens. Other tasks ignore them."""

    stride: Count = 128
    """Tokens from the start of one window of a long text to the start of the next (the original's doc_stride)."""
    question_length: Count = 64
    """Maximum number of question tokens. Longer questions are truncated."""
    answer_length: Count = 30
    """Maximum number of tokens in a predicted answer."""
    num_best: Count = 20
    """Number of starts and ends considered in each window, and of answers listed for each question."""
    context: Literal["document", "sentence"] = "document"
    """Context of a sentence in tagging. document: as many neighbouring sentences of the same document as fit.
    sentence: none."""
