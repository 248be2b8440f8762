"""jaxlm: pretrain a GPT or a BERT of your own, fine-tune it, and check every number on the way."""

__version__ = "0.1.0"
