"""The report's content against the numbers in the files of the runs, read without the code under test."""

import base64
import json
import shutil

import numpy as np
import pytest
from report_page import Page, html_of
from report_runs import SPEED, TASK, encoder, finetuned, pretrained, zero_shot

from jaxlm import report
from jaxlm.errors import InputError
from jaxlm.tasks import KINDS
from jaxlm.training.optimizer_config import OptimizerConfig
from jaxlm.views.curves import Curve
from jaxlm.views.report.charts import EXACT, Chart, _unit, compact
from jaxlm.views.report.sections import short_names


def decoded(text: str, kind: str) -> list:
    return np.frombuffer(base64.b64decode(text), kind).tolist()


def lines_of(run, name) -> list[dict]:
    complete = (run / "metrics.jsonl").read_text().rpartition("\n")[0]
    lines = [json.loads(line) for line in complete.splitlines()]
    return [line for line in lines if name in line]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A pretraining run, a longer one of another seed that is under way, and two fine-tuning runs."""
    place = tmp_path_factory.mktemp("runs")
    one, two = pretrained(place / "one"), pretrained(place / "two", steps=60, until=31, seed=1)
    with (two / "metrics.jsonl").open("a") as file:
        file.write('{"step": 32, "loss": 0.00')  # torn: the run is writing
    zero_shot(one)
    several = finetuned(place / "tuned", rates=(1e-3, 3e-3))
    return one, two, several, finetuned(place / "alone", seeds=1, labels=False, seed=5)


@pytest.fixture(scope="module")
def page(runs, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        return Page(html_of(patch, tmp_path_factory.mktemp("page") / "report.html", *runs))


def test_curves_are_those_of_the_files(runs, page):
    """Fails when a point is lost or moved, a torn line is shown, or a metric that is a list becomes a chart."""
    payload = json.loads(page.payload)
    charts = {chart["title"]: chart["lines"] for chart in payload["charts"]}
    assert [entry["label"] for entry in payload["entries"]] == [
        "one", "two", "tuned, rate 0.001", "tuned, rate 0.003", "alone",
    ]  # fmt: skip
    assert "update norm/blocks" not in charts and "tokens" not in charts and "mfu" not in charts
    for number, run in enumerate(runs[:2]):
        for name in ("loss", "validation_loss", "learning_rate"):
            (line,) = (line for line in charts[name.replace("_", " ")] if line["entry"] == number)
            expected = lines_of(run, name)
            assert decoded(line["x"], "<i4") == [one["step"] for one in expected]
            assert decoded(line["y"], "<f4") == [float(np.float32(one[name])) for one in expected]
    assert [entry["marks"] for entry in payload["entries"]] == [[10], [10], [], [], []]


def test_seeds_are_grouped_by_learning_rate(runs, page):
    """Fails when the mean of a rate has another rate's seeds, or a deviation is not that of the seeds' last values."""
    payload = json.loads(page.payload)
    (chart,) = (chart for chart in payload["charts"] if chart["title"] == "dev accuracy")
    for entry, rate in ((2, 1e-3), (3, 3e-3)):
        own = [line for line in chart["lines"] if line["entry"] == entry]
        assert [line["kind"] for line in own] == ["mean", "trial", "trial", "trial"]
        lines = [line for line in lines_of(runs[2], "dev_accuracy") if line["peak_lr"] == rate]
        means = [np.mean([line["dev_accuracy"] for line in lines if line["step"] == step]) for step in (3, 6, 9)]
        assert decoded(own[0]["y"], "<f4") == [float(np.float32(mean)) for mean in means]
        last = [line["dev_accuracy"] for line in lines if line["step"] == 9]
        (row,) = (row for row in page.table("dev accuracy: values") if row[0] == f"tuned, rate {rate:g}")
        assert row[1:] == [
            f"{means[0]:.4f}", f"{max(means):.4f}", str([3, 6, 9][int(np.argmax(means))]),
            f"{np.mean(last):.4f} ± {np.std(last, ddof=1):.4f}", "9",
        ]  # fmt: skip


def test_values_beside_a_chart(runs, page):
    rows = page.table("validation loss: values")
    losses = [(line["step"], line["validation_loss"]) for line in lines_of(runs[0], "validation_loss")]
    best = min(losses, key=lambda pair: pair[1])
    assert rows[0] == ["run", "first", "best", "at step", "last", "at step"]
    assert rows[1] == ["one", f"{losses[0][1]:.4f}", f"{best[1]:.4f}", f"{best[0]}", f"{losses[-1][1]:.4f}", "40"]
    assert page.table("learning rate: values")[0][2:4] == ["lowest", "highest"]
    sentence = next(label for label in page.labels if label.startswith("Chart of validation loss over steps, 2 lines"))
    assert "one" in sentence and f"{losses[-1][1]:.4g}" in sentence
    assert len(page.labels) == len(json.loads(page.payload)["charts"]) + 1  # the calibration


def test_tokens_and_hours(tmp_path, runs, page):
    """Fails when tokens are not those that were logged, or hours are not tokens at the logged speed."""
    clock = json.loads(page.payload)["entries"][0]["clock"]
    assert decoded(clock["steps"], "<i4") == list(range(41))
    assert decoded(clock["tokens"], "<f8") == [64.0 * step for step in range(41)]
    np.testing.assert_allclose(decoded(clock["hours"], "<f8"), [64 * step / SPEED / 3600 for step in range(41)])
    assert json.loads(page.payload)["entries"][2]["clock"] is None
    with pytest.MonkeyPatch.context() as patch:
        of_bert = Page(html_of(patch, tmp_path / "bert.html", encoder(tmp_path / "bert")))
    clock = json.loads(of_bert.payload)["entries"][0]["clock"]
    assert decoded(clock["tokens"], "<f8") == [32.0 * step for step in range(10)] + [9 * 32 + 64.0]


def test_tokens_of_a_fine_tuning(tmp_path, runs, monkeypatch):
    """Fails when the logged tokens of a run are not read, or when those of its trials are added."""
    run = tmp_path / "tuned"
    shutil.copytree(runs[2], run)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if "tokens_per_second" in line:
            line["trained_tokens"] = 100 * line["step"] + 2 * line["seed"]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    payload = json.loads(Page(html_of(monkeypatch, tmp_path / "r.html", run)).payload)
    clock = payload["entries"][0]["clock"]
    steps = sorted({line["step"] for line in lines if "tokens_per_second" in line})
    assert decoded(clock["steps"], "<i4") == [0, *steps]
    tokens = [0.0, *(100.0 * step + 2 for step in steps)]  # seeds 0, 1 and 2
    assert decoded(clock["tokens"], "<f8") == tokens
    np.testing.assert_allclose(decoded(clock["hours"], "<f8"), np.array(tokens) / 9 / 3600)


def test_fields_that_differ(tmp_path, runs, monkeypatch):
    """Fails when an equal field is shown or a differing one is left out."""
    rows = Page(html_of(monkeypatch, tmp_path / "r.html", *runs[:2])).table("Fields of config.json that differ")
    assert rows == [["field", "one", "two"], ["num_steps", "40", "60"], ["seed", "0", "1"]]
    equal = Page(html_of(monkeypatch, tmp_path / "r.html", runs[0], pretrained(tmp_path / "same")))
    assert "The configs are equal." in equal.text


def test_results_over_seeds_are_those_of_the_file(runs, page):
    """Fails when the rows of two learning rates are mixed, or the standard deviation is that of a population."""
    trials = json.loads((runs[2] / "results.json").read_text())["runs"]
    rows = page.table("Mean over seeds of the metric that selects")
    assert len(rows) == 4
    by_rate = {rate: [t["dev"]["accuracy"] for t in trials if t["learning_rate"] == rate] for rate in (1e-3, 3e-3)}
    best = max(by_rate, key=lambda rate: np.mean(by_rate[rate]))
    for row, (rate, values) in zip(rows[1:3], by_rate.items(), strict=True):
        chosen = f"{rate:g}" + (" *" if rate == best else "")
        said = f"{np.mean(values):.4f} ± {np.std(values, ddof=1):.4f}"
        assert row[:4] == ["tuned", TASK.name, chosen, "3"] and row[4] == said
    each = page.table("Results of each seed")
    accuracies = [f"{trial['dev']['accuracy']:.4f}" for trial in trials]
    assert [row[-1] for row in each[1:] if row[0] == "tuned"] == accuracies
    alone = json.loads((runs[3] / "results.json").read_text())["runs"][0]
    assert rows[3][3:5] == ["1", f"{alone['dev']['accuracy']:.4f}"]


def test_errors_of_the_best_seed(runs, page):
    """Fails when the matrix, the bins or the wrong predictions are of another seed, or right ones are shown."""
    results = json.loads((runs[2] / "results.json").read_text())
    best = results["best"]
    lines = [json.loads(line) for line in (runs[2] / "predictions.jsonl").read_text().splitlines()]
    own = [line for line in lines if all(line[name] == best[name] for name in ("seed", "learning_rate"))]
    counts = [
        [sum(line["label"] == given and line["prediction"] == predicted for line in own) for predicted in TASK.labels]
        for given in TASK.labels
    ]
    rows = page.table("tuned, dev: examples by given and predicted label")
    assert [row[1:3] for row in rows[1:]] == [[str(count) for count in row] for row in counts]
    wrong = [line for line in own if line["label"] != line["prediction"]]
    shown = page.table("tuned, dev, seed")
    assert [row[0] for row in shown[1:]] == [str(line["index"]) for line in wrong[:20]]
    assert shown[0] == ["index", "text", "label", "prediction", "probability"]
    assert shown[1][1:] == [
        wrong[0]["text"], wrong[0]["label"], wrong[0]["prediction"],
        f"{wrong[0]['scores'][wrong[0]['prediction']]:.4f}",
    ]  # fmt: skip
    assert f"{len(wrong)} of 40 predictions are wrong" in page.text
    assert "the first 20 of 40 predictions, without labels" in page.text
    bins = [0] * 15
    for line in own:
        bins[int(np.ceil(max(line["scores"].values()) * 15)) - 1] += 1
    assert [row[2] for row in page.table("Calibration of tuned, dev")[1:]] == [str(count) for count in bins if count]
    drawn = json.loads(page.payload)["calibration"]["dev"]
    assert [line["label"] for line in drawn] == ["tuned", "alone"]
    assert drawn[0]["entry"] == (2 if best["learning_rate"] == 1e-3 else 3)


def test_zero_shot_values(runs, page):
    last = json.loads((runs[0] / "zero_shot.jsonl").read_text().splitlines()[-2])
    rows = page.table("Values without fine-tuning at the last step")
    assert rows[1] == ["one", "lambada", "paper", "accuracy", "40", f"{last['value']:.4f}", "0.0100", "98"]
    (chart,) = (c for c in json.loads(page.payload)["charts"] if c["title"].startswith("zero-shot lambada, paper: acc"))
    lines = [json.loads(line) for line in (runs[0] / "zero_shot.jsonl").read_text().splitlines()]
    errors = [line["stderr"] for line in lines if (line["task"], line["metric"]) == ("lambada", "accuracy")]
    assert decoded(chart["lines"][0]["e"], "<f4") == [float(np.float32(error)) for error in errors]
    assert decoded(chart["lines"][0]["x"], "<i4") == [10, 20, 40]


def test_runs_under_way_and_sections(runs, page):
    rows = {row[0]: row for row in page.table("The runs and their progress")}
    assert rows["two"][3:5] == ["31", "52% of 60 steps"] and rows["one"][4] == rows["tuned"][4] == "complete"
    assert page.titles == [
        "Runs", "Curves", "Differences", "Results of fine-tuning", "Confusion and calibration", "Predictions",
        "Zero-shot tasks", "Starts",
    ]  # fmt: skip
    assert [row[2] for row in page.table("Starts")[1:5]] == ["from scratch", "resumed at step 10"] * 2


def test_evaluations_and_samples(tmp_path, monkeypatch):
    """Fails when metrics of jaxlm.evaluate or texts of jaxlm.generate are left out, or a separator ends a text."""
    run = pretrained(tmp_path / "one")
    samples = [json.dumps({"text": f"It was\u2028 sample {k}."}, ensure_ascii=False) for k in range(5)]
    (run / "samples.jsonl").write_text("\n".join(samples) + "\n", encoding="utf-8")
    (tmp_path / "figures.json").write_text('{"perplexity": 12.5, "tokens": 300, "by": {"section": "NaN"}}')
    html = html_of(monkeypatch, tmp_path / "r.html", run, tmp_path / "figures.json", "--examples", 2)
    found = Page(html)
    assert found.table("Metrics of jaxlm.evaluate") == [
        ["metric", "figures.json"], ["perplexity", "12.5000"], ["tokens", "300"], ["by.section", "NaN"],
    ]  # fmt: skip
    assert " sample 1." in found.text and " sample 2." not in found.text
    alone = Page(html_of(monkeypatch, tmp_path / "r.html", tmp_path / "figures.json"))
    assert alone.titles == ["Evaluations"]


def test_a_long_curve_keeps_its_spikes():
    """Fails when the lowest or highest value of a part is lost, or the means for smoothing are not of all values."""
    values = np.random.default_rng(0).normal(size=30_000)
    values[12_345], values[20_000] = 99.0, -99.0
    curve = Curve(np.arange(1, 30_001), values)
    found = compact(curve, 1000)
    steps, kept = decoded(found["x"], "<i4"), decoded(found["y"], "<f4")
    assert len(steps) <= 2 * 1000 + 2 and steps == sorted(set(steps)) and steps[0] == 1 and steps[-1] == 30_000
    assert kept == [float(np.float32(values[step - 1])) for step in steps]
    assert {12_346, 20_001} <= set(steps)
    np.testing.assert_allclose(decoded(found["my"], "<f4"), values.reshape(1000, 30).mean(axis=1), rtol=1e-4, atol=1e-6)
    assert set(compact(Curve(np.arange(EXACT), np.zeros(EXACT)), 10)) == {"x", "y"}


def test_one_and_twenty_runs(tmp_path, runs, monkeypatch):
    """Fails when a report of one run compares, or twenty runs share names."""
    one = Page(html_of(monkeypatch, tmp_path / "r.html", runs[0]))
    assert "Differences" not in one.titles and len(one.table("The runs")) == 2
    many = [pretrained(tmp_path / "many" / f"run{k}" / "pretrained", seed=k) for k in range(20)]
    found = Page(html_of(monkeypatch, tmp_path / "r.html", *many))
    assert [row[0] for row in found.table("The runs")[1:]] == [f"run{k}/pretrained" for k in range(20)]
    assert len(json.loads(found.payload)["entries"]) == 20


def test_names_are_the_shortest_endings_of_their_own():
    """Fails when a name has directories that it does not need, or is that of two runs."""
    assert short_names(["gs://b/x", "/tmp/x"]) == ["b/x", "tmp/x"] and short_names(["a/b/"]) == ["b"]
    assert short_names(["A/B/pretrained", "A/B/scratch", "n/runs/x", "n/runs/ft"]) == [
        "pretrained",
        "scratch",
        "x",
        "ft",
    ]
    assert short_names(["x", "a/x", "b/a/x", "./y"]) == ["x", "a/x", "b/a/x", "y"]  # "x" ends the others


def test_the_table_of_runs_has_the_best_validation_and_the_fields_that_differ(tmp_path, monkeypatch):
    """Fails when the lowest validation loss is another, a differing field is left out, or groups mix values.

    The losses are read from metrics.jsonl here. Groups are the fields with fewer values than there are runs.
    """
    settings = [(rate, seed) for rate in (1e-4, 1e-3) for seed in (0, 1)]
    made = [
        pretrained(tmp_path / str(k), seed=seed, optimizer=OptimizerConfig(peak_lr=rate))
        for k, (rate, seed) in enumerate(settings)
    ]
    found = Page(html_of(monkeypatch, tmp_path / "r.html", *made))
    head, *rows = found.table("The runs and their progress")
    for run, row, setting in zip(made, rows, settings, strict=True):
        best = min((line["validation_loss"], line["step"]) for line in lines_of(run, "validation_loss"))
        of = dict(zip(head, row, strict=True))
        assert (of["validation loss, best"], of["at step"]) == (f"{best[0]:.4f}", str(best[1]))
        assert (float(of["optimizer.peak_lr"]), int(of["seed"])) == setting
    payload = json.loads(found.payload)
    assert payload["groups"] == {
        "optimizer.peak_lr": {"values": ["0.0001", "0.001"], "of": [0, 0, 1, 1]},
        "seed": {"values": ["0", "1"], "of": [0, 1, 0, 1]},
    }
    assert {"loss (nats)", "tokens per second (tokens/s)"} <= {chart["axis"] for chart in payload["charts"]}


def test_axes_name_a_unit_once():
    """Fails when a metric lacks its unit, or has it in its name and behind it."""
    axes = {name: Chart(name, (), True, False, _unit(name)).axis for name in ("host_memory_gib", "bits_per_character")}
    assert list(axes.values()) == ["host memory (GiB)", "bits per character (bits/character)"]


def test_right_answers_by_kind():
    span, sets = KINDS["span"](name="custom"), KINDS["multilabel"](name="custom")
    assert span.is_right("The cat", ["a dog", "cat."]) and not span.is_right("cats", ["cat"])
    assert span.is_right("", []) and not span.is_right("cat", [])
    assert sets.is_right(["b", "a"], ["a", "b"]) and not sets.is_right(["a"], ["a", "b"])
    assert TASK.is_right("negative", "negative") and not TASK.is_right("1", "0")


def test_a_run_at_a_url(tmp_path, runs, monkeypatch):
    """Fails when a run behind a URL (file:// goes the same way as gs://) is read differently."""
    there = Page(html_of(monkeypatch, tmp_path / "r.html", runs[0].as_uri()))
    here = Page(html_of(monkeypatch, tmp_path / "r.html", runs[0]))
    assert there.payload == here.payload and there.table("loss: values") == here.table("loss: values")


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["nosuch"], "nosuch: no such run directory"),
        (["EMPTY"], "is not a run directory: it has no config.json"),
        (["RUN", "--note", "none.md"], "--note none.md cannot be read: No such file"),
        (["RUN", "--examples", "-1"], "examples must be at least 0, got -1; give 0 to show none"),
        ([], "at least one run must be given"),
    ],
)
def test_bad_input(runs, words, rule, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    known = {"RUN": runs[0], "EMPTY": tmp_path / "empty"}
    with pytest.raises(InputError, match=rule):
        html_of(monkeypatch, tmp_path / "r.html", *(known.get(word, word) for word in words))
    monkeypatch.setattr("sys.argv", ["report", str(runs[0]), "--output", "page.txt"])
    with pytest.raises(InputError, match="--output must end in .html, got page.txt"):
        report.main()
