"""The table of the model families."""

from jaxlm.models import awd_lstm, bert, character_transformer, gpt, lstm, transformer_xl
from jaxlm.models.family import Family

_MODULES = (gpt, bert, lstm, awd_lstm, character_transformer, transformer_xl)
FAMILIES: dict[str, Family] = {module.FAMILY.name: module.FAMILY for module in _MODULES}
