"""Examples as token sequences, and these as batches. FORMATS: the input formats, by the names that families give."""

from jaxlm.tasks.batching.bert_inputs import BERT
from jaxlm.tasks.batching.gpt1_inputs import GPT1
from jaxlm.tasks.batching.input_format import InputFormat

FORMATS: dict[str, InputFormat] = {"bert": BERT, "gpt1": GPT1}  # those first that need more special tokens
