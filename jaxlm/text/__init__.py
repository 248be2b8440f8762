"""Tokenizers: conversion of text to ids and back."""

from jaxlm.text.exporting import OWN, Inputs, padding, published_files
from jaxlm.text.piece_models import train_sentencepiece
from jaxlm.text.published import load_tokenizer, published_tokenizer, wordpiece_tokenizer
from jaxlm.text.specs import tokenizer_from_spec
from jaxlm.text.tokenizer import ROLES, Tokenizer
from jaxlm.text.units import bytes_tokenizer, train_characters, train_words
from jaxlm.text.wordpiece import Case, train_wordpiece

__all__ = [
    "OWN",
    "ROLES",
    "Case",
    "Inputs",
    "Tokenizer",
    "bytes_tokenizer",
    "load_tokenizer",
    "padding",
    "published_files",
    "published_tokenizer",
    "tokenizer_from_spec",
    "train_characters",
    "train_sentencepiece",
    "train_wordpiece",
    "train_words",
    "wordpiece_tokenizer",
]
