"""Lines of `predict`: their formats, inputs and gold labels, ranked scores and embeddings, for every kind of task."""

import csv
import functools
import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import toy_encoder
import toy_run
from flax import linen as nn
from toy_encoder import KINDS, lines, make_files, softmax
from toy_runs import assert_one_line, run_here

import jaxlm
from jaxlm.distributed.mesh import MeshConfig, make_mesh, use_mesh
from jaxlm.errors import InputError
from jaxlm.inference.loaded_run import load_run
from jaxlm.inference.prediction import Predictor
from jaxlm.models.heads.bilstm import LSTMHead
from jaxlm.models.heads.linear import PooledHead
from jaxlm.objectives.task import outputs_and_vectors, task_outputs
from jaxlm.tasks import Columns, CustomConfig, Example, Predicted, Size, read_labelled, read_rows
from jaxlm.tasks.kinds.texts import LabelSets
from jaxlm.tasks.predicted import LineWriter, Summary, format_of_output, given_label, scores_of, with_inputs

pytestmark = pytest.mark.usefixtures("two_devices")

NASTY = [
    'say "no"',
    "two\nlines",
    "a\r\nb",
    "lone \r return",
    "tab\there",
    'comma, quote"',
    " blanks ",
    "🙂 é",
    "",
    "=1+1",
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A fine-tuned run of random parameters and its files, for every kind."""
    place = tmp_path_factory.mktemp("runs")
    vocabulary = toy_encoder.write_vocabulary(place)
    found = {}
    for kind in KINDS:
        files = make_files(place / kind, kind)
        found[kind] = toy_encoder.finetuned(place / f"run-{kind}", vocabulary, files, kind), files
    return found


@pytest.fixture(scope="module")
def plain(runs):
    """The output of `predict` without flags for the test rows of a kind."""

    @functools.cache
    def output(kind) -> str:
        run, files = runs[kind]
        return predicted(run, files / "test.jsonl")

    return output


def predicted(run, rows, *more) -> str:
    ended = run_here("predict", "--run", run, "--input", rows, *more)
    assert ended.code == 0, ended.errors
    return ended.output


def parsed(output: str) -> list[dict]:
    return [json.loads(line) for line in output.splitlines()]


@pytest.mark.parametrize("form", ["csv", "tsv"])
def test_tables_are_read_back_by_pythons_csv(form):
    """Fails if a quote, a delimiter or any line break is not quoted, or a list is not JSON."""
    rows = [
        {
            "index": number,
            "text": text,
            "prediction": text,
            "scores": {text: 0.1 + 0.2},
            "list": [text, None],
            "none": None,
        }
        for number, text in enumerate(NASTY)
    ]
    stream = io.StringIO(newline="")
    writer = LineWriter(stream, form)
    writer.write(rows[:4])
    writer.write(rows[4:])
    found = list(csv.DictReader(io.StringIO(stream.getvalue(), newline=""), dialect=f"excel{'-tab' * (form == 'tsv')}"))
    assert len(found) == len(rows)
    for row, line in zip(found, rows, strict=True):
        assert row["text"] == line["text"] == row["prediction"] and row["none"] == ""
        assert json.loads(row["scores"]) == line["scores"] and json.loads(row["list"]) == line["list"]
        assert int(row["index"]) == line["index"]
    with pytest.raises(InputError, match="must end in .jsonl for rows with different columns.*'new'"):
        writer.write([rows[0] | {"new": 1}])


@pytest.mark.parametrize("kind", KINDS)
def test_lines_without_flags_are_those_of_earlier_versions(runs, plain, kind):
    """Fails if a default line has another field, order or spelling: written here as the command wrote them before."""
    run, files = runs[kind]
    loaded = load_run(run, mesh=make_mesh(MeshConfig()))
    predictor = Predictor(loaded, "predict", batch_size=32)
    rows = list(read_rows(files / "test.jsonl", predictor.task))
    encoded = predictor.encode(rows)
    with use_mesh(loaded.mesh):
        found, _ = predictor.predict(encoded).predicted(predictor.task, encoded)
    expected = ""
    for index, (row, (prediction, scores)) in enumerate(zip(rows, found.lines, strict=True)):
        line = {"index": index, "prediction": prediction, "scores": scores}
        expected += json.dumps(line | ({"tokens": list(row.tokens)} if kind == "tagging" else {})) + "\n"
    assert plain(kind) == expected


@pytest.mark.parametrize("kind", ["classification", "regression", "span"])
def test_a_file_ends_with_a_summary(runs, plain, kind, tmp_path):
    """Fails if a row or a label is not counted: NumPy and Python count those of the file."""
    run, files = runs[kind]
    output = tmp_path / "labelled.jsonl"
    said = predicted(run, files / "test.jsonl", "--output", output)
    found = [line["prediction"] for line in parsed(output.read_text())]
    assert output.read_text() == plain(kind)
    rows, _, rest = said.removesuffix("\n").partition("; ")
    assert rows == f"{output}: {len(found)} rows"
    if kind == "regression":
        assert rest == f"mean {np.mean(found):.4g}, from {min(found):.4g} to {max(found):.4g}"
    elif kind == "span":
        assert not rest
    else:
        counts = {label: found.count(label) for label in found}
        assert rest.split(", ") == [f"{label} {counts[label]}" for label in sorted(counts, key=lambda x: -counts[x])]


def test_a_summary_names_the_ten_most_frequent_labels():
    """Fails if a label of several per row is not counted, or all of many are listed."""
    summary = Summary(LabelSets)
    summary.add([{"prediction": list("abcdefghijklm")}, {"prediction": []}])
    summary.add([{"prediction": ["m"]}])
    assert summary.text("x.csv") == "x.csv: 3 rows; m 2, a 1, b 1, c 1, d 1, e 1, f 1, g 1, h 1, i 1, 3 more labels"


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_and_gold_labels_beside_predictions(runs, plain, kind, tmp_path):
    """Fails if a column is lost, renamed or changed, or if the label is not the row's."""
    run, files = runs[kind]
    rows = [
        row | {"note": NASTY[number], "index": number + 7} for number, row in enumerate(lines(files / "test.jsonl"))
    ]
    source = toy_encoder.write_lines(tmp_path / "rows.jsonl", rows)
    full = parsed(predicted(run, source, "--with-inputs"))
    column = {"classification": "label", "regression": "score", "choice": "right", "span": "answers", "tagging": "tags"}
    for line, other, row in zip(parsed(plain(kind)), full, rows, strict=True):
        assert {name: other[name] for name in line} == line  # the fields of a line keep their values
        gold = row[column[kind]]
        assert other["label"] == ([answer["text"] for answer in gold] if kind == "span" else gold)
        for name, value in row.items():
            assert other["input_index" if name == "index" else name] == value, name
    for name in ("out.csv", "OUT.TSV", "out.jsonl", "out") if kind == "classification" else ("out.csv",):
        predicted(run, source, "--with-inputs", "--output", tmp_path / name)
        if name in ("out.jsonl", "out"):
            assert parsed((tmp_path / name).read_text()) == full
            continue
        dialect = "excel-tab" if name == "OUT.TSV" else "excel"
        with (tmp_path / name).open(encoding="utf-8", newline="") as file:
            table = list(csv.DictReader(file, dialect=dialect))
        for cells, line in zip(table, full, strict=True):
            assert {k: v if isinstance(line[k], str) else json.loads(v) for k, v in cells.items()} == line


def test_labels_of_new_rows_need_not_be_known(runs, tmp_path):
    """Fails if a row without a label gets one, or if an unknown label stops the predictions."""
    run, _ = runs["classification"]
    rows = [{"text": "ba", "label": label} for label in ("good", "", "other", None)]
    found = parsed(predicted(run, toy_encoder.write_lines(tmp_path / "r.jsonl", rows), "--with-inputs"))
    assert [line["label"] for line in found] == ["good", None, "other", None]
    found = parsed(predicted(run, toy_encoder.write_lines(tmp_path / "r.jsonl", [{"text": "ba"}]), "--with-inputs"))
    assert list(found[0]) == ["index", "text", "prediction", "scores"]
    (tmp_path / "rows.csv").write_text('id,text,label\n1,"ba, ""be""\nbi",good\n2,bo,\n')
    output = predicted(run, tmp_path / "rows.csv", "--with-inputs")
    assert [(line["id"], line["text"], line["label"]) for line in parsed(output)] == [
        ("1", 'ba, "be"\nbi', "good"),
        ("2", "bo", None),
    ]
    pq.write_table(pa.table({"text": ["ba", "be"], "when": pa.array([0, 1], pa.date32())}), tmp_path / "rows.parquet")
    found = parsed(predicted(run, tmp_path / "rows.parquet", "--with-inputs"))
    assert [line["when"] for line in found] == ["1970-01-01", "1970-01-02"]


def test_tags_of_a_token_per_line(runs, plain, tmp_path):
    """Fails if the last column is not the gold label, or if a file without one has labels."""
    run, files = runs["tagging"]
    rows = lines(files / "test.jsonl")
    for more, name in (("\tX\t{}", "label"), ("", "")):
        text = ""
        for row in rows:
            pairs = zip(row["tokens"], row["tags"], strict=True)
            text += "".join(token + more.format(tag) + "\n" for token, tag in pairs) + "\n"
        (tmp_path / "rows.conll").write_text(text)
        found = parsed(predicted(run, tmp_path / "rows.conll", "--with-inputs"))
        assert [line["tokens"] for line in found] == [row["tokens"] for row in rows]
        assert [line.get("label") for line in found] == [row["tags"] if name else None for row in rows]
        assert all(name in line for line in found if name)


def test_several_labels_per_row():
    """Fails if labels in a field or a list are not those of the task, or if the best are not in order."""
    columns = Columns(texts=(("text",),), label=("topics",), label_separator="|")
    task = LabelSets(name="custom", metrics=("micro_f1",), labels=("a", "b", "c"), columns=columns)
    for given, label in (("c|a", ["a", "c"]), (["b", "b"], ["b"]), ("a | z", ["a", "z"]), ("", []), (None, None)):
        assert given_label(task, {"text": "x", "topics": given}) == {"label": label}
    assert given_label(task, {"text": "x"}) == {}
    found = Predicted([(["c"], {"a": 0.2, "b": 0.2, "c": 0.9})])
    assert [list(one.items()) for one in scores_of(task, found, 2)] == [[("c", 0.9), ("a", 0.2)]]
    example = Example(("x",), (), ("a", "c"))
    line = with_inputs({"index": 0, "prediction": ["c"], "scores": {}}, task, example)
    assert list(line.items())[:3] == [("index", 0), ("text", "x"), ("label", ["a", "c"])]


def test_scores_of_the_best(runs, plain):
    """Fails if the scores are not the largest, in order, or if ranked answers do not begin with the best one."""
    run, files = runs["classification"]
    best = parsed(predicted(run, files / "test.jsonl", "--top-k", 1))
    for line, one in zip(parsed(plain("classification")), best, strict=True):
        assert list(one["scores"].items()) == sorted(line["scores"].items(), key=lambda item: -item[1])[:1]
        assert one["prediction"] == line["prediction"] == next(iter(one["scores"]))
    run, files = runs["span"]
    listed = {}
    for k in (1, 4):
        found = parsed(predicted(run, files / "test.jsonl", "--top-k", k))
        for line, other in zip(found, parsed(plain("span")), strict=True):
            answers = line["scores"].pop("answers")
            assert line == other and len(answers) == k
            assert {"text": line["prediction"], "probability": line["scores"]["probability"]} in answers or k == 1
            values = [answer["probability"] for answer in answers]
            assert values == sorted(values, reverse=True)
            assert listed.setdefault(line["index"], answers[0]) == answers[0]
    for kind in ("regression", "tagging"):
        run, files = runs[kind]
        ended = run_here("predict", "--run", run, "--input", files / "test.jsonl", "--top-k", 2)
        assert_one_line(ended, 2, f"--top-k must be left out for a {kind} task, got 2")
    ended = run_here("predict", "--run", runs["choice"][0], "--input", "-", "--top-k", 0)
    assert_one_line(ended, 2, "--top-k must be at least 1, got 0")


def head_of(run) -> tuple[np.ndarray, np.ndarray]:
    head = load_run(run).params["head"]
    return np.asarray(head["kernel"], np.float64), np.asarray(head["bias"], np.float64)


@pytest.mark.parametrize("kind", ["classification", "regression", "choice"])
def test_embeddings_are_what_the_head_reads(runs, plain, kind):
    """The head is one linear layer: its scores are recomputed here from the vectors alone."""
    run, files = runs[kind]
    found = parsed(predicted(run, files / "test.jsonl", "--embeddings"))
    assert [{k: v for k, v in line.items() if k != "embedding"} for line in found] == parsed(plain(kind))
    kernel, bias = head_of(run)
    for line in found:
        outputs = np.array(line["embedding"]) @ kernel + bias
        if kind == "regression":
            task = json.loads((run / "task.json").read_text())
            assert outputs[0] * task["deviation"] + task["mean"] == pytest.approx(line["prediction"], rel=1e-5)
        else:
            shares = softmax(outputs.reshape(-1))
            assert shares == pytest.approx(list(line["scores"].values()), abs=1e-5)


def test_embeddings_of_a_decoder(tmp_path):
    """Fails if the states of the two orders of a symmetric pair are not summed."""
    rows = [{"a": f"bo {k}", "b": "ba bu" * k, "y": "no" if k % 2 else "yes"} for k in range(8)]
    file = toy_encoder.write_lines(tmp_path / "rows.jsonl", rows)
    custom = CustomConfig(train=str(file), dev=str(file), text="a", text_pair="b", label="y", pairs="symmetric")
    run, _, _ = toy_run.finetuned(tmp_path / "gpt", toy_run.toy_tokenizer(), custom)
    kernel, bias = head_of(run)
    found = parsed(predicted(run, file, "--embeddings", "--with-inputs"))
    assert len(found) == 8
    for line in found:
        shares = softmax(np.array(line["embedding"]) @ kernel + bias)
        assert shares == pytest.approx(list(line["scores"].values()), abs=1e-5)
        assert line["label"] == ("no" if line["index"] % 2 else "yes") and line["a"] == f"bo {line['index']}"


def test_vectors_of_a_recurrent_head(runs):
    """Fails if the vectors are not the states of the BiLSTM, which its linear layer reads."""
    run, files = runs["classification"]
    loaded = load_run(run)
    predictor = Predictor(loaded, "predict", batch_size=8)
    batch = predictor.encode(list(read_rows(files / "test.jsonl", predictor.task))).batch(np.arange(7), Size(0, 24), 8)
    head = LSTMHead(PooledHead("classification", 2, 0.1, 0.5), width=8, num_layers=1)
    first = head.init(jax.random.key(0), jnp.zeros((2, 1, 1, 16)), jnp.ones((1, 1), jnp.int32), train=False)
    params = {"backbone": loaded.params["backbone"], "head": nn.unbox(first["params"])}
    scores, vectors = jax.jit(lambda params, batch: outputs_and_vectors(loaded.model, head, params, batch))(
        params, batch
    )
    expected, _ = jax.jit(lambda params, batch: task_outputs(loaded.model, head, params, batch))(params, batch)
    assert scores == pytest.approx(np.asarray(expected), abs=1e-6) and vectors.shape == (8, 2 * 8)
    kernel, bias = (np.asarray(params["head"]["head"][name]) for name in ("kernel", "bias"))
    assert np.asarray(vectors, np.float64) @ kernel + bias == pytest.approx(np.asarray(scores), abs=1e-5)


def test_embeddings_are_refused_where_a_head_reads_tokens(runs):
    for kind in ("span", "tagging"):
        ended = run_here("predict", "--run", runs[kind][0], "--input", runs[kind][1] / "test.jsonl", "--embeddings")
        assert_one_line(ended, 2, f"--embeddings must be left out for a {kind} task", "evaluate features")


def test_rows_without_text_are_told(runs, tmp_path, caplog):
    """Fails when an input without rows, or a row without a text, passes without a word."""
    run, files = runs["classification"]
    file = tmp_path / "rows.csv"
    for content, message in (
        ("text\n", f"warning: {file} has no rows: nothing was predicted\n"),
        ('text\nba be\n""\n"  "\n', "warning: 2 of 3 rows have an empty text\n"),
    ):
        file.write_text(content)
        ended = run_here("predict", "--run", run, "--input", file)
        assert ended.code == 0 and ended.errors.endswith(message)
        assert len(parsed(ended.output)) == content.count("\n") - 1
    assert "warning" not in run_here("predict", "--run", run, "--input", files / "test.jsonl").errors
    with caplog.at_level("WARNING", "jaxlm"):
        jaxlm.load(run).predict([{"text": "ba"}, {"text": ""}])
    assert "1 of 2 rows have an empty text" in caplog.text


def test_letters_of_all_languages_are_readable(tmp_path):
    """Fails when JSON lines have \\u00e9 for é, or when an output in Latin-1 does not have it for 🙂."""
    line = {"index": 0, "prediction": "bon / été", "text": "🙂"}
    for encoding, readable in (("utf-8", True), ("latin-1", False)):
        with open(tmp_path / encoding, "w", encoding=encoding) as file:
            LineWriter(file, "jsonl").write([line])
        text = (tmp_path / encoding).read_text(encoding=encoding)
        assert json.loads(text) == line and ("bon / été" in text) == readable


def test_outputs_that_cannot_be_written_are_refused(tmp_path):
    """Fails on 2968321, which wrote JSON lines into a file called .csv without a word."""
    for name in ("x.xlsx", "x.parquet", "x.ODS"):
        ended = run_here("predict", "--run", tmp_path, "--input", "-", "--output", tmp_path / name)
        assert_one_line(ended, 2, "--output must end in .csv, .tsv or .jsonl", name)
    assert not list(tmp_path.iterdir())
    assert format_of_output(None) == "jsonl"


def columns_of(file) -> list[list[list[str]]]:
    """The columns of each word of each sentence, read as by any program."""
    text = file.read_text(encoding="utf-8")
    assert text.endswith("\n\n")
    return [[word.split("\t") for word in part.split("\n")] for part in text.removesuffix("\n\n").split("\n\n")]


def test_tags_are_written_as_columns(runs, plain, tmp_path):
    """Fails when a word or a sentence is lost, a column is another one, or the file is not read back."""
    run, files = runs["tagging"]
    rows, expected = parsed((files / "test.jsonl").read_text()), parsed(plain("tagging"))
    both = [[row["tokens"], row["tags"], line["prediction"]] for row, line in zip(rows, expected, strict=True)]
    new, gold, judged = (tmp_path / name for name in ("new.conll", "gold.conll", "judged.conll"))
    predicted(run, files / "test.jsonl", "--output", new)
    assert columns_of(new) == [list(map(list, zip(words, tags, strict=True))) for words, _, tags in both]
    predicted(run, files / "test.jsonl", "--output", gold, "--with-inputs")
    assert columns_of(gold) == [list(map(list, zip(*three, strict=True))) for three in both]
    ended = run_here("evaluate", "task", "--run", run, "--input", files / "test.jsonl", "--output", judged)
    assert ended.code == 0 and judged.read_text() == gold.read_text()
    task = load_run(run, mesh=make_mesh(MeshConfig())).finetuned_parts("predict")[0]
    again = read_labelled(new, task).examples
    assert [[list(one.tokens), list(one.tags)] for one in again] == [[words, tags] for words, _, tags in both]


def test_columns_of_odd_words(tmp_path):
    """Fails when a word breaks its line, or when a word without a tag has no second column."""
    stream = io.StringIO()
    line = {"index": 3, "tokens": ["a\tb\n", "20 000", ""], "prediction": ["X", "", "Y"]}
    LineWriter(stream, "conll").write([line, line | {"label": ["Y", "X", "X"]}])
    assert stream.getvalue() == "a b \tX\n20 000\t_\n_\tY\n\na b \tY\tX\n20 000\tX\t_\n_\tX\tY\n\n"
    for label in ("X", ["X"]):
        with pytest.raises(InputError, match=r"row 3 \(counted from 0\) must have 3 tags, one for each token, got .*X"):
            LineWriter(stream, "conll").write([line | {"label": label}])


def test_columns_are_for_tags(runs, tmp_path):
    """Fails when a classification is written under a name that promises columns."""
    run, files = runs["classification"]
    ended = run_here("predict", "--run", run, "--input", files / "test.jsonl", "--output", tmp_path / "x.conll")
    assert_one_line(ended, 2, "--output must end in .csv, .tsv or .jsonl for a classification task, got .conll")
    assert not list(tmp_path.iterdir())
