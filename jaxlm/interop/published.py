"""A published model in memory: its config, its parameters by our names, its tokenizer, and its task."""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxlm.models import build
from jaxlm.models.bert import BertConfig
from jaxlm.models.gpt import GPTConfig
from jaxlm.runs.trees import nested_leaves
from jaxlm.tasks import Task
from jaxlm.text import Tokenizer


@dataclass(frozen=True)
class Published:
    """A model that was read from `hf:DIR`, `openai:DIR` or `google:DIR`.

    leaves: our path -> float32 array, `backbone/…` and `head/…`. dtype: safetensors' name of the type in the files.
    architecture: Hugging Face's class for it. task: the task of a fine-tuned model's head, with the label names of its
    config. parts: the parts beside the backbone. config: the values of its config.json, if it has one. notes: sentences
    about it. longest: the most tokens of a text that its tokenizer names; None: all positions.
    """

    name: str
    model: GPTConfig | BertConfig
    leaves: MutableMapping[str, np.ndarray]
    tokenizer: Tokenizer | None
    fingerprint: str
    architecture: str
    dtype: str
    parts: tuple[str, ...] = ()
    task: Task | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    longest: int | None = None

    @property
    def trained_length(self) -> int:
        """The number of positions that were trained: those of the model, or fewer if its tokenizer says so."""
        positions = build(self.model).max_length
        return min(positions, self.longest or positions)

    @property
    def params(self) -> dict[str, Any]:
        """The parameters as a tree: {"backbone": …}, and "head" if there is one."""
        return nested_leaves(self.leaves)
