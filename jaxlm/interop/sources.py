"""Where published models are read from, by what a command line names."""

from pathlib import Path
from typing import Any

from jaxlm.errors import InputError
from jaxlm.interop import google, huggingface, openai
from jaxlm.interop.published import Published
from jaxlm.text import Case

_READERS = {"hf:": huggingface.read, "openai:": openai.read, "google:": google.read}
KINDS = tuple(_READERS)


def tokenizer_spec(start: str, model: Any) -> str:
    """Return what `--tokenizer` names the tokenizer of published weights by; "" for a run, whose store has it.

    start: a spec, one of KINDS and a directory. model: the config of the weights.
    """
    kind, _, place = start.partition(":")
    if kind == "openai":
        return f"{'gpt2' if model.norm == 'pre' else 'gpt1'}:{place}"
    return {"hf": start, "google": f"wordpiece:{place}/vocab.txt"}.get(kind, "")


def read_published(spec: str, case: Case = "auto") -> Published:
    """The model that `spec`, one of KINDS and a directory, names. InputError, one line, where it cannot be read.

    case: whether a WordPiece vocabulary keeps the case of text; auto: as what stands beside it says.
    """
    kind, colon, place = spec.partition(":")
    directory = Path(place).expanduser()
    if kind + colon not in _READERS or not place or not directory.is_dir():
        raise InputError(
            f"{spec}: {directory} is no directory; give hf:, openai: or google: and that of a model's files"
        )
    return _READERS[kind + colon](directory, spec, case)
