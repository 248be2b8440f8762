"""The table of the model families."""

from jaxlm.models import awd_lstm, bert, character_transformer, gpt, lstm
from jaxlm.models.family import Family

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (gpt.FAMILY, bert.FAMILY, lstm.FAMILY, awd_lstm.FAMILY, character_transformer.FAMILY)
}
