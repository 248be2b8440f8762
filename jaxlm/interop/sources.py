"""Sources of published models, by the specifications of a command line."""

from pathlib import Path
from typing import Any

from jaxlm.bounded_read import read_object
from jaxlm.errors import InputError
from jaxlm.hub import NAME, model_directory
from jaxlm.interop import huggingface
from jaxlm.interop.published import Published
from jaxlm.interop.releases import read_google, read_openai
from jaxlm.text import Case
from jaxlm.wording import similar_directory

_READERS = {"hf:": huggingface.read, "openai:": read_openai, "google:": read_google}
KINDS = tuple(_READERS)
_FILES = {"openai:": ("hparams.json", "params_shapes.json"), "google:": ("bert_config.json",)}


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

    case: whether a WordPiece vocabulary keeps the case of text; auto: from the files next to it.
    """
    kind, colon, location = spec.partition(":")
    if kind + colon not in _READERS:
        here = f"write hf:{spec}" if Path(spec).is_dir() else "write hf:DIR"
        raise InputError(f"a published model must begin with one of {', '.join(KINDS)}, got {spec}; {here}")
    directory = model_directory(location) if kind == "hf" else Path(location).expanduser()
    if not location or not directory.is_dir():
        raise InputError(f"{spec}: {location or 'nothing'} is not a directory; give the directory of a model's files")
    return _READERS[kind + colon](directory, spec, case)


def check_run_path(path: Path) -> None:
    """Raise InputError for a path that is no directory, for published weights, which are no run, and for those that are
    named without their kind.
    """
    if str(path).startswith(KINDS):
        raise InputError(
            f"{path} must be a run, got a published model, which has no checkpoints; give a run, as "
            f"python -m jaxlm.convert import {path} --run RUN makes one"
        )
    if not path.is_dir():
        of_hub = NAME.fullmatch(str(path)) and (len(path.parts) == 1 or not path.parent.is_dir())
        made = "give one that jaxlm.pretrain or jaxlm.finetune made"
        otherwise = f"{made}, or hf:{path} for a model of the Hugging Face Hub" if of_hub else made
        raise InputError(f"{path}: no such run directory; {similar_directory(path, 'config.json', otherwise)}")
    if (kind := _kind_of(path)) is not None:
        raise InputError(f"{path} must be a run, got the files of a published model; give {kind}{path}")


def _kind_of(directory: Path) -> str | None:
    """Return the kind of published weights that a directory holds, or None."""
    if (directory / "config.json").is_file():
        try:
            values = read_object(directory / "config.json")
        except (OSError, ValueError):
            return None
        return "hf:" if "model_type" in values or "architectures" in values else None
    return next((kind for kind, names in _FILES.items() if any((directory / name).is_file() for name in names)), None)
