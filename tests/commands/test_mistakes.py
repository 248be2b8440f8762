"""Mistakes of a newcomer: each ends in one line that names what was typed, and what to type instead."""

import shutil
from pathlib import Path

import pytest
from toy_runs import assert_one_line, finetune_arguments, make_stores, make_task, pretrain_arguments, run_here


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with stores, a text, a task, and a run of two steps."""
    place = tmp_path_factory.mktemp("place")
    (place / "stores").mkdir()
    for store, name in zip(make_stores(place / "made"), ("train", "valid"), strict=True):
        shutil.copytree(store, place / "stores" / name)
    (place / "text").mkdir()
    (place / "text" / "a.txt").write_text("words\n")
    make_task(place / "task")
    (place / "gpt2").mkdir()
    for name in ("encoder.json", "vocab.bpe"):
        (place / "gpt2" / name).write_text("{}")
    stores = (place / "stores" / "train", place / "stores" / "valid")
    ended = run_here("pretrain", *pretrain_arguments(place / "runs" / "one", stores, "--num-steps", 2))
    assert ended.code == 0, ended.errors
    return place


def pretraining(*more):
    stores = ("stores/train", "stores/valid")
    return ("pretrain", *pretrain_arguments("runs/new", stores, "--num-steps", 2), *more)


def fine_tuning(*more):
    return ("finetune", *finetune_arguments("runs/new", Path("task"), "--start", "runs/one", *more))


def preparing(tokenizer):
    return ("prepare", "--source", "text:text/*.txt", "--tokenizer", tokenizer, "--output", "stores/new")


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        (
            pretraining("--data.store", "stores/trian"),
            ["stores/trian: no such token store", "did you mean stores/train?"],
        ),
        (pretraining("--data.store", "text"), ["text holds .txt files and is not a token store", "'text:text/*.txt'"]),
        (pretraining("--data.store", "runs/one"), ["runs/one is a run or a model, not a token store"]),
        (pretraining("--start", "runs/onne"), ["runs/onne: no such run directory; did you mean runs/one?"]),
        (pretraining("--start", "runs/one@7"), ["runs/one has no checkpoint of step 7; choose one of 2"]),
        (
            pretraining("--start", "hf:bert-base-uncased"),
            ["or a model that the Hugging Face Hub has", "outgoing traffic"],
        ),
        (pretraining("--run", "text/a.txt"), ["--run must be a directory, got the file text/a.txt"]),
        (pretraining("--run", "text"), ["text must be empty or a run directory, got other files (a.txt)"]),
        (pretraining("--data.layout", "window"), ["--data.layout must be one of windows", "did you mean windows?"]),
        (
            pretraining("--verify-stores", "True"),
            ["--verify-stores must have no value, got True; write --verify-stores"],
        ),
        (
            pretraining("--run", "runs/one", "--num-steps", "3"),
            ["--num-steps: 2 -> 3; give", "--run NEW --start runs/one --start-with state"],
        ),
        (
            ("pretrain", "debug/gtp"),
            ["CONFIG must be a file or the name of a config, got debug/gtp", "did you mean debug/gpt?"],
        ),
        (("finetune", "debug/gpt"), ["config debug/gpt must return a FinetuneConfig", "debug/finetune_gpt"]),
        (fine_tuning("--task", "sst-2"), ["--task must be one of cola", "did you mean sst2?"]),
        (fine_tuning("--custom.text", "texts"), ["no column 'texts'; its columns are text, label; did you mean text?"]),
        (fine_tuning("--custom.metric", "F-1"), ["--custom.metric must be one of accuracy, f1", "did you mean f1?"]),
        (fine_tuning("--length", "4096"), ["--length must be", "got 4096"]),
        (
            preparing("bert-base-uncased"),
            ["train-wordpiece:SIZE, words:SIZE, characters:SIZE, bytes, sentencepiece:FILE", "got 'bert-base-uncased'"],
        ),
        (
            preparing("hf:bert-base-uncased"),
            ["hf:bert-base-uncased must be a directory, or a model that"],
        ),
        (preparing("hf:gpt2"), ["gpt2 has no tokenizer of Hugging Face; use gpt2:gpt2"]),
        (("show", "stores/trian"), ["stores/trian must be a token store", "did you mean stores/train?"]),
        (("show", "nothere"), ["nothere must be a token store, a run directory or a config", "check the path"]),
        (("evaluate", "perplexty"), ["must be one of perplexity, task", "got perplexty; did you mean perplexity?"]),
        (("convert", "exprot"), ["got exprot; did you mean export?"]),
    ],
)
def test_a_mistake_is_one_line_with_the_remedy(place, monkeypatch, words, fragments):
    """Fails when a message names a field and not its flag, or leaves out the name that was meant."""
    monkeypatch.chdir(place)
    ended = run_here(*words)
    line = assert_one_line(ended, 2, *fragments)
    assert line.startswith("error: ") and not (place / "runs" / "new").exists()


def test_changed_files_are_named_in_words(place, tmp_path, monkeypatch):
    """Fails on 2968321: two hashes of 64 digits, and `num_steps`, which follows from the number of epochs."""
    monkeypatch.chdir(place)
    task = make_task(tmp_path / "task")
    arguments = finetune_arguments(tmp_path / "run", task, "--start", "runs/one", "--num-epochs", 0.2)
    assert run_here("finetune", *arguments).code == 0
    file = task / "train.tsv"
    file.write_text("\n".join(file.read_text().splitlines()[:-3]) + "\n")
    line = assert_one_line(
        run_here("finetune", *arguments), 2, "(saved -> given): the training files have changed; give"
    )
    assert "num-steps" not in line and "fingerprints" not in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("evaluate", "zero-shot", "--run", "x", "--task", "blimp:y", "--pseudo-likelihood", "words"),
            "--pseudo-likelihood must be one of token, word, got words; did you mean word?",
        ),
        (
            ("evaluate", "perplexity", "--run", "x", "--layout", "window"),
            "--layout must be one of windows, packed, streams, got window; did you mean windows?",
        ),
        (
            ("evaluate", "features", "--run", "x", "--input", "y", "--pooling=max"),
            "--pooling must be one of mean, first, last, got max; choose one of them",
        ),
        (("predict", "--run", "x", "--input", "y", "--errors", "ignore"), "--errors must be one of strict, replace"),
        (
            ("pretrain", "debug/gpt", "--run", "x", "--optimizer.kind", "adam"),
            "--optimizer.kind must be one of adamw, openai_adam",
        ),
    ],
)
def test_a_wrong_choice_is_one_line(words, message):
    """Fails when a value that is not among those of a flag ends in a box of several lines, or without the values."""
    assert_one_line(run_here(*words), 2, f"error: {message}")
