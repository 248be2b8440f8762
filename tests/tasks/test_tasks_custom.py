"""A user's own files: labels found in the data, kinds, pairs and choices, and every wrong input in one line."""

import json
import time

import numpy as np
import pytest

from jaxlm.errors import InputError
from jaxlm.tasks import (
    KINDS,
    TASKS,
    CustomConfig,
    compute_metrics,
    read_labelled,
    read_rows,
    read_task,
    task_from_json,
)

SINGLE = {"text": "text", "label": "label"}


def write(directory, name, content):
    path = directory / name
    path.write_text(content)
    return str(path)


def read(directory, train, dev=None, test=None, suffix="tsv", **settings):
    files = {part: content for part, content in (("train", train), ("dev", dev), ("test", test)) if content is not None}
    paths = {part: write(directory, f"{part}.{suffix}", content) for part, content in files.items()}
    return read_task("custom", None, CustomConfig(**paths, **(SINGLE | settings)))


def test_labels_are_found_and_sorted(tmp_path):
    train = "label\tid\ttext\nspam\t1\tbuy\nham\t2\tmeet\neggs\t3\tcook\n"
    task, data = read(tmp_path, train, dev="text\tlabel\nx\tham\n", test="text\ny\n")
    assert task.labels == data.labels == ("eggs", "ham", "spam")
    assert [task.label_number(example.label) for example in data.splits["train"].examples] == [2, 1, 0]
    assert (task.kind, task.form, task.num_outputs, task.metrics) == (
        "classification",
        "single",
        3,
        ("accuracy", "f1", "matthews"),
    )
    assert data.splits["test"].examples[0].label is None and data.held_out is None
    prediction, shares = task.prediction(np.array([0.0, np.log(3.0), 0.0]))
    assert prediction == "ham" and shares == pytest.approx({"eggs": 0.2, "ham": 0.6, "spam": 0.2})
    assert task_from_json(json.loads(json.dumps(task.to_json()))) == task


def test_json_lines_give_the_same_task(tmp_path):
    rows = [("buy", 1), ("meet", 0), ("cook", True)]
    train = "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in rows)
    task, data = read(tmp_path, train, dev=train, suffix="jsonl")
    assert task.labels == ("0", "1", "true")
    assert [example.label for example in data.splits["dev"].examples] == ["1", "0", "true"]


def test_without_dev_a_share_is_held_out(tmp_path):
    train = "text\tlabel\n" + "".join(f"row {i}\t{i % 2}\n" for i in range(50))
    _, data = read(tmp_path, train)
    assert [len(data.splits[part].examples) for part in ("train", "dev")] == [45, 5] and data.held_out
    mostly_one = "text\tlabel\n" + "same\t0\n" * 30 + "other\t1\nother\t1\nother\t1\nother\t1\nother\t1\n"
    for seed in range(5):  # a group larger than the share does not become the dev part
        _, data = read_task(
            "custom", None, CustomConfig(train=write(tmp_path, "same.tsv", mostly_one), **SINGLE), seed=seed
        )
        assert {example.texts[0] for example in data.splits["dev"].examples} == {"other"}
    with pytest.raises(InputError, match=r"as the train split of .*\.tsv has too few distinct rows"):
        read(tmp_path, "text\tlabel\nx\t0\nx\t1\n")


def test_regression(tmp_path):
    train = "text\tlabel\na\t100000\nb\t300000\n"
    task, data = read(tmp_path, train, dev=train, kind="regression")
    assert (task.mean, task.deviation, task.num_outputs) == (200000.0, 100000.0, 1)
    assert task.prediction(np.array([0.5])) == (250000.0, {})
    assert (task.metric, data.labels) == ("pearson", ())
    constant, _ = read(tmp_path, "text\tlabel\na\t7\nb\t7\n", dev=train, kind="regression")
    assert constant.label_number(8.0) == 1.0  # no division by a deviation of zero
    with pytest.raises(InputError, match=r"dev.tsv line 2: a score must be a number, got 'many'"):
        read(tmp_path, train, dev="text\tlabel\na\tmany\n", kind="regression")


def test_pairs(tmp_path):
    train = "text\tother\tlabel\na\tb\t0\nc\td\t1\n"
    ordered, data = read(tmp_path, train, dev=train, text_pair="other")
    symmetric, _ = read(tmp_path, train, dev=train, text_pair="other", pairs="symmetric")
    assert (ordered.form, symmetric.form) == ("entailment", "similarity")
    assert data.splits["train"].examples[1].texts == ("c", "d")


@pytest.mark.parametrize(
    ("answers", "names"),
    [
        (("0", "1"), ("0", "1")),
        (("1", "2"), ("1", "2")),
        (("0", "0"), ("0", "1")),
        (("2", "2"), ("1", "2")),
        (("B", "A"), ("A", "B")),
        (("right", "left"), ("right", "left")),  # names of the columns keep the columns' order
        (("right", "right"), ("right", "left")),
    ],
)
def test_choice_labels(tmp_path, answers, names):
    train = "text\tright\tleft\tlabel\n" + "".join(f"q{i}\tyes {i}\tno\t{answer}\n" for i, answer in enumerate(answers))
    settings = {"kind": "choice", "choices": ("right", "left")}
    task, data = read(tmp_path, train, dev=train, **settings)
    assert (task.labels, task.num_choices, task.form) == (names, 2, "choice")
    assert data.splits["train"].examples[0].choices == ("yes 0", "no")
    assert data.splits["train"].examples[0].label == answers[0]


def test_choice_labels_that_say_nothing(tmp_path):
    settings = {"kind": "choice", "choices": ("right", "left")}
    for answers in (("1", "1"), ("0", "5"), ("A", "A"), ("A", "C", "B"), ("7", "8")):
        train = "text\tright\tleft\tlabel\n" + "".join(f"q\ty\tn\t{answer}\n" for answer in answers)
        with pytest.raises(InputError, match="do not identify one of 2 choices"):
            read(tmp_path, train, dev=train, **settings)


def test_choices_as_a_json_list(tmp_path):
    rows = [
        {"text": "q", "options": ["a", "b", "c"], "label": 2},
        {"text": "r", "options": ["d", "e", "f"], "label": 0},
    ]
    train = "".join(json.dumps(row) + "\n" for row in rows)
    settings = {"suffix": "jsonl", "kind": "choice", "choices": ("options",)}
    task, data = read(tmp_path, train, dev=train, **settings)
    assert task.num_choices == 3 and data.splits["train"].examples[1].choices == ("d", "e", "f")
    short = json.dumps({"text": "q", "options": ["a"], "label": 0}) + "\n"
    with pytest.raises(InputError, match="line 3: the row must have 3 choices, got 1"):
        read(tmp_path, train + short, dev=train, **settings)
    new = write(tmp_path, "new.jsonl", json.dumps({"text": "q", "options": ["x", "y", "z"]}) + "\n")
    assert next(read_rows(new, task)).choices == ("x", "y", "z")


@pytest.mark.parametrize(
    ("train", "settings", "message"),
    [
        ("text\tlabel\na\t0\nb\t0\n", {}, "every row has '0'"),
        ("text\tlabel\na\t0\nb\t\n", {}, r"train.tsv line 3 has no label \(label\)"),
        ("text\nx\n", {}, "line 1 has no column 'label'; its columns are text"),
        ("text\tlabel\n", {}, "has no rows below its header"),
        ("text\tlabel\na\t0\tmore\n", {}, "line 2: the row must have 2 columns .*, got 3"),
        ("text\tlabel\na\t0\n", {"text": ""}, "custom.text must be given"),
        ("text\tlabel\na\t0\n", {"label": "text"}, "columns must be distinct, got 'text' twice"),
        ("text\tlabel\na\t0\n", {"kind": "choice"}, "must be given exactly when"),
        ("text\tlabel\na\t0\n", {"choices": ("a", "b")}, "must be given exactly when"),
        ("text\tlabel\na\t0\n", {"kind": "speech"}, "custom.kind must be one of classification, .*, got 'speech'"),
        (
            "text\tlabel\na\t0\n",
            {"metric": "pearson"},
            "custom.metric must be one of accuracy, .* for this task, got pearson",
        ),
    ],
)
def test_wrong_input(tmp_path, train, settings, message):
    with pytest.raises(InputError, match=message):
        read(tmp_path, train, dev="text\tlabel\na\t0\n", **settings)


def test_labels_of_dev_and_test_must_be_known(tmp_path):
    train = "text\tlabel\na\tno\nb\tyes\n"
    with pytest.raises(InputError, match=r"dev.tsv line 3: a label must be one of no, yes, got 'maybe'"):
        read(tmp_path, train, dev="text\tlabel\na\tno\nb\tmaybe\n")
    with pytest.raises(InputError, match=r"test.tsv line 2: a label must be one of no, yes, got 'Yes'"):
        read(tmp_path, train, dev=train, test="text\tlabel\na\tYes\n")
    with pytest.raises(InputError, match=r"test.tsv line 3 has no label, but other rows have one"):
        read(tmp_path, train, dev=train, test="text\tlabel\na\tyes\nb\t\n")
    with pytest.raises(InputError, match=r"dev.tsv line 1 has no column 'label'"):
        read(tmp_path, train, dev="text\na\n")
    with pytest.raises(InputError, match="absent.tsv cannot be read: No such file"):
        read_task("custom", str(tmp_path), CustomConfig(train="absent.tsv", **SINGLE))
    with pytest.raises(InputError, match="--task-dir must be a directory with task custom"):
        read_task("custom", "tfds", CustomConfig(train="x", **SINGLE))


def test_another_labelled_file(tmp_path):
    train = "text\tlabel\na\tno\nb\tyes\n"
    task, _ = read(tmp_path, train, dev=train)
    other = write(tmp_path, "other.jsonl", '{"label": "yes", "text": "c"}\n')
    assert read_labelled(other, task).examples[0].label == "yes"


def test_bytes_that_are_not_utf8_can_be_replaced(tmp_path):
    (tmp_path / "train.tsv").write_bytes(b"text\tlabel\ncaf\xe9\t0\nb\t1\n")
    files = {"train": "train.tsv", "dev": "train.tsv", **SINGLE}
    with pytest.raises(InputError, match="line 2: byte 0xe9 at offset 14"):
        read_task("custom", str(tmp_path), CustomConfig(**files))
    _, data = read_task("custom", str(tmp_path), CustomConfig(**files, errors="replace"))
    assert data.splits["train"].examples[0].texts == ("caf\ufffd",)


def test_selecting_metric(tmp_path):
    train = "text\tlabel\na\tno\nb\tyes\n"
    task, _ = read(tmp_path, train, dev=train, metric="f1")
    assert task.metrics == ("f1", "accuracy", "matthews")
    assert list(compute_metrics(task, np.array([0, 1]), np.array([0, 1]))) == ["f1", "accuracy", "matthews"]


def test_options_that_a_saved_task_cannot_have_are_refused():
    values = json.loads(json.dumps(TASKS["cola"].to_json()))
    with pytest.raises(InputError, match="task.json: TaskOptions.* 'strides'; read it with the version that wrote it"):
        task_from_json(values | {"options": {"strides": 3}})


def test_a_label_for_each_row_is_one_line(tmp_path):
    """Fails if 10^5 labels are searched one after another for each row, which takes minutes, or end in a traceback."""
    rows = "".join(f"a\tl{number}\n" for number in range(5_001))
    with pytest.raises(InputError, match="at most 5,000 labels, got label with 5,001 in 5,001 rows of"):
        read(tmp_path, f"text\tlabel\n{rows}", dev="text\tlabel\na\tl1\n")
    task = KINDS["classification"](
        name="many",
        labels=tuple(str(number) for number in range(100_000)),
    )
    began = time.process_time()
    assert all(task.label_number(task.parse_label(label)) == int(label) for label in task.labels)
    assert time.process_time() - began < 20
