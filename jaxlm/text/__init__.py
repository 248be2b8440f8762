"""Tokenizers: text to ids and back."""

from jaxlm.text.exporting import published_files
from jaxlm.text.piece_models import train_sentencepiece
from jaxlm.text.specs import load_tokenizer, published_tokenizer, tokenizer_from_spec
from jaxlm.text.tokenizer import ROLES, Tokenizer
from jaxlm.text.wordpiece import train_wordpiece

__all__ = [
    "ROLES",
    "Tokenizer",
    "load_tokenizer",
    "published_files",
    "published_tokenizer",
    "tokenizer_from_spec",
    "train_sentencepiece",
    "train_wordpiece",
]
