"""The rules every reader keeps: lines, quoting, encoding, line numbers; each is one that common readers break."""

import csv
import io
import json
import sys
import warnings

import pytest

from jaxlm.errors import InputError
from jaxlm.tasks import KINDS, Columns, Example, read_labelled, read_rows, read_task, task_from_json
from jaxlm.tasks.custom import CustomConfig, read_custom
from jaxlm.tasks.row_reader import RowReader

PAIR = KINDS["classification"](
    name="custom",
    form="entailment",
    labels=("no", "yes"),
    columns=Columns(texts=(("a",), ("b", "second")), label=("y",)),
)
CHOICE = KINDS["choice"](
    name="custom",
    labels=("0", "1"),
    columns=Columns(texts=(("a",),), choices=(("c0",), ("c1",)), choice_list=("choices",), label=("y",)),
    num_choices=2,
)


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def quoted(task):
    return task_from_json(task.to_json() | {"quoting": "csv"})


def test_lines_break_at_newlines_only(tmp_path):
    # str.splitlines would make nine lines of these rows; text mode would turn the lone carriage return into a newline.
    odd = "one\u0085two\u2028three\x0cfour\x1efive\rsix"
    path = write(tmp_path / "rows.tsv", f"a\tb\r\n{odd}\tx\r\nlast\ty")
    assert [example.texts for example in read_rows(path, PAIR)] == [(odd, "x"), ("last", "y")]


def test_byte_order_mark_belongs_to_no_column(tmp_path):
    path = write(tmp_path / "rows.tsv", b"\xef\xbb\xbfa\tb\none\ttwo\n")
    assert [example.texts for example in read_rows(path, PAIR)] == [("one", "two")]
    path = write(tmp_path / "rows.jsonl", b'\xef\xbb\xbf{"a": "one", "b": "\xef\xbb\xbftwo"}\n')
    assert [example.texts for example in read_rows(path, PAIR)] == [("one", "\ufefftwo")]


def test_bytes_that_are_not_utf8_are_named(tmp_path):
    path = write(tmp_path / "rows.tsv", b"a\tb\nfine\tfine\ncaf\xe9\tx\n")
    with pytest.raises(InputError, match=r"rows.tsv line 3: byte 0xe9 at offset 17 is not UTF-8"):
        list(read_rows(path, PAIR))
    assert list(read_rows(path, PAIR, errors="replace"))[1].texts == ("caf\ufffd", "x")


def test_quotes_are_characters_without_quoting(tmp_path):
    path = write(tmp_path / "rows.tsv", 'a\tb\n" The pie\tgrew .\n5 " nails\tx "\n')
    texts = [example.texts for example in read_rows(path, PAIR)]
    assert texts == [('" The pie', "grew ."), ('5 " nails', 'x "')]


def test_csv_quoting_reads_what_pandas_writes(tmp_path):
    content = 'a\tb\ty\n"He said ""no""\tthen\nleft"\t5" nails\tyes\n""\tplain\tno\n'
    path = write(tmp_path / "rows.tsv", content)
    split = read_labelled(path, quoted(PAIR))
    assert split.examples[0] == Example(('He said "no"\tthen\nleft', '5" nails'), (), "yes")
    assert split.examples[1] == Example(("", "plain"), (), "no")
    assert (split.rows_read, split.empty_fields) == (2, 1)


def test_csv_quoting_agrees_with_the_standard_library(tmp_path):
    import csv

    rows = [
        ["a", "b", "y"],
        ['"', "x", "yes"],
        ['""""', "tab\tand\nline", "no"],
        ["", '"q"', "yes"],
        ["u\u2028v", "w", "no"],
    ]
    buffer = io.StringIO()
    csv.writer(buffer, delimiter="\t", lineterminator="\n").writerows(rows)
    path = write(tmp_path / "rows.tsv", buffer.getvalue())
    read = [[*example.texts, example.label] for _, example in RowReader(path, PAIR.columns, quoting="csv")]
    assert read == rows[1:]


def test_csv_files_are_comma_separated_and_quoted(tmp_path):
    path = write(tmp_path / "rows.csv", 'a,b\n"one, two",three\n')
    assert [example.texts for example in read_rows(path, PAIR)] == [("one, two", "three")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('a\tb\nx\ty\n"never closed\tz\nmore\tw\n', "line 3: the field that opens with .* is never closed"),
        ('a\tb\nx\ty\n"closed" too soon\tz\n', "line 3: text follows a closing quote in field 1"),
    ],
)
def test_csv_quoting_is_strict(tmp_path, content, message):
    with pytest.raises(InputError, match=message):
        list(read_rows(write(tmp_path / "rows.tsv", content), quoted(PAIR)))


@pytest.mark.parametrize("content", ['a,b\n"never closed,z\n', 'a,b\n"closed" too soon,z\n'])
def test_quotes_of_a_csv_cannot_be_turned_off(tmp_path, content):
    """Fails when the message about a CSV, which is always read with quoting, proposes to read it without."""
    with pytest.raises(InputError, match='line 2: .*(close it|inside a quoted field as "")$'):
        list(read_rows(write(tmp_path / "rows.csv", content), PAIR))


def test_wrong_column_count_names_the_line(tmp_path):
    path = write(tmp_path / "rows.tsv", "a\tb\nx\ty\nx\ty\tz\n")
    with pytest.raises(InputError, match=r"rows.tsv line 3: the row must have 2 columns \(a, b\), got 3"):
        list(read_rows(path, PAIR))


def test_line_numbers_count_the_lines_of_quoted_fields(tmp_path):
    path = write(tmp_path / "rows.tsv", 'a\tb\n"two\nlines"\ty\nshort\n')
    with pytest.raises(InputError, match="line 4: the row must have 2 columns .*, got 1"):
        list(read_rows(path, quoted(PAIR)))


def test_columns_go_by_name_and_others_are_ignored(tmp_path):
    path = write(tmp_path / "rows.tsv", "second\tid\ty\ta\nB\t7\twhatever\tA\n")
    assert list(read_rows(path, PAIR)) == [Example(("A", "B"))]


def test_missing_and_doubled_columns(tmp_path):
    with pytest.raises(
        InputError, match=r"no column 'b' or 'second'; its columns are a, c; required are a, b \(or second\)"
    ):
        list(read_rows(write(tmp_path / "rows.tsv", "a\tc\nx\ty\n"), PAIR))
    with pytest.raises(InputError, match="columns must be distinct, got 'a' twice"):
        list(read_rows(write(tmp_path / "rows.tsv", "a\tb\ta\nx\ty\tz\n"), PAIR))
    with pytest.raises(InputError, match="has no rows"):
        list(read_rows(write(tmp_path / "rows.tsv", ""), PAIR))
    with pytest.raises(InputError, match="No such file"):
        list(read_rows(tmp_path / "absent.tsv", PAIR))


def test_json_rows(tmp_path):
    rows = [{"a": " one ", "second": "two\u2028", "y": "no"}, {"y": "yes", "b": "four", "a": ""}]
    path = write(tmp_path / "rows.jsonl", "\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n")
    assert [example.texts for example in read_rows(path, PAIR)] == [("one", "two"), ("", "four")]
    split = read_labelled(path, PAIR)
    assert [example.label for example in split.examples] == ["no", "yes"]
    assert (split.rows_read, split.empty_fields, split.dropped) == (2, 1, ())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2 must be a JSON object, got list"),
        ('{"a": "x"}', "line 2 has no field 'b' or 'second'; its fields are a"),
        ("{}", "line 2 has no field 'a'"),
        ('{"a": "x", "b": 3}', "line 2: b must be a string, got 3"),
        ('{"a": "x", "b": null}', "line 2: b must be a string, got None"),
        ('{"a": "x", "b": "\\ud800"}', "line 2: half of a surrogate pair"),
    ],
)
def test_bad_json_rows_name_the_line(tmp_path, line, message):
    path = write(tmp_path / "rows.jsonl", '{"a": "x", "b": "y"}\n' + line + "\n")
    reader = read_rows(path, PAIR)
    assert next(reader).texts == ("x", "y")  # what came before is given out: predictions stream
    with pytest.raises(InputError, match=message):
        next(reader)


def test_choices_from_columns_and_from_a_json_list(tmp_path):
    table = write(tmp_path / "rows.tsv", "c1\ta\tc0\nright\tcontext\tleft\n")
    listed = write(tmp_path / "rows.jsonl", '{"a": "context", "choices": ["left", "right"]}\n')
    assert (
        list(read_rows(table, CHOICE)) == list(read_rows(listed, CHOICE)) == [Example(("context",), ("left", "right"))]
    )
    labelled = write(tmp_path / "labelled.jsonl", '{"a": "context", "choices": ["left", "right"], "y": 1}\n')
    assert read_labelled(labelled, CHOICE).examples == (Example(("context",), ("left", "right"), "1"),)
    three = write(tmp_path / "three.jsonl", '{"a": "context", "choices": ["left", "right", "up"]}\n')
    with pytest.raises(InputError, match="line 1: the row must have 2 choices, got 3"):
        list(read_rows(three, CHOICE))


def test_blank_lines(tmp_path):
    path = write(tmp_path / "rows.tsv", "a\tb\ty\nx\ty\tno\n\nz\tw\tyes\n\n\n")
    split = read_labelled(path, PAIR)
    assert split.dropped == ((3, "empty line"),)
    assert (split.rows_read, len(split.examples)) == (3, 2)  # those at the end are not rows
    with pytest.raises(
        InputError, match="line 3: there is an empty line between rows"
    ):  # a prediction a line must stay in step
        list(read_rows(path, PAIR))


def test_labelled_rows_need_known_labels(tmp_path):
    with pytest.raises(InputError, match="line 3: a label must be one of no, yes, got 'maybe'"):
        read_labelled(write(tmp_path / "rows.tsv", "a\tb\ty\nx\ty\tno\nx\ty\tmaybe\n"), PAIR)
    with pytest.raises(InputError, match=r"line 2 has no label \(y\); fill it in"):
        read_labelled(write(tmp_path / "rows.tsv", "a\tb\ty\nx\ty\t\n"), PAIR)
    with pytest.raises(InputError, match="no column 'y'"):
        read_labelled(write(tmp_path / "rows.tsv", "a\tb\nx\ty\n"), PAIR)


def test_warning_counts_fields_that_look_quoted(tmp_path):
    content = 'a\tb\n"He said ""no"""\tplain\n"quoted"\tnot counted\n"more ""of"" it"\t"and ""this"""\n'
    with pytest.warns(UserWarning, match="3 fields begin and end with") as caught:
        list(read_rows(write(tmp_path / "rows.tsv", content), PAIR))
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(read_rows(write(tmp_path / "rows.tsv", content), quoted(PAIR)))


class _Pipe(io.RawIOBase):
    """Standard input that fails when it is read further than the rows asked for need."""

    def __init__(self, lines):
        self.lines = lines
        self.given = 0

    def __iter__(self):
        for line in self.lines:
            self.given += 1
            yield line


@pytest.mark.parametrize("kind", ["tsv", "jsonl"])
def test_standard_input_streams(monkeypatch, kind):
    rows = 10_000
    if kind == "tsv":
        lines = [b"a\tb\n"] + [f"first {i}\tsecond {i}\n".encode() for i in range(rows)]
    else:
        lines = [json.dumps({"a": f"first {i}", "b": f"second {i}"}).encode() + b"\n" for i in range(rows)]
    pipe = _Pipe(lines)
    monkeypatch.setattr(sys, "stdin", type("Input", (), {"buffer": pipe}))
    reader = read_rows("-", PAIR)
    assert next(reader).texts == ("first 0", "second 0")
    assert pipe.given <= 3
    rest = list(reader)
    assert len(rest) == rows - 1 and rest[-1].texts == (f"first {rows - 1}", f"second {rows - 1}")


def test_unknown_tasks_and_directories(tmp_path):
    with pytest.raises(InputError, match="task must be one of cola, sst2.*custom, got 'squat'"):
        read_task("squat", str(tmp_path))
    with pytest.raises(InputError, match="--task-dir must be given"):
        read_task("cola")
    with pytest.raises(InputError, match="is not a directory"):
        read_task("cola", str(tmp_path / "absent"))
    with pytest.raises(InputError, match="has no train.tsv"):
        read_task("cola", str(tmp_path))


def test_task_round_trip():
    for task in (PAIR, CHOICE):
        assert task_from_json(json.loads(json.dumps(task.to_json()))) == task
    with pytest.raises(InputError, match="task.json: .* unexpected .* 'tags'; read it"):
        task_from_json(PAIR.to_json() | {"tags": []})
    with pytest.raises(InputError, match="task.json: kind must be one of classification, .* got None; read it"):
        task_from_json({"name": "custom"})


@pytest.mark.parametrize("separator", [",", ";", "|"])
def test_the_separator_of_a_csv_is_found(separator, tmp_path, caplog):
    """Fails when the rows differ from those of Python's csv module, or another separator is not named.

    Semicolons are what spreadsheets write where the comma is the decimal sign.
    """
    file = tmp_path / "a.csv"
    with file.open("w", newline="", encoding="utf-8") as stream:
        rows = csv.writer(stream, delimiter=separator, lineterminator="\n")
        rows.writerows([["text", "label"], ['fine; and, "long" | so', "good"], ["two\nlines", "bad"]])
    custom = CustomConfig(train=str(file), dev=str(file), text="text", label="label")
    with caplog.at_level("INFO"):
        task, splits = read_custom(custom)
    with file.open(newline="", encoding="utf-8") as stream:
        _, *expected = csv.reader(stream, delimiter=separator)
    assert [[*example.texts, example.label] for example in splits["train"].examples] == expected
    assert (f"its columns are separated by '{separator}'" in caplog.text) == (separator != ",")
    new = tmp_path / "new.csv"
    new.write_text(f"id{separator}text\n1{separator}fine\n")  # rows to label, read by the task alone
    assert [example.texts for _, example in RowReader(new, task.columns, label="ignored")] == [("fine",)]


def test_the_separator_of_a_table_can_be_given(tmp_path):
    """Fails when a given separator is ignored, or a missing column of such a file is not listed apart."""
    (tmp_path / "a.tsv").write_text("text;label\na, b;good\nc;bad\n")
    custom = CustomConfig(train=str(tmp_path / "a.tsv"), text="text", label="label", separator=";")
    assert [example.texts for example in read_custom(custom)[1]["train"].examples] == [("a, b",), ("c",)]
    (tmp_path / "b.csv").write_text("satz;klasse\na;good\n")
    with pytest.raises(InputError, match="has no column 'text'; its columns are satz, klasse;"):
        read_custom(CustomConfig(train=str(tmp_path / "b.csv"), text="text", label="label"))
