"""Exchange with Hugging Face's `bert`, `openai-gpt` and `gpt2`: config values, tensors and classes, in and out.

Sizes come from the files, not from defaults, and older spellings of tensors are read. Parts are what a checkpoint may
have or lack besides the backbone: `pooler`, `masked_lm`, `next_sentence`, and the heads of fine-tuned models.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxlm.errors import InputError
from jaxlm.interop.published import FLAT, SAME, THREE_BIASES, THREE_LINEARS, Layout, Rule, conv1d, linear
from jaxlm.models import family_of
from jaxlm.models.bert import BertConfig
from jaxlm.models.gpt import GPTConfig

ACTIVATIONS = {"gelu": "gelu_erf", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
MAY_BE_NULL = "n_inner"  # of a config.json; it then has the default
_BUFFERS = re.compile(r"(^|\.)(position_ids|token_type_ids)$|\.attn\.(bias|masked_bias)$")

Classes = Mapping[str, tuple[tuple[str, ...], str | None]]


@dataclass(frozen=True)
class Exchange:
    """A model of Hugging Face and its counterpart here.

    prefix: of its classes' names. config: the class of our config. fields: our fields and their keys in config.json.
    derived: the fields that config.json does not state, from those that it states. activations: its names of them and
    ours. only: settings besides the sizes, and the one value that has a counterpart. written: values of every export.
    root: the prefix of the backbone's tensors. own: the beginnings of their names without it. tied: tensors that repeat
    another one under a second name, in checkpoints saved without sharing. backbone: the rules of a model without a head
    (and without a BERT's pooler). classes: the parts of each class besides the backbone, and the kind of task of its
    fine-tuned head.
    """

    model_type: str
    prefix: str
    config: type
    fields: Mapping[str, str]
    derived: Callable[[Mapping[str, Any]], dict[str, Any]]
    root: str
    own: tuple[str, ...]
    tied: Mapping[str, str]
    backbone: Sequence[Rule]
    classes: Classes
    activations: Mapping[str, str] = field(default_factory=lambda: ACTIVATIONS)
    only: Mapping[str, Any] = field(default_factory=dict)
    written: Mapping[str, Any] = field(default_factory=dict)

    def rules(self, parts: Iterable[str]) -> list[Rule]:
        """Return the rules of a backbone and its parts."""
        return [*self.backbone, *(rule for part in parts for rule in PARTS[part])]

    def modern_names(self, stored: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
        """Return (current spelling -> stored name, second names -> names that they must equal), without buffers.

        Old spellings: gamma and beta for a norm's weight and bias, a `module.` before all names, a missing prefix of
        the backbone, as in models saved without a head. InputError if two names become equal.
        """
        found: dict[str, str] = {}
        for name in stored:
            if _BUFFERS.search(name):
                continue
            modern = name.removeprefix("module.")
            modern = re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", modern))
            if modern.startswith(self.own):
                modern = self.root + modern
            if modern in found:
                raise InputError(f"tensors {found[modern]} and {name} are both {modern}; remove one of them")
            found[modern] = name
        return found, {name: of for name, of in self.tied.items() if name in found}


def exchange_of(model: Any) -> Exchange:
    """Return the exchange of a model. InputError where Hugging Face has no counterpart."""
    if isinstance(model, BertConfig):
        return EXCHANGES["bert"]
    if not isinstance(model, GPTConfig):
        raise InputError(
            f"model must be a family that Hugging Face has, got {family_of(model).title}; export a GPT or a BERT"
        )
    return EXCHANGES["gpt2" if model.norm == "pre" else "openai-gpt"]


def parts_of(names: Iterable[str]) -> list[str]:
    """Return the parts of which a checkpoint has a tensor, in the order of PARTS."""
    present = set(names)
    return [part for part, rules in PARTS.items() if any(name in present for rule in rules for name in rule.theirs)]


def model_from_config(values: Mapping[str, Any], name: str) -> GPTConfig | BertConfig:
    """Return the model that a config.json describes. InputError for a missing size or a setting without counterpart."""
    get = _Reader(values, name)
    model_type = get("model_type", str)
    if model_type not in EXCHANGES:
        raise InputError(f"{name}: model_type must be bert, openai-gpt or gpt2, got {model_type!r}")
    exchange = EXCHANGES[model_type]
    get.only(exchange.only)
    found: dict[str, Any] = {}
    for ours, key in exchange.fields.items():
        if ours == "activation":
            found[ours] = get.activation(key, exchange.activations)
        elif key != MAY_BE_NULL or values.get(key) is not None:
            found[ours] = get(key, type(getattr(exchange.config, ours)))
    model: GPTConfig | BertConfig = exchange.config(**exchange.derived(found) | found)
    model.check()
    return model


def config_from_model(model: GPTConfig | BertConfig) -> dict[str, Any]:
    """Return the config.json values of the model. InputError for features that Hugging Face's model lacks."""
    exchange = exchange_of(model)
    _check_counterpart(model, exchange.model_type)
    values = {key: getattr(model, ours) for ours, key in exchange.fields.items()}
    key = exchange.fields["activation"]
    values[key] = next(name for name, ours in exchange.activations.items() if ours == model.activation)
    return {"model_type": exchange.model_type} | values | dict(exchange.written)


def left_out(model: GPTConfig | BertConfig) -> tuple[str, ...]:
    """Return sentences about fields that `config_from_model` omits because Hugging Face's model lacks them."""
    if isinstance(model, BertConfig) and model.embedding_dropout_rate != model.dropout_rate:
        return (
            f"hidden_dropout_prob is the model's dropout_rate, {model.dropout_rate:g}; embedding_dropout_rate "
            f"{model.embedding_dropout_rate:g} is left out, as Hugging Face's BERT has one rate for both",
        )
    return ()


def _check_counterpart(model: GPTConfig | BertConfig, model_type: str) -> None:
    """Raise InputError for features of a model that Hugging Face's lacks."""
    rules: list[tuple[str, object, bool, str]]
    if isinstance(model, BertConfig):
        rules = [("attention", model.attention, model.attention != "causal", "bidirectional to export a BERT")]
    else:
        whole, width = len(model.adaptive.sizes(model.vocab_size)) == 1, 4 * model.width
        rules = [
            ("tables", model.tables, model.tables == "two", "two to export a GPT"),
            ("adaptive.cutoffs", model.adaptive.cutoffs, whole, "empty to export a GPT"),
        ]
        if model_type != "gpt2":
            inner, kind, of_gpt1 = model.feed_forward_width, model.activation, "to export an openai-gpt"
            rules += [
                ("feed_forward_width", inner, inner == width, f"{width}, four times the width, {of_gpt1}"),
                ("activation", kind, kind == "gelu_tanh", f"gelu_tanh {of_gpt1}"),
            ]
    for name, value, fits, rule in rules:
        if not fits:
            raise InputError(f"model.{name} must be {rule}, got {value}; export another run")


class _Reader:
    """Reader of a config.json that checks the presence and the type of each value."""

    def __init__(self, values: Mapping[str, Any], name: str):
        self.values, self.name = values, name

    def __call__(self, key: str, kind: type) -> Any:
        value = self.values.get(key)
        fits = isinstance(value, (int, float) if kind is float else kind) and not isinstance(value, bool)
        if not fits:
            found = "nothing" if value is None else repr(value)
            raise InputError(f"{self.name}: {key} must be {'a number' if kind is not str else 'a name'}, got {found}")
        try:
            number = kind(value)
        except OverflowError:  # an integer of hundreds of digits
            number = math.inf
        if kind is float and not math.isfinite(number):
            raise InputError(f"{self.name}: {key} must be a finite number, got {number}; download it again")
        return number

    def activation(self, key: str, names: Mapping[str, str]) -> str:
        value = self(key, str)
        if value not in names:
            raise InputError(f"{self.name}: {key} must be one of {', '.join(names)}, got {value!r}")
        return names[value]

    def only(self, expected: Mapping[str, Any]) -> None:
        for key, value in expected.items():
            if self.values.get(key, value) != value:
                raise InputError(f"{self.name}: {key} must be {value!r}, got {self.values[key]!r}")


def _dense(leaf: str, name: str, kernel: Layout, bias: Layout = SAME) -> list[Rule]:
    """Return the rules of a dense layer. leaf: the path before `kernel` and `bias`."""
    return [Rule(f"{leaf}kernel", (f"{name}.weight",), kernel), Rule(f"{leaf}bias", (f"{name}.bias",), bias)]


def _norm(leaf: str, name: str) -> list[Rule]:
    return [Rule(f"{leaf}/scale", (f"{name}.weight",)), Rule(f"{leaf}/bias", (f"{name}.bias",))]


def _bert_backbone() -> list[Rule]:
    tables, layer, blocks = "bert.embeddings.", "bert.encoder.layer.{n}.", "backbone/blocks/"
    triple = tuple(f"{layer}attention.self.{name}" for name in ("query", "key", "value"))
    return [
        Rule("backbone/embeddings/tokens", (f"{tables}word_embeddings.weight",)),
        Rule("backbone/embeddings/positions", (f"{tables}position_embeddings.weight",)),
        Rule("backbone/embeddings/types", (f"{tables}token_type_embeddings.weight",)),
        *_norm("backbone/embeddings/norm", f"{tables}LayerNorm"),
        Rule(f"{blocks}attention/qkv_kernel", tuple(f"{name}.weight" for name in triple), THREE_LINEARS),
        Rule(f"{blocks}attention/qkv_bias", tuple(f"{name}.bias" for name in triple), THREE_BIASES),
        *_dense(f"{blocks}attention/out_", f"{layer}attention.output.dense", linear(2)),
        *_norm(f"{blocks}attention_norm", f"{layer}attention.output.LayerNorm"),
        *_dense(f"{blocks}feed_forward/in_", f"{layer}intermediate.dense", linear()),
        *_dense(f"{blocks}feed_forward/out_", f"{layer}output.dense", linear()),
        *_norm(f"{blocks}feed_forward_norm", f"{layer}output.LayerNorm"),
    ]


def _gpt_backbone(tokens: str, positions: str) -> list[Rule]:
    layer, blocks = "transformer.h.{n}.", "backbone/blocks/"
    return [
        Rule("backbone/embeddings/tokens", (f"transformer.{tokens}.weight",)),
        Rule("backbone/embeddings/positions", (f"transformer.{positions}.weight",)),
        *_dense(f"{blocks}attention/qkv_", f"{layer}attn.c_attn", conv1d(), FLAT),
        *_dense(f"{blocks}attention/out_", f"{layer}attn.c_proj", conv1d(2)),
        *_norm(f"{blocks}attention_norm", f"{layer}ln_1"),
        *_dense(f"{blocks}feed_forward/in_", f"{layer}mlp.c_fc", conv1d()),
        *_dense(f"{blocks}feed_forward/out_", f"{layer}mlp.c_proj", conv1d()),
        *_norm(f"{blocks}feed_forward_norm", f"{layer}ln_2"),
    ]


def _gpt_classes(prefix: str) -> Classes:
    return {
        f"{prefix}Model": ((), None),
        f"{prefix}LMHeadModel": ((), None),
        f"{prefix}DoubleHeadsModel": (("summary",), "choice"),
        f"{prefix}ForSequenceClassification": (("score",), "classification"),
    }


PARTS: dict[str, list[Rule]] = {
    "pooler": _dense("backbone/pooler/", "bert.pooler.dense", linear()),
    "masked_lm": [
        *_dense("head/masked_lm/", "cls.predictions.transform.dense", linear()),
        *_norm("head/masked_lm/norm", "cls.predictions.transform.LayerNorm"),
        Rule("head/masked_lm/output_bias", ("cls.predictions.bias",)),
    ],
    "next_sentence": _dense("head/next_sentence/", "cls.seq_relationship", linear()),
    "classifier": _dense("head/", "classifier", linear()),
    "qa_outputs": _dense("head/", "qa_outputs", linear()),
    "summary": _dense("head/", "multiple_choice_head.summary", linear()),
    "score": [Rule("head/kernel", ("score.weight",), linear())],
}
HEADS = ("classifier", "qa_outputs", "summary", "score")  # parts of fine-tuned models

_GPT_FIELDS = {
    "vocab_size": "vocab_size",
    "num_positions": "n_positions",
    "num_layers": "n_layer",
    "width": "n_embd",
    "num_heads": "n_head",
    "dropout_rate": "resid_pdrop",
    "embedding_dropout_rate": "embd_pdrop",
    "attention_dropout_rate": "attn_pdrop",
    "init_std": "initializer_range",
    "norm_eps": "layer_norm_epsilon",
}

_BERT = Exchange(
    "bert",
    prefix="Bert",
    config=BertConfig,
    fields={
        "vocab_size": "vocab_size",
        "num_positions": "max_position_embeddings",
        "num_types": "type_vocab_size",
        "num_layers": "num_hidden_layers",
        "width": "hidden_size",
        "num_heads": "num_attention_heads",
        "feed_forward_width": "intermediate_size",
        "dropout_rate": "hidden_dropout_prob",
        "attention_dropout_rate": "attention_probs_dropout_prob",
        "activation": "hidden_act",
        "init_std": "initializer_range",
        "norm_eps": "layer_norm_eps",
    },
    derived=lambda found: {"embedding_dropout_rate": found["dropout_rate"]},
    only={
        "position_embedding_type": "absolute",
        "is_decoder": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    },
    written={"position_embedding_type": "absolute"},
    root="bert.",
    own=("embeddings.", "encoder.", "pooler."),
    tied={
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    backbone=_bert_backbone(),
    classes={
        "BertModel": (("pooler",), None),
        "BertForPreTraining": (("pooler", "masked_lm", "next_sentence"), None),
        "BertForMaskedLM": (("masked_lm",), None),
        "BertForNextSentencePrediction": (("pooler", "next_sentence"), None),
        "BertForSequenceClassification": (("pooler", "classifier"), "classification"),
        "BertForMultipleChoice": (("pooler", "classifier"), "choice"),
        "BertForTokenClassification": (("classifier",), "tagging"),
        "BertForQuestionAnswering": (("qa_outputs",), "span"),
    },
)
_GPT1 = Exchange(
    "openai-gpt",
    prefix="OpenAIGPT",
    config=GPTConfig,
    fields=_GPT_FIELDS | {"activation": "afn"},
    derived=lambda found: {"norm": "post", "feed_forward_width": 4 * found["width"]},
    activations={"gelu": "gelu_tanh"},  # its only GELU is the tanh form, whatever its name
    root="transformer.",
    own=("tokens_embed.", "positions_embed.", "h."),
    tied={"lm_head.weight": "transformer.tokens_embed.weight"},
    backbone=_gpt_backbone("tokens_embed", "positions_embed"),
    classes=_gpt_classes("OpenAIGPT"),
)
_GPT2 = Exchange(
    "gpt2",
    prefix="GPT2",
    config=GPTConfig,
    fields=_GPT_FIELDS | {"feed_forward_width": MAY_BE_NULL, "activation": "activation_function"},
    derived=lambda found: {"norm": "pre", "feed_forward_width": 4 * found["width"]},
    only={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    },
    root="transformer.",
    own=("wte.", "wpe.", "h.", "ln_f."),
    tied={"lm_head.weight": "transformer.wte.weight"},
    backbone=[*_gpt_backbone("wte", "wpe"), *_norm("backbone/final_norm", "transformer.ln_f")],
    classes=_gpt_classes("GPT2"),
)
EXCHANGES = {exchange.model_type: exchange for exchange in (_BERT, _GPT1, _GPT2)}
