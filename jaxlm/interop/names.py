"""Hugging Face's names for the tensors of `bert`, `openai-gpt` and `gpt2`, older spellings included.

Parts are what a checkpoint may have or lack beside the backbone: `pooler`, `masked_lm`, `next_sentence`, and the heads
of fine-tuned models.
"""

import re
from collections.abc import Iterable, Sequence

from jaxlm.errors import InputError
from jaxlm.interop.rules import FLAT, THREE_BIASES, THREE_LINEARS, Rule, conv1d, linear

_BUFFERS = re.compile(r"(^|\.)(position_ids|token_type_ids)$|\.attn\.(bias|masked_bias)$")
# Tensors that repeat another one under a second name, in checkpoints saved without sharing.
_TIED = {
    "bert": {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    "openai-gpt": {"lm_head.weight": "transformer.tokens_embed.weight"},
    "gpt2": {"lm_head.weight": "transformer.wte.weight"},
}
_ROOTS = {
    "bert": ("bert.", ("embeddings.", "encoder.", "pooler.")),
    "openai-gpt": ("transformer.", ("tokens_embed.", "positions_embed.", "h.")),
    "gpt2": ("transformer.", ("wte.", "wpe.", "h.", "ln_f.")),
}

_POOLER = [
    Rule("backbone/pooler/kernel", ("bert.pooler.dense.weight",), linear()),
    Rule("backbone/pooler/bias", ("bert.pooler.dense.bias",)),
]
_MASKED_LM = [
    Rule("head/masked_lm/kernel", ("cls.predictions.transform.dense.weight",), linear()),
    Rule("head/masked_lm/bias", ("cls.predictions.transform.dense.bias",)),
    Rule("head/masked_lm/norm/scale", ("cls.predictions.transform.LayerNorm.weight",)),
    Rule("head/masked_lm/norm/bias", ("cls.predictions.transform.LayerNorm.bias",)),
    Rule("head/masked_lm/output_bias", ("cls.predictions.bias",)),
]
_NEXT_SENTENCE = [
    Rule("head/next_sentence/kernel", ("cls.seq_relationship.weight",), linear()),
    Rule("head/next_sentence/bias", ("cls.seq_relationship.bias",)),
]


def _head(prefix: str) -> list[Rule]:
    return [Rule("head/kernel", (f"{prefix}.weight",), linear()), Rule("head/bias", (f"{prefix}.bias",))]


PARTS: dict[str, list[Rule]] = {
    "pooler": _POOLER,
    "masked_lm": _MASKED_LM,
    "next_sentence": _NEXT_SENTENCE,
    "classifier": _head("classifier"),
    "qa_outputs": _head("qa_outputs"),
    "summary": _head("multiple_choice_head.summary"),
    "score": [Rule("head/kernel", ("score.weight",), linear())],
}

# Parts of fine-tuned models.
HEADS = ("classifier", "qa_outputs", "summary", "score")


def backbone_rules(model_type: str) -> list[Rule]:
    """Return the rules of a model without a head (and without a BERT's pooler)."""
    return _bert() if model_type == "bert" else _gpt(model_type)


def rules_for(model_type: str, parts: Iterable[str]) -> list[Rule]:
    """Return the rules of a backbone and its parts."""
    return backbone_rules(model_type) + [rule for part in parts for rule in PARTS[part]]


def parts_of(names: Iterable[str]) -> list[str]:
    """Return the parts of which a checkpoint has a tensor, in the order of PARTS."""
    present = set(names)
    return [part for part, rules in PARTS.items() if any(name in present for rule in rules for name in rule.theirs)]


def modern_names(stored: Sequence[str], model_type: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return (current spelling -> stored name, second names -> names that they must equal), without buffers.

    Old spellings: gamma and beta for a norm's weight and bias, a `module.` before all names, a missing prefix of the
    backbone, as in models saved without a head. InputError if two names become equal.
    """
    root, own = _ROOTS[model_type]
    found: dict[str, str] = {}
    for name in stored:
        if _BUFFERS.search(name):
            continue
        modern = name.removeprefix("module.")
        modern = re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", modern))
        if modern.startswith(own):
            modern = root + modern
        if modern in found:
            raise InputError(f"tensors {found[modern]} and {name} are both {modern}; remove one of them")
        found[modern] = name
    return found, {name: of for name, of in _TIED[model_type].items() if name in found}


def _bert() -> list[Rule]:
    tables, layer = "bert.embeddings.", "bert.encoder.layer.{n}."
    triple = tuple(f"{layer}attention.self.{name}" for name in ("query", "key", "value"))
    rules = [
        Rule("backbone/embeddings/tokens", (f"{tables}word_embeddings.weight",)),
        Rule("backbone/embeddings/positions", (f"{tables}position_embeddings.weight",)),
        Rule("backbone/embeddings/types", (f"{tables}token_type_embeddings.weight",)),
        *_norm("backbone/embeddings/norm", f"{tables}LayerNorm"),
        Rule("backbone/blocks/attention/qkv_kernel", tuple(f"{name}.weight" for name in triple), THREE_LINEARS),
        Rule("backbone/blocks/attention/qkv_bias", tuple(f"{name}.bias" for name in triple), THREE_BIASES),
        Rule("backbone/blocks/attention/out_kernel", (f"{layer}attention.output.dense.weight",), linear(2)),
        Rule("backbone/blocks/attention/out_bias", (f"{layer}attention.output.dense.bias",)),
        *_norm("backbone/blocks/attention_norm", f"{layer}attention.output.LayerNorm"),
        Rule("backbone/blocks/feed_forward/in_kernel", (f"{layer}intermediate.dense.weight",), linear()),
        Rule("backbone/blocks/feed_forward/in_bias", (f"{layer}intermediate.dense.bias",)),
        Rule("backbone/blocks/feed_forward/out_kernel", (f"{layer}output.dense.weight",), linear()),
        Rule("backbone/blocks/feed_forward/out_bias", (f"{layer}output.dense.bias",)),
        *_norm("backbone/blocks/feed_forward_norm", f"{layer}output.LayerNorm"),
    ]
    return rules


def _gpt(model_type: str) -> list[Rule]:
    first = model_type == "openai-gpt"
    tokens, positions = ("tokens_embed", "positions_embed") if first else ("wte", "wpe")
    layer = "transformer.h.{n}."
    rules = [
        Rule("backbone/embeddings/tokens", (f"transformer.{tokens}.weight",)),
        Rule("backbone/embeddings/positions", (f"transformer.{positions}.weight",)),
        Rule("backbone/blocks/attention/qkv_kernel", (f"{layer}attn.c_attn.weight",), conv1d()),
        Rule("backbone/blocks/attention/qkv_bias", (f"{layer}attn.c_attn.bias",), FLAT),
        Rule("backbone/blocks/attention/out_kernel", (f"{layer}attn.c_proj.weight",), conv1d(2)),
        Rule("backbone/blocks/attention/out_bias", (f"{layer}attn.c_proj.bias",)),
        *_norm("backbone/blocks/attention_norm", f"{layer}ln_1"),
        Rule("backbone/blocks/feed_forward/in_kernel", (f"{layer}mlp.c_fc.weight",), conv1d()),
        Rule("backbone/blocks/feed_forward/in_bias", (f"{layer}mlp.c_fc.bias",)),
        Rule("backbone/blocks/feed_forward/out_kernel", (f"{layer}mlp.c_proj.weight",), conv1d()),
        Rule("backbone/blocks/feed_forward/out_bias", (f"{layer}mlp.c_proj.bias",)),
        *_norm("backbone/blocks/feed_forward_norm", f"{layer}ln_2"),
    ]
    return rules if first else rules + _norm("backbone/final_norm", "transformer.ln_f")


def _norm(leaf: str, name: str) -> list[Rule]:
    return [Rule(f"{leaf}/scale", (f"{name}.weight",)), Rule(f"{leaf}/bias", (f"{name}.bias",))]
