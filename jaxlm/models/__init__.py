"""Model families and the table of them.

A family is a config, `NAME_config.py`, and beside it `NAME.py` with its Flax module and its row, a `Family`. To add a
family, write both files and list it here and in `families.py`. This package and the configs do not import JAX, so that
a command line is parsed without it; the families are imported on first use.
"""

import importlib
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from jaxlm.models import (
    awd_lstm_config,
    bert_config,
    character_transformer_config,
    gpt_config,
    lstm_config,
    transformer_xl_config,
)
from jaxlm.models.awd_lstm_config import AWDLSTMConfig
from jaxlm.models.bert_config import BertConfig
from jaxlm.models.character_transformer_config import CharacterTransformerConfig
from jaxlm.models.gpt_config import GPTConfig
from jaxlm.models.lstm_config import LSTMConfig
from jaxlm.models.transformer_xl_config import TransformerXLConfig
from jaxlm.nn.config import Context, Execution

if TYPE_CHECKING:
    from jaxlm.models.families import FAMILIES
    from jaxlm.models.family import Family, Model

__all__ = [
    "CONFIGS",
    "DEFAULT_MODEL",
    "FAMILIES",
    "SIZES",
    "AWDLSTMConfig",
    "BertConfig",
    "CharacterTransformerConfig",
    "Family",
    "GPTConfig",
    "LSTMConfig",
    "Model",
    "ModelConfig",
    "TransformerXLConfig",
    "build",
    "context_of",
    "dropout_rates",
    "family_of",
    "with_vocabulary",
    "without_dropout",
]

# A config file fixes the family of its model; the command line offers the fields of that family.
ModelConfig = Annotated[
    GPTConfig | BertConfig | LSTMConfig | AWDLSTMConfig | CharacterTransformerConfig | TransformerXLConfig,
    tyro.conf.AvoidSubcommands,
]
DEFAULT_MODEL = GPTConfig
SIZES: dict[str, Any] = {
    **gpt_config.SIZES,
    **bert_config.SIZES,
    **lstm_config.SIZES,
    **awd_lstm_config.SIZES,
    **character_transformer_config.SIZES,
    **transformer_xl_config.SIZES,
}
_CONTEXTS: dict[Any, Context] = {
    GPTConfig: gpt_config.CONTEXT,
    BertConfig: bert_config.CONTEXT,
    LSTMConfig: lstm_config.CONTEXT,
    AWDLSTMConfig: awd_lstm_config.CONTEXT,
    CharacterTransformerConfig: character_transformer_config.CONTEXT,
    TransformerXLConfig: transformer_xl_config.CONTEXT,
}
CONFIGS: dict[str, Any] = {config.kind: config for config in _CONTEXTS}

_MODULES = {"FAMILIES": "families", "Family": "family", "Model": "family"}


def family_of(config: Any) -> "Family":
    """Return the family of a model's config."""
    from jaxlm.models.families import FAMILIES

    return FAMILIES[config.kind]


def context_of(config: Any) -> Context:
    """Return the tokens that a state depends on in the family of a config, as `family_of(config).context`."""
    return _CONTEXTS[type(config)]


def build(config: Any, execution: Execution | None = None) -> "Model":
    """Return the model of a config. execution: how it is computed; default: `Execution()`."""
    from jaxlm.models.family import Model

    return Model(family_of(config), config, Execution() if execution is None else execution)


def dropout_rates(config: Any) -> dict[str, float]:
    """Return the dropout rates of a model's config by the names of their fields."""
    return {field.name: getattr(config, field.name) for field in fields(config) if field.name.endswith("dropout_rate")}


def without_dropout(config: Any) -> Any:
    """Return a model's config with every dropout rate at 0."""
    return replace(config, **dict.fromkeys(dropout_rates(config), 0.0))


def with_vocabulary(config: Any, size: int) -> Any:
    """Return a model's config with `size` ids. The added ones join the last cluster of an adaptive softmax."""
    if config.vocab_size and hasattr(config, "adaptive"):
        # Drop a cutoff that had no effect and would begin a cluster now.
        cutoffs = tuple(at for at in config.adaptive.cutoffs if not config.vocab_size <= at < size)
        config = replace(config, adaptive=replace(config.adaptive, cutoffs=cutoffs))
    return replace(config, vocab_size=size)


def __getattr__(name: str) -> Any:
    """Import the families on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module 'jaxlm.models' has no attribute {name!r}")
    return getattr(importlib.import_module(f"jaxlm.models.{_MODULES[name]}"), name)
