"""Export of a model to a directory that Hugging Face's `from_pretrained` loads, without missing or extra tensors."""

import filecmp
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxlm.errors import InputError
from jaxlm.files import rename_synced, write_file, write_json
from jaxlm.interop.exchange import Exchange, config_from_model, exchange_of, left_out
from jaxlm.interop.files import FILE, FLOATS, write_tensors
from jaxlm.interop.huggingface import PROBLEM_TYPES
from jaxlm.interop.rules import planned_tensors
from jaxlm.models.bert import BertConfig
from jaxlm.models.gpt import GPTConfig
from jaxlm.tasks import Task
from jaxlm.tasks.input_formats import ENCODER_ROLES, ROLES
from jaxlm.tasks.kinds.texts import DEFAULT_THRESHOLD
from jaxlm.text import OWN, Inputs, Tokenizer, padding, published_files

_TORCH = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class Export:
    """A planned export: the class, the parts besides the backbone, the leaves by our paths, and notes."""

    model: GPTConfig | BertConfig
    architecture: str
    parts: tuple[str, ...]
    leaves: Mapping[str, np.ndarray]
    config: dict[str, Any]
    notes: tuple[str, ...] = ()

    def inputs(self, tokenizer: Tokenizer) -> Inputs:
        """Return the special tokens around the texts that the model reads."""
        roles = set(tokenizer.specials)
        if isinstance(self.model, BertConfig):
            return "encoder" if set(ENCODER_ROLES) <= roles else "plain"
        return "decoder" if self.parts and set(ROLES) <= roles else "plain"


def planned_export(
    model: GPTConfig | BertConfig,
    leaves: Mapping[str, np.ndarray],
    task: Task | None,
    *,
    architecture: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> Export:
    """Plan how a run's parameters map to one of Hugging Face's classes.

    architecture, config: the class and config.json that the run was imported from, to which it is converted back.
    InputError for models without counterpart: a left-to-right BERT, a BiLSTM head, a decoder's head that sums two
    sequences.
    """
    exchange, heads = exchange_of(model), {name.split("/")[1] for name in leaves if name.startswith("head/")}
    if task is None:
        name, parts = _pretrained(exchange, heads, architecture)
        known = {rule.leaf for rule in exchange.rules(parts)}
        kept = {leaf: values for leaf, values in leaves.items() if leaf in known}
        dropped = sorted({"/".join(leaf.split("/")[:2]) for leaf in leaves if leaf not in kept})
        notes = (f"left out, as {name} has none: {', '.join(dropped)}",) if dropped else ()
        return Export(model, name, parts, kept, dict(config or {}), (*notes, *left_out(model)))
    if task.special_tokens != "gpt1":
        raise InputError(
            f"special_tokens must be gpt1 to export a fine-tuned decoder, got {task.special_tokens}; fine-tune it with "
            "--special-tokens gpt1"
        )
    if heads != {"kernel", "bias"}:
        raise InputError(
            f"the head must have the parameters kernel and bias to be exported, got {', '.join(sorted(heads))}; "
            "export another run"
        )
    found = _tuned(model, exchange, dict(leaves), task)
    if task.kind == "regression" and "id2label" not in (config or {}):
        found = replace(found, config=found.config | {"id2label": {"0": "score"}, "label2id": {"score": 0}})
    return replace(found, config=dict(config or {}) | found.config, notes=(*found.notes, *left_out(model)))


def _pretrained(exchange: Exchange, heads: set[str], architecture: str | None) -> tuple[str, tuple[str, ...]]:
    """Return the class of a pretrained model, and its parts besides the backbone."""
    name = f"{exchange.prefix}LMHeadModel"
    if architecture is not None and architecture in exchange.classes:
        name = architecture
    elif name not in exchange.classes:
        name = "BertForPreTraining" if "next_sentence" in heads else "BertForMaskedLM" if heads else "BertModel"
    return name, exchange.classes[name][0]


def _tuned(model: GPTConfig | BertConfig, exchange: Exchange, leaves: dict[str, np.ndarray], task: Task) -> Export:
    config: dict[str, Any] = {}
    notes: list[str] = []
    if task.kind == "regression":  # the head learns standardized scores; the export gives scores in the files' unit
        leaves["head/kernel"] = leaves["head/kernel"] * np.float32(task.deviation)
        leaves["head/bias"] = leaves["head/bias"] * np.float32(task.deviation) + np.float32(task.mean)
        config["problem_type"] = "regression"
    if task.kind in (*PROBLEM_TYPES, "tagging"):
        config["id2label"] = {str(k): label for k, label in enumerate(task.labels)}
        config["label2id"] = {label: k for k, label in enumerate(task.labels)}
    if task.kind in PROBLEM_TYPES:
        config["problem_type"] = PROBLEM_TYPES[task.kind]
    if task.kind == "multilabel":
        notes.append(f"a label is predicted if its probability is at least {task.threshold or DEFAULT_THRESHOLD}")
    if isinstance(model, BertConfig):
        name = {
            "choice": "BertForMultipleChoice",
            "tagging": "BertForTokenClassification",
            "span": "BertForQuestionAnswering",
        }.get(task.kind, "BertForSequenceClassification")
        parts = exchange.classes[name][0]
        if "pooler" not in parts:
            leaves = {leaf: values for leaf, values in leaves.items() if not leaf.startswith("backbone/pooler/")}
        return Export(model, name, parts, leaves, config, tuple(notes))
    prefix = exchange.prefix
    if task.kind == "choice":
        choices = {"summary_type": "cls_index", "summary_use_proj": True, "summary_activation": None}
        choices |= {"summary_proj_to_labels": True, "summary_first_dropout": 0.1}
        return Export(model, f"{prefix}DoubleHeadsModel", ("summary",), leaves, config | choices, tuple(notes))
    if task.form == "similarity":
        raise InputError(
            "task must have inputs that a decoder reads in one order to be exported, got "
            f"{task.name}, whose pairs are read in both orders; fine-tune a BERT on it"
        )
    if leaves["head/bias"].any():
        leaves = _folded(leaves, "final_norm" if model.norm == "pre" else "blocks/feed_forward_norm")
        notes.append(f"{prefix}ForSequenceClassification has no bias: it was folded into the bias of the last norm")
    leaves.pop("head/bias")
    return Export(model, f"{prefix}ForSequenceClassification", ("score",), leaves, config, tuple(notes))


def _folded(leaves: dict[str, np.ndarray], norm: str) -> dict[str, np.ndarray]:
    """Return leaves with the head's bias b folded into the bias of the norm before it: W (h + d) = W h + b, d = W^+ b.

    Nothing else reads those states in a model that classifies.
    """
    leaf = f"backbone/{norm}/bias"
    kernel_DC = leaves["head/kernel"].astype(np.float64)
    shift_D = np.linalg.pinv(kernel_DC.T) @ leaves["head/bias"].astype(np.float64)
    moved = np.array(leaves[leaf], np.float64)
    if moved.ndim == 2:
        moved[-1] += shift_D
    else:
        moved += shift_D
    return leaves | {leaf: moved.astype(np.float32)}


def write_export(
    directory: Path,
    export: Export,
    *,
    tokenizer: Tokenizer | None,
    dtype: str = "F32",
    card: str = "",
    longest: int | None = None,
) -> bool:
    """Write `directory`, which must be empty or new; it is written completely or not at all.

    A directory that has these files already is left as it is; returns whether it was written.
    longest: length of the longest sequence that the model reads. Default: its number of positions.
    """
    exists = directory.exists() and any(directory.iterdir())
    if exists and not (directory / FILE).is_file():
        raise _not_empty(directory)
    values, exchange = dict(export.config) | config_from_model(export.model), exchange_of(export.model)
    key = exchange.fields["activation"]  # of two names for one activation keep the original
    if exchange.activations.get(export.config.get(key, "")) == export.model.activation:
        values[key] = export.config[key]
    values |= {"architectures": [export.architecture], "dtype": _TORCH[dtype], "tie_word_embeddings": True}
    specials = {} if tokenizer is None else tokenizer.specials
    for role, key in {"pad": "pad_token_id", "start": "bos_token_id", "end": "eos_token_id"}.items():
        # None if there is none: a class's default is the id of another vocabulary.
        values[key] = specials.get(role, export.config.get(key))
    inputs = "plain" if tokenizer is None else export.inputs(tokenizer)
    if tokenizer is not None and inputs == "decoder":
        values["pad_token_id"] = padding(tokenizer, inputs)
    planned = planned_tensors(exchange.rules(export.parts), export.leaves, export.model.num_layers)
    if export.architecture.endswith("Model") and "Head" not in export.architecture:
        planned = [replace(tensor, name=tensor.name.partition(".")[2]) for tensor in planned]  # alone: no prefix
    fresh = directory.with_name(f".{directory.name}.tmp")
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        fresh.mkdir(parents=True)
        write_json(fresh / "config.json", values)
        if tokenizer is not None:
            files = published_files(tokenizer, longest or export.model.num_positions, inputs)
            for name, content in files.items():
                write_file(fresh / name, content)
            tokenizer.save(fresh / OWN)
        write_file(fresh / "README.md", card)
        write_tensors(fresh / FILE, planned, FLOATS[dtype])
        if exists:
            if not _has_files_of(directory, fresh):
                raise _not_empty(directory)
            return False
        if directory.exists():
            directory.rmdir()
        rename_synced(fresh, directory)
        return True
    except OSError as error:
        raise InputError(
            f"{directory} is not writable: {error.strerror or error}; make room, or choose another"
        ) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _not_empty(directory: Path) -> InputError:
    return InputError(f"{directory} is not empty; choose another directory, or delete it first")


def _has_files_of(directory: Path, other: Path) -> bool:
    """Return True if a directory has all files of another one, with the same content."""
    names = [str(path.relative_to(other)) for path in other.rglob("*") if path.is_file()]
    _, differing, missing = filecmp.cmpfiles(directory, other, names, shallow=False)
    return not differing and not missing
