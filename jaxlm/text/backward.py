"""Backward tokenizers: the ids of a text from its last token to its first, for a backward language model.

The direction is a property of the tokenizer, and so of the stores and runs that were made with it: pretraining,
fine-tuning and prediction read texts backwards without a further option (ULMFiT, Howard and Ruder, 2018, section 3.4).
"""

from collections.abc import Sequence

import numpy as np

from jaxlm.errors import InputError
from jaxlm.text.tokenizer import Tokenizer

PREFIX = "backward "  # of the kind, before that of the forward tokenizer


class BackwardTokenizer(Tokenizer):
    """A tokenizer that gives the ids of another one in reverse order. kind: PREFIX and the kind of the other one."""

    def __init__(self, forward: Tokenizer):
        if isinstance(forward, BackwardTokenizer):
            raise InputError("tokenizer must be a forward one after backward:, got a backward one; leave backward: out")
        super().__init__(forward.files, forward.base_size, forward.specials)
        self.kind, self.size, self._added, self._forward = PREFIX + forward.kind, forward.size, forward._added, forward
        self.lossy_note, self.continuing, self.word_start = forward.lossy_note, forward.continuing, forward.word_start
        self.bytes_per_character, self.notes = forward.bytes_per_character, forward.notes

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, the last token first."""
        return [ids[::-1] for ids in self._forward.encode_batch(texts)]

    def encode_batch_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], np.ndarray]]:
        """Return the ids and the offsets of each text, those of the last token first."""
        return [(ids[::-1], offsets[::-1]) for ids, offsets in self._forward.encode_batch_with_offsets(texts)]

    def _decode(self, ids: list[int]) -> str:
        return self._forward._decode(ids[::-1])

    def _piece(self, i: int) -> str:
        return self._forward._piece(i)


def require_forward(tokenizer: Tokenizer, what: str) -> None:
    """Raise InputError for a backward tokenizer. what: the thing that needs a model that reads forwards."""
    if isinstance(tokenizer, BackwardTokenizer):
        raise InputError(
            f"{what} needs a model that reads texts forwards, got one that reads them backwards; "
            "evaluate perplexity, finetune and predict read backward models"
        )
