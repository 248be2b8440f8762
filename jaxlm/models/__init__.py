"""The families of models, and what their configs have in common.

A family is a folder: its `__init__.py` describes it, its `model.py` holds the arithmetic. To add a family, write both
and name the folder in `FAMILIES`. This package and the descriptions do not import JAX, so that a command line is
parsed, and the config of a run is checked, without it.
"""

import importlib
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Annotated, Any, Union

import tyro

from jaxlm.models.family import Family
from jaxlm.nn.config import Execution

if TYPE_CHECKING:
    from jaxlm.models.model import Model

    ModelConfig = Any

FAMILIES: dict[str, Family] = {
    name: importlib.import_module(f"jaxlm.models.{name}").FAMILY
    for name in (
        "gpt",
        "bert",
        "lstm",
        "awd_lstm",
        "character_transformer",
        "transformer_xl",
        "t5",
        "elmo",
        "bilstm",
        "mt_lstm",
    )
}
DEFAULT_MODEL: Any = FAMILIES["gpt"].config
SIZES: dict[str, Any] = {name: config for family in FAMILIES.values() for name, config in family.sizes.items()}
if not TYPE_CHECKING:
    # A config file fixes the family of its model; the command line offers the fields of that family.
    _CONFIGS = tuple(family.config for family in FAMILIES.values())
    ModelConfig = Annotated[Union[_CONFIGS], tyro.conf.AvoidSubcommands]  # noqa: UP007


def family_of(config: Any) -> Family:
    """Return the family of a model's config."""
    return FAMILIES[config.kind]


def build(config: Any, execution: Execution | None = None) -> "Model":
    """Return the model of a config. execution: how it is computed; default: `Execution()`. JAX is imported here."""
    from jaxlm.models.model import Model

    return Model(family_of(config), config, Execution() if execution is None else execution)


def dropout_rates(config: Any) -> dict[str, float]:
    """Return the dropout rates of a model's config by the names of their fields."""
    return {field.name: getattr(config, field.name) for field in fields(config) if field.name.endswith("dropout_rate")}


def with_dropout(config: Any, rate: float) -> Any:
    """Return a model's config with every dropout rate at `rate`."""
    return replace(config, **dict.fromkeys(dropout_rates(config), rate))


def without_dropout(config: Any) -> Any:
    """Return a model's config with every dropout rate at 0."""
    return with_dropout(config, 0.0)


def with_vocabulary(config: Any, size: int) -> Any:
    """Return a model's config with `size` ids. The added ones join the last cluster of an adaptive softmax."""
    if config.vocab_size and hasattr(config, "adaptive"):
        # Drop a cutoff that had no effect and would begin a cluster now.
        cutoffs = tuple(at for at in config.adaptive.cutoffs if not config.vocab_size <= at < size)
        config = replace(config, adaptive=replace(config.adaptive, cutoffs=cutoffs))
    return replace(config, vocab_size=size)


def with_wide_feed_forward(config: Any) -> Any:
    """Return a model's config whose feed-forwards, if it has any, are four times as wide as its states."""
    return replace(config, feed_forward_width=4 * config.width) if hasattr(config, "feed_forward_width") else config


def with_length(config: Any, length: int) -> Any:
    """Return a model's config that reads sequences of `length` tokens: with more positions if it has fewer."""
    positions = family_of(config).positions
    return config if positions is None else replace(config, **{positions: max(getattr(config, positions), length)})
