"""Sources of published models, by the specifications of a command line."""

from pathlib import Path
from typing import Any

from jaxlm.errors import InputError
from jaxlm.hub import model_directory
from jaxlm.interop import google, huggingface, openai
from jaxlm.interop.published import Published
from jaxlm.text import Case

_READERS = {"hf:": huggingface.read, "openai:": openai.read, "google:": google.read}
KINDS = tuple(_READERS)


def tokenizer_spec(start: str, model: Any) -> str:
    """Return the `--tokenizer` specification for published weights; "" for a run, whose store has the tokenizer.

    start: a spec, one of KINDS and a directory. model: the config of the weights.
    """
    kind, _, location = start.partition(":")
    if kind == "openai":
        return f"{'gpt2' if model.norm == 'pre' else 'gpt1'}:{location}"
    return {"hf": start, "google": f"wordpiece:{location}/vocab.txt"}.get(kind, "")


def read_published(spec: str, case: Case = "auto") -> Published:
    """Return the model that `spec` names: one of KINDS and a directory, or hf: and the name of a model on the Hub.

    InputError, one line, if it is unreadable.

    case: whether a WordPiece vocabulary keeps the case of text; auto: from the files beside it.
    """
    kind, colon, location = spec.partition(":")
    directory = model_directory(location) if kind == "hf" else Path(location).expanduser()
    if kind + colon not in _READERS or not location or not directory.is_dir():
        raise InputError(
            f"{spec}: {directory} is not a directory; give one of {', '.join(KINDS)} and the directory of a model's "
            "files"
        )
    return _READERS[kind + colon](directory, spec, case)
