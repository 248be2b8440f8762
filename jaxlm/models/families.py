"""The table of the model families."""

from jaxlm.models import awd_lstm, bert, gpt, lstm, transformer_xl
from jaxlm.models.family import Family

FAMILIES: dict[str, Family] = {
    family.name: family for family in (gpt.FAMILY, bert.FAMILY, lstm.FAMILY, awd_lstm.FAMILY, transformer_xl.FAMILY)
}
