"""The shapes of our leaves, which a converted checkpoint must fill."""

import math
import re
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxlm.errors import InputError
from jaxlm.interop.rules import Shape
from jaxlm.interop.tensors import Info
from jaxlm.models import build
from jaxlm.models.bert import BertConfig
from jaxlm.models.bert.model import MaskedLMHead, NextSentenceHead
from jaxlm.models.gpt import GPTConfig
from jaxlm.runs.trees import named_leaves

_LAYER = re.compile(r"\.(?:layer|h)\.(\d+)\.")  # in the names of all three kinds of models


def backbone_shapes(model: GPTConfig | BertConfig) -> dict[str, Shape]:
    """Return `backbone/…` -> shape, without a BERT's pooler."""
    params = nn.unbox(jax.eval_shape(build(model).init, jax.random.key(0)))
    params.pop("pooler", None)
    return _shapes("backbone", params)


def part_shapes(model: GPTConfig | BertConfig, parts: Sequence[str], outputs: int) -> dict[str, Shape]:
    """Return path -> shape of the parts beside the backbone; `outputs` is the output size of a fine-tuned head."""
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
