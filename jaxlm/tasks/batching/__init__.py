"""Examples as token sequences, and these as batches. FORMATS: the input formats, by the names that families give."""

from collections.abc import Mapping

from jaxlm.tasks.batching.bert_inputs import BERT
from jaxlm.tasks.batching.gpt1_inputs import GPT1
from jaxlm.tasks.batching.input_format import InputFormat

FORMATS: dict[str, InputFormat] = {"gpt1": GPT1, "bert": BERT}


def format_for(specials: Mapping[str, int]) -> str:
    """Return the name of the format for a vocabulary with these special tokens: an encoder's if it has them all."""
    return next((name for name, one in FORMATS.items() if one.needs and set(one.needs) <= specials.keys()), "gpt1")
