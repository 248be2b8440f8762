"""Detokenizers: published tokenized texts as plain text, and back."""


def plain_text(text: str) -> str:
    """Return a text in the Penn Treebank's tokens as plain text."""
    return text
