"""Directories of published models that have no counterpart, are damaged, or ask for too much: one line for each.

Fails when one is read, ends in a traceback, or takes its time; and when a head is taken for another one.
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from test_published import changed, edit_config, make
from toy_runs import assert_one_line, run_here

from jaxlm.errors import InputError
from jaxlm.interop.huggingface import planned_export, write_export
from jaxlm.interop.sources import read_published


def drop(name):
    return lambda directory: changed(directory, lambda tensors: tensors.pop(name))


def put(name, shape):
    return lambda directory: changed(directory, lambda tensors: tensors.update({name: np.zeros(shape, np.float32)}))


def _doubled(tensors, name):
    return {name: tensors[name].astype(np.float64)}


def _sharded(directory: Path, file: str) -> None:
    """An index that names `file` for every tensor, and a pipe nobody writes to."""
    names = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    os.mkfifo(directory / "pipe")
    index = {"weight_map": dict.fromkeys(names, file)}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def put_value(directory: Path, value: float) -> None:
    """Fails if weights that are not finite are imported without a word."""

    def edit(tensors):
        tensors["bert.embeddings.word_embeddings.weight"][3, 4] = value

    changed(directory, edit)


BAD = {
    "a tensor less": (
        drop("bert.pooler.dense.bias"),
        "unexpected), got - bert.pooler.dense.bias [20]; ",
    ),
    "a tensor more": (put("bert.extra.weight", (3, 4)), "+ bert.extra.weight [3, 4]"),
    "NaN in the weights": (lambda d: put_value(d, np.nan), "word_embeddings.weight must be finite, got nan at [3, 4]"),
    "infinity in weights": (lambda d: put_value(d, -np.inf), "embeddings.weight must be finite, got -inf at [3, 4]"),
    "another shape": (
        put("bert.embeddings.token_type_embeddings.weight", (3, 20)),
        "token_type_embeddings.weight [2, 20]",
    ),
    "relative positions": (
        lambda d: edit_config(d, position_embedding_type="relative_key"),
        "position_embedding_type must be 'absolute', got 'relative_key'",
    ),
    "another activation": (lambda d: edit_config(d, hidden_act="relu"), "gelu_pytorch_tanh, got 'relu'"),
    "no eps": (lambda d: edit_config(d, layer_norm_eps="absent"), "layer_norm_eps must be a number, got nothing"),
    "another model": (
        lambda d: edit_config(d, model_type="opt"),
        "model_type must be bert, openai-gpt, gpt2, t5 or mt5, got 'opt'",
    ),
    "no config": (lambda d: (d / "config.json").unlink(), "has no config.json"),
    "a config cut short": (lambda d: (d / "config.json").write_text("{"), "config.json is not JSON"),
    "a file cut short": (
        lambda d: (d / "model.safetensors").write_bytes((d / "model.safetensors").read_bytes()[:-5]),
        "model.safetensors is damaged",
    ),
    "a file that is none": (lambda d: (d / "model.safetensors").write_bytes(b"\xff" * 99), "not a safetensors file"),
    "a pickle": (
        lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"),
        "must be safetensors, got a pickle, which is a program that runs when it is loaded",
    ),
    # Fails on 2968321: tracebacks, and minutes of work for the layers.
    "nested JSON": (lambda d: (d / "config.json").write_text("[" * 100_000), "config.json is not JSON (it is nested"),
    "JSON nested within the parser's limit": (
        lambda d: edit_config(d, extra=json.loads("[" * 400 + "]" * 400)),
        "config.json is not JSON (it is nested too deeply",
    ),
    "NaN": (lambda d: edit_config(d, layer_norm_eps=float("nan")), "layer_norm_eps must be a finite number, got nan"),
    "NaN where nobody looks": (lambda d: edit_config(d, mystery=[float("inf")]), "mystery must be a finite number"),
    "a number of 400 digits": (
        lambda d: edit_config(d, initializer_range=10**400),
        "initializer_range must be a finite",
    ),
    "three million layers": (
        lambda d: edit_config(d, num_hidden_layers=3_000_000),
        "the number of layers must be that of the tensors, 2, got 3000000",
    ),
    "a huge vocabulary": (
        lambda d: edit_config(d, vocab_size=10**15),
        "vocab_size must be the size of a tensor's axis",
    ),
    "64-bit numbers": (
        lambda d: changed(d, lambda tensors: tensors.update(_doubled(tensors, "bert.pooler.dense.bias"))),
        "bert.pooler.dense.bias of type F64, not F32, F16 or BF16",
    ),
    "a shard elsewhere": (lambda d: _sharded(d, "../model.safetensors"), "must give each tensor the name of a file"),
    "a shard that is the directory": (lambda d: _sharded(d, ".."), "must give each tensor the name of a file"),
    "a pipe for a shard": (lambda d: _sharded(d, "pipe"), "not a regular file"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "no model.safetensors"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_does_not_fit_is_refused_in_one_line(tmp_path, what):
    directory = make(tmp_path / "model", "bert_pretraining")
    spoil, said = BAD[what]
    spoil(directory)
    ended = run_here("convert", "import", f"hf:{directory}", "--run", tmp_path / "run")
    assert_one_line(ended, 2, said)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("values", "outputs", "said"),
    [
        (
            {"problem_type": "ranking"},
            3,
            "problem_type must be one of regression, single_label_classification, multi_label_classification, got "
            "'ranking'",
        ),
        ({"problem_type": "regression"}, 3, "problem_type regression must have one output, got 3"),
        ({"id2label": {"0": "a", "1": "b", "2": "b"}}, 3, "id2label must give each number from 0 a distinct name"),
        ({"id2label": {"0": "a", "1": "b\x1b[2J", "2": "c"}}, 3, "id2label must have names without control characters"),
        ({"id2label": {"0": "a", "1": "b\nc", "2": "c"}}, 3, "id2label must have names without control characters"),
        ({"id2label": {"0": "a", "one": "b"}}, 3, "id2label must give each number from 0 a distinct name"),
    ],
)
def test_the_problem_of_a_classifier_is_known_or_refused(tmp_path, values, outputs, said):
    """Fails on 2968321: a regression of three outputs dies at its first row."""
    directory = _classifier(tmp_path / "model", outputs)
    edit_config(directory, **values)
    with pytest.raises(InputError) as caught:
        read_published(f"hf:{directory}")
    assert said in str(caught.value)


def test_one_output_is_a_regression_and_several_are_labels(tmp_path):
    one = _classifier(tmp_path / "one", 1)
    for problem in (None, "regression"):
        edit_config(one, problem_type=problem)
        assert read_published(f"hf:{one}").task.kind == "regression"
    three = _classifier(tmp_path / "three", 3)
    for problem in (None, "single_label_classification"):
        edit_config(three, problem_type=problem)
        task = read_published(f"hf:{three}").task
        assert task.kind == "classification" and task.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    for directory in (one, three):
        edit_config(directory, problem_type="multi_label_classification")
        task = read_published(f"hf:{directory}").task
        assert task.kind == "multilabel" and task.metrics == ("micro_f1", "macro_f1", "exact_match")


def _classifier(directory: Path, outputs: int) -> Path:
    """A BERT with a classifier of so many outputs, without names for them."""
    make(directory, "bert_classification")
    changed(
        directory,
        lambda tensors: tensors.update(
            {
                "classifier.weight": np.ones((outputs, tensors["classifier.weight"].shape[1]), np.float32),
                "classifier.bias": np.zeros(outputs, np.float32),
            }
        ),
    )
    edit_config(directory, id2label="absent", label2id="absent", problem_type="absent")
    return directory


def test_types_that_differ_between_layers_are_said_and_keep_their_numbers(tmp_path):
    """Fails on 2968321: a half-precision second layer goes unnoticed, and the export is told to be float32."""
    directory = make(tmp_path / "model", "gpt2")

    def halve(tensors):
        for name in [name for name in tensors if ".h.1." in name or name.startswith("h.1.")]:
            tensors[name] = tensors[name].astype(np.float16)

    changed(directory, halve)
    published = read_published(f"hf:{directory}")
    assert published.dtype == "F32" and any("are of types F16, F32" in note for note in published.notes)
    export = planned_export(published.model, published.leaves, None, architecture=published.architecture)
    write_export(tmp_path / "back", export, tokenizer=None, dtype=published.dtype)
    before, after = load_file(directory / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert {str(values.dtype) for values in before.values()} == {"float16", "float32"}
    assert all(np.array_equal(before[key].astype(np.float32), after[key]) for key in after)
