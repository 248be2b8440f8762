"""Model directories of Hugging Face: config.json, model.safetensors (or shards), and a tokenizer's files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxlm.errors import InputError
from jaxlm.interop.configs import model_from_config
from jaxlm.interop.files import files_fingerprint, read_object
from jaxlm.interop.names import HEADS, PARTS, backbone_rules, modern_names, parts_of, rules_for
from jaxlm.interop.published import Published
from jaxlm.interop.rules import read_leaves
from jaxlm.interop.shapes import backbone_shapes, part_shapes
from jaxlm.interop.tensors import TensorFiles
from jaxlm.models.bert import BertConfig
from jaxlm.models.gpt import GPTConfig
from jaxlm.tasks import Task, ner, squad
from jaxlm.tasks.task import Columns
from jaxlm.text import Case, Tokenizer, published_tokenizer

# Hugging Face's classes by what stands on the backbone; the kind of task where it is a fine-tuned head.
CLASSES: Mapping[str, Mapping[str, tuple[tuple[str, ...], str | None]]] = {
    "bert": {
        "BertModel": (("pooler",), None),
        "BertForPreTraining": (("pooler", "masked_lm", "next_sentence"), None),
        "BertForMaskedLM": (("masked_lm",), None),
        "BertForNextSentencePrediction": (("pooler", "next_sentence"), None),
        "BertForSequenceClassification": (("pooler", "classifier"), "classification"),
        "BertForMultipleChoice": (("pooler", "classifier"), "choice"),
        "BertForTokenClassification": (("classifier",), "tagging"),
        "BertForQuestionAnswering": (("qa_outputs",), "span"),
    },
    "openai-gpt": {
        "OpenAIGPTModel": ((), None),
        "OpenAIGPTLMHeadModel": ((), None),
        "OpenAIGPTDoubleHeadsModel": (("summary",), "choice"),
        "OpenAIGPTForSequenceClassification": (("score",), "classification"),
    },
    "gpt2": {
        "GPT2Model": ((), None),
        "GPT2LMHeadModel": ((), None),
        "GPT2DoubleHeadsModel": (("summary",), "choice"),
        "GPT2ForSequenceClassification": (("score",), "classification"),
    },
}


def read(directory: Path, spec: str, case: Case = "auto") -> Published:
    """The model in `directory`. InputError, one line, for what is damaged, missing, or has no counterpart here.

    case: as in `published_tokenizer`.
    """
    values = read_object(directory / "config.json")
    name = str(directory / "config.json")
    model = model_from_config(values, name)
    model_type = values["model_type"]
    files = TensorFiles(directory)
    names, tied = modern_names(sorted(files.infos), model_type)
    for second, first in tied.items():
        _check_tied(files, names, second, first)
    names = {modern: stored for modern, stored in names.items() if modern not in tied}
    parts = parts_of(names)
    architecture, kind = _architecture(values, model_type, parts, name)
    kernel = next((PARTS[part][0].theirs[0] for part in parts if part in HEADS), None)
    outputs = files.infos[names[kernel]].shape[0] if kernel is not None and kernel in names else 0
    shapes = backbone_shapes(model) | part_shapes(model, parts, outputs)
    leaves = read_leaves(rules_for(model_type, parts), shapes, files, names, model.num_layers)
    if "score" in parts:
        leaves["head/bias"] = np.zeros(outputs, np.float32)
    used = {files.infos[names[part]].dtype for rule in backbone_rules(model_type) for part in rule.names(0)}
    if len(used) > 1:
        raise InputError(f"{directory}: its parameters are of several types, {', '.join(sorted(used))}; save it in one")
    tokenizer, notes = _tokenizer(directory, model, case)
    return Published(
        name=spec,
        model=model,
        leaves=leaves,
        tokenizer=tokenizer,
        fingerprint=files_fingerprint(files.files),
        architecture=architecture,
        dtype=used.pop(),
        parts=tuple(parts),
        task=None if kind is None else _task(values, kind, outputs, name),
        config=values,
        notes=tuple(notes),
    )


def _architecture(values: Mapping[str, Any], model_type: str, parts: list[str], name: str) -> tuple[str, str | None]:
    """The class and, of a fine-tuned one, the kind of its task; the tensors decide where there is a doubt."""
    classes = CLASSES[model_type]
    given = (values.get("architectures") or [None])[0]
    heads = [part for part in parts if part in HEADS]
    # Models are often saved under the name of another class than that whose tensors they have.
    fitting = [cls for cls, (has, _) in classes.items() if set(has) == set(parts)]
    if given not in classes or (set(classes[given][0]) != set(parts) and len(fitting) == 1):
        given = fitting[0] if len(fitting) == 1 or (fitting and not heads) else given
    if given not in classes or not set(heads) <= set(classes[given][0]):
        raise InputError(
            f"{name}: architectures {given!r} with the tensors of {', '.join(heads) or 'no head'}; one of "
            f"{', '.join(classes)} is expected"
        )
    kind = classes[given][1] if heads else None
    if kind == "classification" and (
        values.get("problem_type") == "regression" or len(_labels(values) or ("", "")) == 1
    ):
        kind = "regression"
    return given, kind


def _labels(values: Mapping[str, Any]) -> tuple[str, ...] | None:
    named = values.get("id2label")
    if not isinstance(named, dict):
        return None
    return tuple(str(named[key]) for key in sorted(named, key=int))


def _task(values: Mapping[str, Any], kind: str, outputs: int, name: str) -> Task:
    """The task of a fine-tuned model: rows as a custom task has them, labels as the config spells them."""
    labels = _labels(values) or tuple(f"LABEL_{k}" for k in range(outputs))
    if kind in ("classification", "tagging") and len(labels) != outputs:
        raise InputError(f"{name}: id2label has {len(labels)} labels and the head {outputs} outputs")
    metric = {
        "classification": "accuracy",
        "regression": "pearson",
        "choice": "accuracy",
        "span": "f1",
        "tagging": "f1",
    }[kind]
    form = "single" if kind in ("classification", "regression") else kind
    columns = {"tagging": ner.COLUMNS, "span": squad.COLUMNS}.get(
        kind, Columns(texts=(("text", "sentence"),), label=("label",))
    )
    return Task(
        name="custom",
        kind=kind,  # type: ignore[arg-type]
        form=form,  # type: ignore[arg-type]
        metric=metric,
        metrics=(metric,),
        labels=labels if kind in ("classification", "tagging") else (),
        columns=columns,
    )


def _check_tied(files: TensorFiles, names: Mapping[str, str], second: str, first: str) -> None:
    """A second name must hold the same numbers: a model whose output is not tied has no counterpart."""
    if first not in names:
        return
    one, other = files.infos[names[first]], files.infos[names[second]]
    if one.shape != other.shape or not np.array_equal(files.read(names[first]), files.read(names[second])):
        raise InputError(f"{other.file}: {names[second]} differs from {names[first]}; the output must be tied to it")


def _tokenizer(directory: Path, model: GPTConfig | BertConfig, case: Case) -> tuple[Tokenizer | None, list[str]]:
    tokenizer = published_tokenizer(directory, case)
    if tokenizer is None:
        return None, [f"{directory} has no tokenizer: ids alone can be read, text cannot"]
    if tokenizer.size > model.vocab_size:
        raise InputError(
            f"{directory}: its tokenizer has {tokenizer.size} ids and its model {model.vocab_size}; they do not belong "
            "together"
        )
    return tokenizer, list(tokenizer.notes)
