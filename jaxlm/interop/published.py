"""A published model in memory: its config, its parameters by our names, its tokenizer, and its task.

The shapes of our leaves are those that a converted checkpoint must fill.
"""

import math
import re
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxlm.errors import InputError
from jaxlm.interop.files import Info
from jaxlm.interop.rules import Shape
from jaxlm.models import build
from jaxlm.models.bert import BertConfig
from jaxlm.models.bert.model import MaskedLMHead, NextSentenceHead
from jaxlm.models.gpt import GPTConfig
from jaxlm.runs.trees import named_leaves, nested_leaves
from jaxlm.tasks import Task
from jaxlm.text import Tokenizer

_LAYER = re.compile(r"\.(?:layer|h)\.(\d+)\.")  # in the names of all three kinds of models


@dataclass(frozen=True)
class Published:
    """A model that was read from `hf:DIR`, `openai:DIR` or `google:DIR`.

    leaves: our path -> float32 array, `backbone/…` and `head/…`. dtype: safetensors' name of the type in the files.
    architecture: Hugging Face's class for it. task: the task of a fine-tuned model's head, with the label names of its
    config. parts: the parts besides the backbone. config: the values of its config.json, if it has one. notes:
    sentences about it. longest: the most tokens of a text that its tokenizer names; None: all positions.
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


def backbone_shapes(model: GPTConfig | BertConfig) -> dict[str, Shape]:
    """Return `backbone/…` -> shape, without a BERT's pooler."""
    params = nn.unbox(jax.eval_shape(build(model).init, jax.random.key(0)))
    params.pop("pooler", None)
    return _shapes("backbone", params)


def part_shapes(model: GPTConfig | BertConfig, parts: Sequence[str], outputs: int) -> dict[str, Shape]:
    """Return path -> shape of the parts besides the backbone; `outputs` is the output size of a fine-tuned head."""
    d = model.width
    found: dict[str, Shape] = {}
    for part in parts:
        if part == "pooler":
            found |= {"backbone/pooler/kernel": (d, d), "backbone/pooler/bias": (d,)}
        elif part in ("masked_lm", "next_sentence"):
            assert isinstance(model, BertConfig)
            head = MaskedLMHead(model) if part == "masked_lm" else NextSentenceHead(model.init_std)
            params = jax.eval_shape(head.init, jax.random.key(0), jnp.zeros((1, 1, d)))["params"]
            found |= _shapes(f"head/{part}", nn.unbox(params))
        else:
            found |= {"head/kernel": (d, outputs), "head/bias": (outputs,)}
    return found


def check_sizes(model: GPTConfig | BertConfig, infos: Mapping[str, Info], names: Mapping[str, str], what: str) -> None:
    """Raise InputError, before anything is built, if the `model` that the file `what` describes does not fit.

    names: current spelling -> stored name, as for `read_leaves`. A model of a million layers, or of a size larger than
    any axis of a tensor, would take minutes or all memory before the listing of its differences.
    """
    numbers = {found[1] for name in names if (found := _LAYER.search(name))}
    if len(numbers) != model.num_layers:
        raise InputError(
            f"{what}: the number of layers must be that of the tensors, {len(numbers)}, got {model.num_layers}; "
            "download the files again"
        )
    shapes = [infos[stored].shape for stored in names.values()]
    longest = max((size for shape in shapes if math.prod(shape) for size in shape), default=0)
    for name in ("vocab_size", "num_positions", "num_types", "width", "feed_forward_width"):
        if getattr(model, name, 0) > longest:
            raise InputError(
                f"{what}: {name} must be the size of a tensor's axis, at most {longest}, got {getattr(model, name)}; "
                "download the files again"
            )


def _shapes(prefix: str, params: object) -> dict[str, Shape]:
    return {f"{prefix}/{name}": tuple(leaf.shape) for name, leaf in named_leaves(params).items()}
