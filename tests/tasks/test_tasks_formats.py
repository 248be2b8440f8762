"""Formats of labelled files: Parquet, folders of texts, and every name or content that is not what it seems."""

import io
import json
import sys
import zipfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxlm.errors import InputError
from jaxlm.tasks import KINDS, TASKS, Columns, CustomConfig, read_labelled, read_rows, read_task
from jaxlm.tasks.examples import Example

CUSTOM = {"text": "text", "label": "label"}
TASK = KINDS["classification"](
    name="custom",
    labels=("no", "yes"),
    columns=Columns(texts=(("text",),), label=("label",)),
)


def read(train, **settings):
    return read_task("custom", None, CustomConfig(train=str(train), **(CUSTOM | settings)))


def test_parquet_gives_the_task_of_json_lines(tmp_path):
    """Fails if nulls, numbers or dictionary columns are read otherwise than in JSON."""
    rows = [{"text": f" row {k}\n🙂 ", "label": k % 2, "extra": None if k % 3 else [k]} for k in range(20)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = pa.Table.from_pylist(rows)
    table = table.set_column(0, "text", table["text"].dictionary_encode())
    pq.write_table(table, tmp_path / "train.parquet", compression="zstd", row_group_size=6)
    (task, data), (same, read_back) = read(tmp_path / "train.jsonl"), read(tmp_path / "train.parquet")
    assert task == same and data == read_back and task.labels == ("0", "1")
    assert list(read_rows(tmp_path / "train.parquet", task)) == list(read_rows(tmp_path / "train.jsonl", task))


def test_rows_of_parquet_are_named_by_number(tmp_path):
    pq.write_table(pa.table({"text": ["x", None, "y"], "label": ["no", "yes", "no"]}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"a.parquet row 2: text must be a string, got None"):
        read(tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": ["x", "y"], "label": ["no", None]}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"a.parquet row 2 has no label"):
        read(tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": ["x", "y"], "label": ["no", "maybe"]}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"a.parquet row 2: a label must be one of no, yes, got 'maybe'"):
        read_labelled(tmp_path / "a.parquet", TASK)


def test_questions_and_tags_of_parquet(tmp_path):
    """Answers come as an object of two lists, as in Hugging Face's data sets."""
    rows = [
        {"id": "a", "context": "b c", "question": "q?", "answers": {"text": ["c"], "answer_start": [2]}},
        {"id": "b", "context": "b c", "question": "r?", "answers": {"text": [], "answer_start": []}},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "dev.parquet")
    found = read_labelled(tmp_path / "dev.parquet", TASKS["squad2"]).examples
    assert [(example.name, example.answers) for example in found] == [("a", (("c", 2),)), ("b", ())]
    sentences = [{"tokens": ["Go", "on"], "tags": ["O", "B-X"]}, {"tokens": ["A"], "tags": ["O"]}]
    pq.write_table(pa.Table.from_pylist(sentences), tmp_path / "tags.parquet")
    file = str(tmp_path / "tags.parquet")
    task, data = read_task("custom", None, CustomConfig(train=file, dev=file, kind="tagging"))
    assert task.labels == ("O", "B-X", "I-X")
    assert [example.tags for example in data.splits["dev"].examples] == [("O", "B-X"), ("O",)]


def reviews(directory, classes=("neg", "pos"), count=6):
    """Texts in the layout of aclImdb: a folder per class, and other files beside the folders."""
    for name in classes:
        (directory / name).mkdir(parents=True)
        for k in range(count):
            (directory / name / f"{k}_{k}.txt").write_text(f" {name} {k},\n\twith é and 🙂 \n")
    (directory / "urls_pos.txt").write_text("http://example.com\n")
    (directory / ".DS_Store").write_bytes(b"\0\1")
    return directory


def test_a_folder_per_class(tmp_path):
    """Fails if classes or files are not sorted, a text is split at its lines, or a file beside the folders is a row."""
    train, test = reviews(tmp_path / "train"), reviews(tmp_path / "test", count=2)
    task, data = read_task("custom", str(tmp_path), CustomConfig(train="train", dev="test", test="test"))
    assert task.labels == ("neg", "pos") and task.columns == Columns(texts=(("text",),), label=("label",))
    assert data.splits["train"].examples == tuple(
        Example((f"{name} {k},\n\twith é and 🙂",), (), name) for name in ("neg", "pos") for k in range(6)
    )
    assert [example.label for example in data.splits["dev"].examples] == ["neg", "neg", "pos", "pos"]
    assert [example.texts for example in read_rows(test, task)] == [e.texts for e in data.splits["dev"].examples]
    plain = tmp_path / "plain"
    plain.mkdir()
    for k in (1, 0):
        (plain / f"{k}.txt").write_text(f"new {k}\n")
    assert [example.texts for example in read_rows(plain, task)] == [("new 0",), ("new 1",)]
    named, _ = read(train, text="review", label="sentiment")
    assert named.columns == Columns(texts=(("review",),), label=("sentiment",))
    _, unlabelled = read_task("custom", None, CustomConfig(train=str(train), test=str(plain)))
    assert [example.label for example in unlabelled.splits["test"].examples] == [None, None]


def test_bad_folders_end_in_one_line(tmp_path):
    train = reviews(tmp_path / "train")
    other = reviews(tmp_path / "other", ("pos", "unsup"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "nested" / "a" / "b").mkdir(parents=True)
    binary = reviews(tmp_path / "binary")
    (binary / "neg" / "0_0.txt").write_bytes(b"caf\xe9")
    for settings, why in (
        ({"train": train, "dev": other}, "row 7: a label must be one of neg, pos, got 'unsup'"),
        ({"train": tmp_path / "empty"}, "empty has no text files"),
        ({"train": tmp_path / "nested"}, "nested/a/b: the folder of a class must hold text files"),
        ({"train": binary}, "0_0.txt line 1: byte 0xe9 at offset 3 is not UTF-8"),
        ({"train": train, "kind": "regression"}, "custom.kind must be left out for .*/train, a folder per class"),
        ({"train": train, "text_pair": "b"}, "custom.text_pair must be left out"),
        ({"train": train, "kind": "tagging"}, "must be in a file, got a directory"),
        ({"train": train, "kind": "span"}, "must be JSON lines or a Parquet file, got a folder"),
    ):
        paths = {name: str(value) for name, value in settings.items()}
        with pytest.raises(InputError, match=why) as caught:
            read_task("custom", None, CustomConfig(**paths))
        assert "\n" not in str(caught.value)


CSV, TSV, JSONL = "text,label\na,no\nb,yes\n", "text\tlabel\na\tno\nb\tyes\n", '{"text": "a", "label": "no"}\n'


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.tsv", CSV, "a.tsv looks like CSV, but is read as TSV; rename it to .csv"),
        ("a.tsv", CSV.replace(",", ";"), "a.tsv looks like CSV, but is read as TSV; rename it to .csv"),
        ("a.csv", TSV, "a.csv looks like TSV, but is read as CSV; rename it to .tsv"),
        ("a.tsv", JSONL, "a.tsv looks like JSON lines, but is read as TSV; rename it to .jsonl"),
        ("a.txt", TSV, "the name must end in .tsv, .csv, .jsonl or .parquet, got .txt; rename or convert it"),
        ("a", TSV, "got no suffix"),
        ("a.tsv.gz", TSV, "got .gz"),
        ("a.xlsx", TSV, "a.xlsx: a spreadsheet cannot be read; save it as CSV"),
        ("a.jsonl", CSV, "line 1 is not JSON"),
        ("a.parquet", CSV, "a.parquet cannot be read as a Parquet file"),
    ],
)
def test_a_file_that_is_not_what_its_name_says(tmp_path, name, content, why):
    """Fails on 2968321: a .txt or .xlsx is read as TSV, and a CSV lacks the columns that its header shows."""
    (tmp_path / name).write_text(content)
    for function in (lambda: read(tmp_path / name), lambda: list(read_rows(tmp_path / name, TASK))):
        with pytest.raises(InputError, match=why) as caught:
            function()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("minute", (0, 20))
def test_binary_files_are_named(tmp_path, minute):
    """The first line of an archive of 01:20 ends in its date, before the first byte that is not UTF-8."""
    with zipfile.ZipFile(tmp_path / "a.csv", "w") as archive:
        archive.writestr(zipfile.ZipInfo("sheet.xml", (2026, 11, 27, 1, minute, 0)), bytes(range(256)))
    pq.write_table(pa.table({"text": ["é" * 99]}), tmp_path / "a.tsv")
    for name, kind in (("a.csv", "an Excel file or an archive"), ("a.tsv", "a Parquet file")):
        with pytest.raises(InputError, match=f"must be text, got {kind}"):
            list(read_rows(tmp_path / name, TASK))


def test_standard_input_in_every_format(monkeypatch):
    """Fails on 2968321: a CSV cannot be read from standard input, and the message does not say so."""

    def rows(content, form=None):
        stream = io.TextIOWrapper(io.BytesIO(content.encode()))
        monkeypatch.setattr(sys, "stdin", stream)
        return [example.texts[0] for example in read_rows("-", TASK, form=form)]

    assert rows(TSV) == rows(CSV, "csv") == rows(TSV, "tsv") == ["a", "b"]
    assert rows(JSONL) == rows(JSONL, "jsonl") == ["a"]
    with pytest.raises(InputError, match="standard input looks like CSV, but is read as TSV; give --input-format csv"):
        rows(CSV)
