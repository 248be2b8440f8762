"""Model families, one file each, and the table of them.

A file holds a family's config, its Flax module and its row, a `Family`. To add one, write the file and add it here.
"""

from typing import Annotated, Any

import tyro

from jaxlm.models.bert import BERT, BertConfig
from jaxlm.models.family import Family, Model
from jaxlm.models.gpt import GPT_FAMILY, GPTConfig
from jaxlm.nn.execution import Execution

FAMILIES: dict[str, Family] = {family.name: family for family in (GPT_FAMILY, BERT)}
SIZES: dict[str, Any] = {name: config for family in FAMILIES.values() for name, config in family.sizes.items()}

# A config file decides which family its model is of; the command line offers the fields of that one.
ModelConfig = Annotated[GPTConfig | BertConfig, tyro.conf.AvoidSubcommands]
DEFAULT_MODEL = GPTConfig


def family_of(config: Any) -> Family:
    """Return the family of a model's config."""
    return FAMILIES[config.kind]


def build(config: Any, execution: Execution | None = None) -> Model:
    """Return the model of a config. execution: how it is computed; the defaults unless given."""
    return Model(family_of(config), config, Execution() if execution is None else execution)
