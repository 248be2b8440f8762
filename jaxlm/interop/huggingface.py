"""Model directories of Hugging Face: config.json, model.safetensors (or shards), and the tokenizer's files."""

import math
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxlm.errors import InputError
from jaxlm.interop.exchange import EXCHANGES, HEADS, PARTS, Classes, model_from_config, parts_of
from jaxlm.interop.files import TensorFiles, files_fingerprint, read_object
from jaxlm.interop.published import Published, backbone_shapes, check_sizes, part_shapes
from jaxlm.interop.rules import read_leaves
from jaxlm.models.bert import BertConfig
from jaxlm.models.gpt import GPTConfig
from jaxlm.tasks import KINDS, CustomConfig, Task
from jaxlm.tasks.metrics.tags import judged_by
from jaxlm.tasks.task import Columns
from jaxlm.text import Case, Tokenizer, published_tokenizer

# The files that name the longest text of a model, with their field. A tokenizer without a limit has a huge number.
LENGTHS = {"tokenizer_config.json": "model_max_length", "sentence_bert_config.json": "max_seq_length"}
NO_LIMIT = 1_000_000

# Hugging Face's `problem_type` of a sequence classifier by the kind of our task; the third is `regression`.
PROBLEM_TYPES = {"classification": "single_label_classification", "multilabel": "multi_label_classification"}


def read(directory: Path, spec: str, case: Case = "auto") -> Published:
    """Return the model in `directory`. InputError, one line, for damaged or missing files, or without counterpart here.

    case: as in `published_tokenizer`.
    """
    values = read_object(directory / "config.json")
    name = str(directory / "config.json")
    model = model_from_config(values, name)
    exchange = EXCHANGES[values["model_type"]]
    files = TensorFiles(directory)
    names, tied = exchange.modern_names(sorted(files.infos))
    for second, first in tied.items():
        _check_tied(files, names, second, first)
    names = {modern: stored for modern, stored in names.items() if modern not in tied}
    check_sizes(model, files.infos, names, name)
    parts = parts_of(names)
    kernel = next((PARTS[part][0].theirs[0] for part in parts if part in HEADS), None)
    outputs = math.prod(files.infos[names[kernel]].shape[:1]) if kernel is not None and kernel in names else 0
    architecture, kind = _architecture(values, exchange.classes, parts, outputs, name)
    shapes = backbone_shapes(model) | part_shapes(model, parts, outputs)
    leaves = read_leaves(exchange.rules(parts), shapes, files, names, model.num_layers)
    if "score" in parts:
        leaves["head/bias"] = np.zeros(outputs, np.float32)
    used = sorted({files.infos[stored].dtype for stored in names.values()})
    tokenizer, notes = _tokenizer(directory, model, case)
    longest, named_by = _longest(directory)
    if longest is not None and longest < model.num_positions:
        notes.append(
            f"{named_by} is {longest}: texts are read up to that length of the {model.num_positions} positions; "
            "--beyond-length uses the others too"
        )
    if len(used) > 1:
        notes.append(
            f"its tensors are of types {', '.join(used)}: an export writes all of them as F32, which holds them"
        )
    task = None if kind is None else _task(values, kind, outputs, name)
    if task is not None and task.scheme == "none":
        notes.append("its tags are token classes, not entities by B- and I-: the metric is accuracy")
    return Published(
        name=spec,
        model=model,
        leaves=leaves,
        tokenizer=tokenizer,
        fingerprint=files_fingerprint(files.files),
        architecture=architecture,
        dtype=used[0] if len(used) == 1 else "F32",
        parts=tuple(parts),
        task=task,
        config=values,
        notes=tuple(notes),
        longest=longest,
    )


def _longest(directory: Path) -> tuple[int | None, str]:
    """Return the most tokens of a text that the files next to the weights name, and the field; None without a limit."""
    found = []
    for file, field in LENGTHS.items():
        value = read_object(directory / file).get(field) if (directory / file).is_file() else None
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < NO_LIMIT:
            found.append((int(value), f"{field} of {file}"))
    return min(found, default=(None, ""))


def _architecture(
    values: Mapping[str, Any], classes: Classes, parts: list[str], outputs: int, name: str
) -> tuple[str, str | None]:
    """Return the class and, if it is fine-tuned, the kind of its task; in doubt the tensors decide."""
    given = (values.get("architectures") or [None])[0]
    heads = [part for part in parts if part in HEADS]
    # Models are often saved under another class's name than the one whose tensors they have.
    fitting = [cls for cls, (has, _) in classes.items() if set(has) == set(parts)]
    if given not in classes or (set(classes[given][0]) != set(parts) and len(fitting) == 1):
        given = fitting[0] if len(fitting) == 1 or (fitting and not heads) else given
    if given not in classes or not set(heads) <= set(classes[given][0]):
        raise InputError(
            f"{name}: architectures must be one of {', '.join(classes)} that fits the tensors of "
            f"{', '.join(heads) or 'no head'}, got {given!r}"
        )
    kind = classes[given][1] if heads else None
    return given, _of_problem(values, outputs, name) if kind == "classification" else kind


def _of_problem(values: Mapping[str, Any], outputs: int, name: str) -> str:
    """Return the kind of a sequence classifier's task from `problem_type` and the number of outputs."""
    given = values.get("problem_type")
    if given not in (None, "regression", *PROBLEM_TYPES.values()):
        types = ", ".join(("regression", *PROBLEM_TYPES.values()))
        raise InputError(f"{name}: problem_type must be one of {types}, got {given!r}; download it again")
    if given == "regression" and outputs != 1:
        raise InputError(f"{name}: problem_type regression must have one output, got {outputs}; download it again")
    if given == PROBLEM_TYPES["multilabel"]:
        return "multilabel"
    return "regression" if outputs == 1 else "classification"


def _labels(values: Mapping[str, Any], name: str) -> tuple[str, ...] | None:
    named = values.get("id2label")
    if not isinstance(named, dict):
        return None
    labels = tuple(str(named.get(str(number))) for number in range(len(named)))
    if set(named) != {str(number) for number in range(len(named))} or len(set(labels)) != len(labels):
        raise InputError(f"{name}: id2label must give each number from 0 a distinct name; fix the file")
    for label in labels:
        if any(unicodedata.category(character) in ("Cc", "Zl", "Zp") for character in label):
            raise InputError(
                f"{name}: id2label must have names without control characters and line ends, got {label!r:.80}; "
                "fix the file"
            )
    return labels


def _task(values: Mapping[str, Any], kind: str, outputs: int, name: str) -> Task:
    """Return the task of a fine-tuned model: columns as in a custom task, labels as the config spells them."""
    labels: tuple[str, ...] = ()
    if kind in (*PROBLEM_TYPES, "tagging"):
        labels = _labels(values, name) or tuple(f"LABEL_{k}" for k in range(outputs))
    if labels and len(labels) != outputs:
        raise InputError(f"{name}: id2label must have a label per output of the head ({outputs}), got {len(labels)}")
    of_kind: Any = KINDS[kind]
    if of_kind.of_tokens:
        of_tags = judged_by(labels) if labels else {"metrics": ("f1",)}
        return of_kind(name="custom", labels=labels, **of_tags)
    separator = CustomConfig.label_separator if of_kind.has_label_sets else ""
    columns = Columns(texts=(("text", "sentence"),), label=("label",), label_separator=separator)
    metrics = {"regression": ("pearson",)}.get(kind, of_kind.metrics)
    return of_kind(name="custom", metric=metrics[0], metrics=metrics, labels=labels, columns=columns)


def _check_tied(files: TensorFiles, names: Mapping[str, str], second: str, first: str) -> None:
    """Raise InputError unless a second name holds the same numbers: an untied output has no counterpart."""
    if first not in names:
        return
    one, other = files.infos[names[first]], files.infos[names[second]]
    if one.shape != other.shape or not np.array_equal(files.read(names[first]), files.read(names[second])):
        raise InputError(f"{other.file}: {names[second]} differs from {names[first]}; the output must be tied to it")


def _tokenizer(directory: Path, model: GPTConfig | BertConfig, case: Case) -> tuple[Tokenizer | None, list[str]]:
    tokenizer = published_tokenizer(directory, case)
    if tokenizer is None:
        return None, [f"{directory} has no tokenizer: the run can read ids, but not text"]
    if tokenizer.size > model.vocab_size:
        raise InputError(
            f"{directory}: the tokenizer must have at most the model's {model.vocab_size} ids, got {tokenizer.size}; "
            "they do not match"
        )
    return tokenizer, list(tokenizer.notes)
