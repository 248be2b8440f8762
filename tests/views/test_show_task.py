"""What `show --task` prints of the rows of a task, counted here by hand."""

import json

import numpy as np
import pytest
import toy_encoder
import toy_run
from toy_encoder import KINDS, make_files, write_lines
from toy_runs import assert_one_line, run_here

from jaxlm.text import tokenizer_from_spec

pytestmark = pytest.mark.usefixtures("two_devices")

TRAIN = [
    {"text": "ba be", "label": "no"},
    {"text": "ba be", "label": "yes"},
    {"text": "ba be", "label": "no"},
    {"text": "ba be bi bo da de di do", "label": "yes"},
    {"text": "", "label": "no"},
]
DEV = [{"text": "ba be", "label": "no"}, {"text": "fa", "label": "no"}, {"text": "", "label": "yes"}]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    place = tmp_path_factory.mktemp("files")
    write_lines(place / "train.jsonl", TRAIN)
    write_lines(place / "dev.jsonl", DEV)
    toy_encoder.write_vocabulary(place)
    return place


def shown(*words) -> list[str]:
    ended = run_here("show", *words)
    assert ended.code == 0, ended.errors
    return ended.output.splitlines()


def task_of(files, *more) -> list:
    words = "--task custom --custom.train train.jsonl --custom.dev dev.jsonl --custom.text text --custom.label label"
    return [*words.split(), "--task-dir", files, *more]


def test_rows_are_counted(files):
    """Fails if a repeated, shared, empty or contradicting row is counted otherwise, or lengths are of other texts."""
    lines = shown(*task_of(files, "--count", 1))
    assert lines == [
        "task custom: classification, single, metric accuracy",
        "  2 labels: 'no', 'yes'",
        "train: 5 examples of 5 rows read; 1 empty field; labels no: 3, yes: 2",
        "  text, characters: 0 to 23, mean 7.6, median 5, 95 % at most 19",
        "  duplicates: 2 of 5 (40.0%), 1 of them with another label",
        "  empty texts: 1 of 5",
        "dev: 3 examples of 3 rows read; 1 empty field; labels no: 2, yes: 1",
        "  text, characters: 0 to 5, mean 2.3, median 2, 95 % at most 5",
        "  duplicates: 0 of 3 (0.0%)",
        "  also in train: 2 of 3 (66.7%), 1 of them with another label there",
        "  empty texts: 1 of 3",
        "",
        "example 0 of train, label 'no'",
        "    | text: ba be",
    ]
    held_out = [word for word in task_of(files) if word not in ("--custom.dev", "dev.jsonl")]
    (line,) = [line for line in shown(*held_out) if "held out" in line]
    assert line.startswith("dev: ")


def test_tokens_are_those_that_a_model_reads(files, tmp_path):
    """Fails if special tokens are left out, a row of the length counts as truncated, or the length is not the given."""
    vocabulary = files / "vocab.txt"
    encode = tokenizer_from_spec(f"wordpiece:{vocabulary}").encode
    lengths = [len(encode(row["text"])) + 2 for row in TRAIN]
    found = shown(*task_of(files, "--tokenizer", f"wordpiece:{vocabulary}", "--length", 9))
    tokens = [line for line in found if "special tokens" in line]
    assert f"{min(lengths)} to {max(lengths)}, mean {np.mean(lengths):.1f}" in tokens[0] and len(tokens) == 2
    assert f"  truncated examples at 9 tokens: {sum(n > 9 for n in lengths)} of 5 (20.0%)" in found
    assert max(lengths) == 10
    found = shown(*task_of(files, "--tokenizer", f"wordpiece:{vocabulary}", "--length", 10))
    assert "  truncated examples at 10 tokens: 0 of 5 (0.0%)" in found
    run = toy_encoder.pretrained(tmp_path / "run", vocabulary)
    assert "  truncated examples at 32 tokens: 0 of 5 (0.0%)" in shown(*task_of(files, "--start", run))
    tokenizer = toy_run.toy_tokenizer()
    tokenizer.save(tmp_path / "tokenizer")
    gpt = toy_run.pretrained(tmp_path / "gpt", toy_run.toy_store(tmp_path / "store", tokenizer))
    lengths = [len(tokenizer.encode(row["text"])) + 2 for row in TRAIN]
    found = shown(*task_of(files, "--start", gpt))
    assert f"  truncated examples at 16 tokens: {sum(n > 16 for n in lengths)} of 5" in "\n".join(found)
    assert f"  tokens, with special tokens: {min(lengths)} to {max(lengths)}," in "\n".join(found)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_shown(kind, tmp_path):
    """Fails if a kind of example lacks a column, or the text of a window counts as truncated."""
    files, vocabulary = make_files(tmp_path / "files", kind), toy_encoder.write_vocabulary(tmp_path)
    parts = [word for part in ("train", "dev", "test") for word in (f"--custom.{part}", files / f"{part}.jsonl")]
    words = ["--task", "custom", *parts, *toy_encoder.columns(kind), "--tokenizer", f"wordpiece:{vocabulary}"]
    found = "\n".join(shown(*words, "--length", 16, "--count", 1, "--options.stride", 4))
    (first, *_) = [json.loads(line) for line in (files / "train.jsonl").read_text().splitlines()]
    for value in first.values():
        if isinstance(value, str) and value not in ("a", "b"):
            assert value in found
    assert found.count("\ntest: ") == 1 and found.count("also in train") == 2
    if kind == "span":
        assert "texts longer than a window of 16 tokens: 32 of 32" in found and "windows" in found
        assert "context: " in found and "truncated questions at 16 tokens: 0 of 32" in found


@pytest.mark.parametrize(
    ("more", "rule"),
    [
        (["--length", "0"], "--length must be at least 1, got 0"),
        (["--count", "-1"], "--count must be at least 0, got -1"),
        (["--start", "a", "--tokenizer", "b"], "--tokenizer must be left out with --start"),
        (["--custom.train", "x.jsonl"], "x.jsonl"),
    ],
)
def test_bad_input(files, more, rule):
    assert_one_line(run_here("show", *task_of(files), *more), 2, rule)
