"""A user's files with several labels per row, a chosen positive class, and bad rows that are left out."""

import json

import pytest

from jaxlm.errors import InputError
from jaxlm.tasks import CustomConfig, read_labelled, read_task, task_from_json

COLUMNS = {"text": "text", "label": "label"}
SEVERAL = "text\tlabel\nrain\twet, cold\nsun\twarm\nsnow\tcold,wet,cold\nhaze\t\n"


def read(directory, train, dev=None, suffix="tsv", **settings):
    files = {}
    for part, content in (("train", train), ("dev", train if dev is None else dev)):
        files[part] = str(directory / f"{part}.{suffix}")
        (directory / f"{part}.{suffix}").write_text(content)
    return read_task("custom", None, CustomConfig(**files, **(COLUMNS | settings)))


def test_several_labels_are_read_from_one_field(tmp_path):
    """Fails when blanks, order or repeats make another label, or a row without labels counts as unlabelled."""
    task, data = read(tmp_path, SEVERAL, kind="multilabel")
    assert task.labels == ("cold", "warm", "wet") and task.num_outputs == 3
    assert task.metrics == ("micro_f1", "macro_f1", "exact_match") and task.metric == "micro_f1"
    found = [example.label for example in data.splits["train"].examples]
    assert found == [("cold", "wet"), ("warm",), ("cold", "wet"), ()]
    assert [task.label_number(label) for label in found][::3] == [[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]]
    assert data.report()[0].endswith("labels cold: 2, warm: 1, wet: 2, none of them: 1")
    assert task_from_json(json.loads(json.dumps(task.to_json()))) == task


def test_json_lines_may_hold_lists(tmp_path):
    """Fails when a comma inside a label of a list separates, or a missing field is taken for an empty list."""
    rows = [{"text": "a", "label": ["x, y", "z"]}, {"text": "b", "label": []}, {"text": "c", "label": "z"}]
    train = "".join(json.dumps(row) + "\n" for row in rows)
    task, data = read(tmp_path, train, suffix="jsonl", kind="multilabel")
    assert task.labels == ("x, y", "z")
    assert [example.label for example in data.splits["train"].examples] == [("x, y", "z"), (), ("z",)]
    with pytest.raises(InputError, match=r"line 4 has no label"):
        read(tmp_path, train + '{"text": "d"}\n', suffix="jsonl", kind="multilabel")


def test_another_separator_and_threshold(tmp_path):
    train = "text\tlabel\na\tx|y, z\nb\tx\n"
    task, _ = read(tmp_path, train, kind="multilabel", label_separator="|", threshold=0.25)
    assert task.labels == ("x", "y, z") and task.threshold == 0.25
    other = tmp_path / "other.tsv"
    other.write_text("text\tlabel\nc\ty, z|x\n")
    assert read_labelled(other, task).examples[0].label == ("x", "y, z")


@pytest.mark.parametrize(
    ("train", "settings", "said"),
    [
        (SEVERAL, {"kind": "multilabel", "threshold": 1.0}, "--custom.threshold must be between 0 and 1, got 1.0"),
        (SEVERAL, {"kind": "multilabel", "label_separator": ""}, "--custom.label-separator must not be empty"),
        (SEVERAL, {"threshold": 0.3}, "--custom.threshold must be given with --custom.kind multilabel"),
        (SEVERAL, {"label_separator": "|"}, "--custom.label-separator must be given with --custom.kind multilabel"),
        (SEVERAL, {"kind": "multilabel", "positive": "wet"}, "--custom.positive must be left out for multilabel"),
        ("text\tlabel\na\tx\nb\tx\n", {"kind": "multilabel"}, "needs two or more labels, got x"),
        ("text\tlabel\na\tno\nb\tyes\n", {"positive": "Yes"}, "must be one of the labels no, yes, got Yes"),
        ("text\tlabel\na\t1\nb\t2\n", {"kind": "regression", "positive": "1"}, "must be left out for regression"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path, train, settings, said):
    with pytest.raises(InputError, match=said):
        read(tmp_path, train, **settings)


def test_labels_of_dev_must_be_known(tmp_path):
    with pytest.raises(InputError, match=r"dev.tsv line 2: a label must be one of cold, warm, wet, got 'dry'"):
        read(tmp_path, SEVERAL, dev="text\tlabel\na\twet,dry\n", kind="multilabel")


def test_the_positive_class_is_chosen(tmp_path):
    train = "text\tlabel\na\tfraud\nb\tok\n"
    assert read(tmp_path, train)[0].positive == "ok"
    assert read(tmp_path, train, positive="fraud")[0].positive == "fraud"


BAD = "text\tlabel\na\tno\nb\nc\t\nd\tyes\nextra\tyes\tmore\n"


@pytest.mark.parametrize("line", ["b\n", "c\t\n"])
def test_the_error_about_a_bad_row_names_the_flag(tmp_path, line):
    """Fails when a user is told to repair a file by hand, and not that rows can be left out."""
    with pytest.raises(InputError, match="train.tsv line 4.*, or leave such rows out with --custom.skip-bad-rows"):
        read(tmp_path, f"text\tlabel\na\tno\nx\tyes\n{line}")


def test_bad_rows_are_left_out_and_counted(tmp_path):
    """Fails when a row without a label or with too few fields is kept, or left out without a word."""
    task, data = read(tmp_path, BAD, skip_bad_rows=True)
    train = data.splits["train"]
    assert [example.texts[0] for example in train.examples] == ["a", "d"] and task.labels == ("no", "yes")
    assert train.dropped == ((3, "1 columns"), (4, "no label"), (6, "3 columns")) and train.rows_read == 5
    said = "train: 2 examples of 5 rows read; 3 dropped: line 3 (1 columns), line 4 (no label), line 6 (3 columns)"
    assert data.report()[0].startswith(said)


def test_bad_json_rows_are_left_out_and_counted(tmp_path):
    rows = [{"text": "a", "label": "no"}, {"label": "no"}, {"text": "c"}, {"text": "d", "label": ""}]
    rows += [{"text": "e", "label": None}, {"text": "f", "label": "yes"}]
    train = "".join(json.dumps(row) + "\n" for row in rows)
    _, data = read(tmp_path, train, suffix="jsonl", skip_bad_rows=True)
    assert [example.texts[0] for example in data.splits["train"].examples] == ["a", "f"]
    assert data.splits["train"].dropped == ((2, "no text"), (3, "no label"), (4, "no label"), (5, "no label"))
    with pytest.raises(InputError, match="line 2 has no field 'text'.* or leave such rows out with --custom.skip-bad"):
        read(tmp_path, train, suffix="jsonl")


def test_a_test_file_may_have_labels_in_part(tmp_path):
    """Its unlabelled rows are left out with the flag; without it the error names the flag."""
    (tmp_path / "test.tsv").write_text("text\tlabel\na\tno\nb\t\n")
    train, test = "text\tlabel\na\tno\nb\tyes\n", str(tmp_path / "test.tsv")
    _, data = read(tmp_path, train, test=test, skip_bad_rows=True)
    assert len(data.splits["test"].examples) == 1 and data.splits["test"].dropped == ((3, "no label"),)
    with pytest.raises(InputError, match="label all rows or none, or leave such rows out with --custom.skip-bad-rows"):
        read(tmp_path, train, test=test)


def test_rows_of_spans_and_tags_are_not_left_out(tmp_path):
    with pytest.raises(InputError, match="--custom.skip-bad-rows must be left out for a span task"):
        read(tmp_path, "", suffix="jsonl", kind="span", skip_bad_rows=True)
