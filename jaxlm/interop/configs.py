"""Conversion between Hugging Face's config.json and our model configs: sizes come from the file, not from defaults."""

import math
from collections.abc import Mapping
from typing import Any

from jaxlm.errors import InputError
from jaxlm.models import family_of
from jaxlm.models.bert import BertConfig
from jaxlm.models.gpt import GPTConfig
from jaxlm.nn.pointwise import ActivationName

ACTIVATIONS: dict[str, ActivationName] = {
    "gelu": "gelu_erf",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
# openai-gpt's only GELU is the tanh form, whatever its name.
ACTIVATIONS_GPT1: dict[str, ActivationName] = {"gelu": "gelu_tanh"}

# Settings of a config beside its sizes, and the one value that has a counterpart here.
_BERT_ONLY: Mapping[str, Any] = {
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}
_GPT2_ONLY: Mapping[str, Any] = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}


def model_from_config(values: Mapping[str, Any], name: str) -> GPTConfig | BertConfig:
    """Return the model that a config.json describes. InputError for a missing size or a setting without counterpart."""
    get = _Reader(values, name)
    model_type = get("model_type", str)
    if model_type == "bert":
        get.only(_BERT_ONLY)
        rate = get("hidden_dropout_prob", float)
        model: GPTConfig | BertConfig = BertConfig(
            vocab_size=get("vocab_size", int),
            num_positions=get("max_position_embeddings", int),
            num_types=get("type_vocab_size", int),
            num_layers=get("num_hidden_layers", int),
            width=get("hidden_size", int),
            num_heads=get("num_attention_heads", int),
            feed_forward_width=get("intermediate_size", int),
            dropout_rate=rate,
            embedding_dropout_rate=rate,
            attention_dropout_rate=get("attention_probs_dropout_prob", float),
            activation=get.activation("hidden_act", ACTIVATIONS),
            init_std=get("initializer_range", float),
            norm_eps=get("layer_norm_eps", float),
        )
    elif model_type in ("openai-gpt", "gpt2"):
        first, width = model_type == "openai-gpt", get("n_embd", int)
        get.only({} if first else _GPT2_ONLY)
        model = GPTConfig(
            vocab_size=get("vocab_size", int),
            num_positions=get("n_positions", int),
            num_layers=get("n_layer", int),
            width=width,
            num_heads=get("n_head", int),
            feed_forward_width=4 * width if first or values.get("n_inner") is None else get("n_inner", int),
            dropout_rate=get("resid_pdrop", float),
            embedding_dropout_rate=get("embd_pdrop", float),
            attention_dropout_rate=get("attn_pdrop", float),
            norm="post" if first else "pre",
            activation=get.activation("afn", ACTIVATIONS_GPT1)
            if first
            else get.activation("activation_function", ACTIVATIONS),
            init_std=get("initializer_range", float),
            norm_eps=get("layer_norm_epsilon", float),
        )
    else:
        raise InputError(f"{name}: model_type must be bert, openai-gpt or gpt2, got {model_type!r}")
    model.check()
    return model


def model_type_of(model: Any) -> str:
    """Return Hugging Face's name for the architecture. InputError where it has none."""
    if isinstance(model, BertConfig):
        return "bert"
    if not isinstance(model, GPTConfig):
        raise InputError(f"Hugging Face has no counterpart of {family_of(model).title}; it cannot be exported")
    return "gpt2" if model.norm == "pre" else "openai-gpt"


def left_out(model: GPTConfig | BertConfig) -> tuple[str, ...]:
    """Return sentences about fields that `config_from_model` omits because Hugging Face's model lacks them."""
    if isinstance(model, BertConfig) and model.embedding_dropout_rate != model.dropout_rate:
        return (
            f"hidden_dropout_prob is the model's dropout_rate, {model.dropout_rate:g}; embedding_dropout_rate "
            f"{model.embedding_dropout_rate:g} is left out, as Hugging Face's BERT has one rate for both",
        )
    return ()


def config_from_model(model: GPTConfig | BertConfig) -> dict[str, Any]:
    """Return the config.json values of the model. InputError for features that Hugging Face's model lacks."""
    model_type = model_type_of(model)
    if isinstance(model, BertConfig):
        if model.attention == "causal":
            raise InputError("a left-to-right BERT has no counterpart in Hugging Face's models; it is not exported")
        return {
            "model_type": model_type,
            "vocab_size": model.vocab_size,
            "max_position_embeddings": model.num_positions,
            "type_vocab_size": model.num_types,
            "num_hidden_layers": model.num_layers,
            "hidden_size": model.width,
            "num_attention_heads": model.num_heads,
            "intermediate_size": model.feed_forward_width,
            "hidden_dropout_prob": model.dropout_rate,
            "attention_probs_dropout_prob": model.attention_dropout_rate,
            "hidden_act": _spelt(model.activation, ACTIVATIONS),
            "initializer_range": model.init_std,
            "layer_norm_eps": model.norm_eps,
            "position_embedding_type": "absolute",
        }
    if model.tables == "one":
        raise InputError("model.tables one: Hugging Face's models have tokens alone in the softmax; it is not exported")
    if len(model.adaptive.sizes(model.vocab_size)) > 1:
        raise InputError("model.adaptive.cutoffs: Hugging Face's models have a full softmax; it is not exported")
    values = {
        "model_type": model_type,
        "vocab_size": model.vocab_size,
        "n_positions": model.num_positions,
        "n_layer": model.num_layers,
        "n_embd": model.width,
        "n_head": model.num_heads,
        "resid_pdrop": model.dropout_rate,
        "embd_pdrop": model.embedding_dropout_rate,
        "attn_pdrop": model.attention_dropout_rate,
        "initializer_range": model.init_std,
        "layer_norm_epsilon": model.norm_eps,
    }
    if model_type == "gpt2":
        values["n_inner"] = model.feed_forward_width
        return values | {"activation_function": _spelt(model.activation, ACTIVATIONS)}
    if model.feed_forward_width != 4 * model.width:
        raise InputError(
            f"model.feed_forward_width {model.feed_forward_width}: Hugging Face's openai-gpt has four times the width, "
            f"{4 * model.width}"
        )
    if model.activation != "gelu_tanh":
        raise InputError("model.activation gelu_erf: Hugging Face's openai-gpt has only the tanh form of GELU")
    return values | {"afn": "gelu"}


def _spelt(activation: str, names: Mapping[str, str]) -> str:
    return next(name for name, ours in names.items() if ours == activation)


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

    def activation(self, key: str, names: Mapping[str, ActivationName]) -> ActivationName:
        value = self(key, str)
        if value not in names:
            raise InputError(f"{self.name}: {key} must be one of {', '.join(names)}, got {value!r}")
        return names[value]

    def only(self, expected: Mapping[str, Any]) -> None:
        for key, value in expected.items():
            if self.values.get(key, value) != value:
                raise InputError(f"{self.name}: {key} must be {value!r}, got {self.values[key]!r}")
