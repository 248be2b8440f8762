"""The shapes of our leaves: what a converted checkpoint must fill."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxlm.checkpoints.trees import named_leaves
from jaxlm.heads import MaskedLMHead, NextSentenceHead
from jaxlm.interop.rules import Shape
from jaxlm.models.bert import Bert, BertConfig
from jaxlm.models.gpt import GPT, GPTConfig


def backbone_shapes(model: GPTConfig | BertConfig) -> dict[str, Shape]:
    """`backbone/…` -> shape, without a BERT's pooler."""
    ids, module = jnp.zeros((1, 1), jnp.int32), Bert(model) if isinstance(model, BertConfig) else GPT(model)
    params = nn.unbox(jax.eval_shape(lambda key: module.init(key, ids, ids)["params"], jax.random.key(0)))
    params.pop("pooler", None)
    return _shapes("backbone", params)


def part_shapes(model: GPTConfig | BertConfig, parts: Sequence[str], outputs: int) -> dict[str, Shape]:
    """Path -> shape of what there is beside the backbone; `outputs` is the width of a fine-tuned head."""
    d = model.width
    found: dict[str, Shape] = {}
    for part in parts:
        if part == "pooler":
            found |= {"backbone/pooler/kernel": (d, d), "backbone/pooler/bias": (d,)}
        elif part in ("masked_lm", "next_sentence"):
            assert isinstance(model, BertConfig)
            head = MaskedLMHead(model) if part == "masked_lm" else NextSentenceHead(model.init_std)
            init = lambda key, head=head: head.init(key, jnp.zeros((1, 1, d)))["params"]  # noqa: E731
            found |= _shapes(f"head/{part}", nn.unbox(jax.eval_shape(init, jax.random.key(0))))
        else:
            found |= {"head/kernel": (d, outputs), "head/bias": (outputs,)}
    return found


def _shapes(prefix: str, params: object) -> dict[str, Shape]:
    return {f"{prefix}/{name}": tuple(leaf.shape) for name, leaf in named_leaves(params).items()}
