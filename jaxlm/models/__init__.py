"""Model families, one file each, and the table of them.

A file holds a family's config, its Flax module and its row, a `Family`. To add a family, write its file and list it
here.
"""

from typing import Annotated, Any

import tyro

from jaxlm.models import bert, gpt, lstm
from jaxlm.models.bert import BertConfig
from jaxlm.models.family import Family, Model
from jaxlm.models.gpt import GPTConfig
from jaxlm.models.lstm import LSTMConfig
from jaxlm.nn.execution import Execution

FAMILIES: dict[str, Family] = {family.name: family for family in (gpt.FAMILY, bert.FAMILY, lstm.FAMILY)}
SIZES: dict[str, Any] = {name: config for family in FAMILIES.values() for name, config in family.sizes.items()}

# A config file fixes the family of its model; the command line offers the fields of that family.
ModelConfig = Annotated[GPTConfig | BertConfig | LSTMConfig, tyro.conf.AvoidSubcommands]
DEFAULT_MODEL = GPTConfig


def family_of(config: Any) -> Family:
    """Return the family of a model's config."""
    return FAMILIES[config.kind]


def build(config: Any, execution: Execution | None = None) -> Model:
    """Return the model of a config. execution: how it is computed; default: `Execution()`."""
    return Model(family_of(config), config, Execution() if execution is None else execution)
