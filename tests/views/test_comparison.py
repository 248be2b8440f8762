"""Several runs side by side: differing fields, metrics and curves, against the files of the runs."""

import json

import numpy as np
import pytest
import toy_run
from matplotlib.figure import Figure

from jaxlm import show
from jaxlm.errors import InputError
from jaxlm.runs.directory import RunDirectory
from jaxlm.runs.metrics_log import MetricsLog
from jaxlm.views.curves import BARS, Curve, curves_of, text_curve
from jaxlm.views.run import _result, labels, summary_of


@pytest.fixture(scope="module")
def tokenizer():
    return toy_run.toy_tokenizer()


@pytest.fixture(scope="module")
def runs(tokenizer, tmp_path_factory):
    """Two runs of toy losses: windows for 7 steps, packed for 5."""
    place = tmp_path_factory.mktemp("runs")
    store = toy_run.toy_store(place / "store", tokenizer)
    one = toy_run.pretrained(place / "one", store)
    two = toy_run.pretrained(place / "two", store, steps=(5,), layout="packed")
    random = np.random.default_rng(0)
    with MetricsLog(two, None) as metrics:
        for step in range(1, 6):
            metrics.write(step, {"loss": float(random.uniform(3, 9)), "learning_rate": 0.1})
            metrics.write(step, {"validation_loss": float(random.uniform(3, 9)), "perplexity": 1.0})
        metrics.write(6, {"loss": float("nan")})
    return one, two


def shown(monkeypatch, capsys, *words) -> str:
    monkeypatch.setattr("sys.argv", ["show", *map(str, words)])
    show.main()
    return capsys.readouterr().out


def values(run, name):
    """(step, value) of a metric, read without the code under test."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line[name]) for line in lines if name in line and line[name] != "NaN"]


def row_of(text, name):
    (line,) = (line for line in text.splitlines() if line.strip().startswith(name + "  "))
    return [cell for cell in line.strip().split("  ")[1:] if cell]


def test_fields_and_metrics_of_two_runs_are_those_of_their_files(runs, monkeypatch, capsys):
    """Fails when a differing field is left out, an equal one is shown, or a metric is not that of metrics.jsonl."""
    text = shown(monkeypatch, capsys, *runs)
    assert text.splitlines()[:2] == [f"1  {runs[0]}", f"2  {runs[1]}"]
    configs = [json.loads((run / "config.json").read_text()) for run in runs]
    cells = [cell.strip() for cell in row_of(text, "data.layout")]
    assert cells == [config["data"]["layout"] for config in configs] == ["windows", "packed"]
    assert [cell.strip() for cell in row_of(text, "num_steps")] == ["7", "5"]
    fields = text.split("fields that differ")[1].split("\nmetrics")[0].splitlines()[1:]
    assert [line.split()[0] for line in fields] == ["data.layout", "num_steps"]
    for name in ("loss", "validation_loss"):
        found = [values(run, name) for run in runs]
        last = [f"{pairs[-1][1]:.4f} at {pairs[-1][0]}" for pairs in found]
        assert [cell.strip() for cell in row_of(text, f"{name}, last")] == last
    best = [min(values(run, "validation_loss"), key=lambda pair: pair[1]) for run in runs]
    cells = [cell.strip() for cell in row_of(text, "validation_loss, best")]
    assert cells == [f"{value:.4f} at {step}" for step, value in best]


def test_bars_are_the_losses(runs, monkeypatch, capsys):
    """Fails when the bars of two runs have scales of their own, or a bar is not the mean of its steps."""
    text = shown(monkeypatch, capsys, *runs).splitlines()
    at = next(k for k, line in enumerate(text) if line.startswith("loss of training"))
    both = [values(run, "loss") for run in runs]
    losses = [value for pairs in both for _, value in pairs]
    low, high = min(losses), max(losses)
    assert text[at] == f"loss of training, steps 1 to 7, from {low:.4g} to {high:.4g}"
    for line, pairs in zip(text[at + 1 : at + 3], both, strict=True):
        drawn = [BARS.index(bar) for bar in line[5:] if bar != " "]
        assert drawn == [min(int(8 * (value - low) / (high - low)), 7) for _, value in pairs]
    means = text_curve(Curve(np.arange(1, 9), np.arange(8.0)), 8, (0.0, 7.0), width=4)
    assert [BARS.index(bar) for bar in means] == [0, 2, 5, 7]  # two steps each
    assert text_curve(Curve(np.array([8]), np.array([1.0])), 8, (1.0, 1.0), width=4) == "   ▁"


def test_curves_of_several_seeds_are_their_means(tokenizer, tmp_path):
    """Fails when one seed stands for all, or another metric than the selecting one is taken."""
    rows = [{"t": f"word {k}", "label": "yn"[k % 2]} for k in range(20)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    custom = toy_run.CustomConfig(train=str(tmp_path / "train.jsonl"), text="t", label="label")
    run, task, _ = toy_run.finetuned(tmp_path / "run", tokenizer, custom)
    for seed in (0, 1):
        with MetricsLog(run, None, scope={"seed": seed, "peak_lr": 1e-3}) as metrics:
            for step in (1, 2):
                metrics.write(step, {"loss": float(seed + step)})
                metrics.write(step, {"dev_accuracy": seed * 0.5, "dev_loss": 2.0 + seed, "dev_f1": 0.1})
    found = curves_of(RunDirectory(run))
    assert set(found) == {"loss", "dev_loss", f"dev_{task.metric}"} == {"loss", "dev_loss", "dev_accuracy"}
    assert found["loss"].steps.tolist() == [1, 2] and found["loss"].values.tolist() == [1.5, 2.5]
    assert found["dev_accuracy"].values.tolist() == [0.25, 0.25] and found["dev_loss"].values.tolist() == [2.5, 2.5]


def test_a_plot_has_the_curves_of_the_files(runs, monkeypatch, capsys, tmp_path):
    """Fails when no picture is written, or its lines or labels are not those of the runs."""
    drawn, written = {}, Figure.savefig

    def keep(figure, path, **settings):
        for panel in figure.axes:
            drawn[panel.get_title()] = {
                line.get_label(): list(zip(*line.get_data(), strict=True)) for line in panel.lines
            }
        written(figure, path, **settings)

    monkeypatch.setattr(Figure, "savefig", keep)
    text = shown(monkeypatch, capsys, *runs, "--plot", tmp_path / "curves.png")
    assert text.splitlines()[-1] == f"{tmp_path / 'curves.png'}: curves of 2 runs"
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert set(drawn) == {"loss", "validation loss"}
    for title, lines in drawn.items():
        assert set(lines) == {"layout windows, num_steps 7", "layout packed, num_steps 5"}
        for run, pairs in zip(runs, lines.values(), strict=True):
            assert pairs == values(run, title.replace(" ", "_"))


def test_labels_are_names_where_the_fields_do_not_tell_runs_apart(runs):
    one, two = (summary_of(RunDirectory(run)) for run in runs)
    assert labels([one]) == [str(runs[0])]
    assert labels([one, one]) == [f"{runs[0]} (1)", f"{runs[0]} (2)"]
    assert labels([one, two, one])[1] == f"{runs[1]} (2)"


def test_a_run_that_has_logged_nothing_is_compared(runs, tokenizer, tmp_path, monkeypatch, capsys):
    bare = toy_run.pretrained(tmp_path / "bare", toy_run.toy_store(tmp_path / "s", tokenizer))
    (bare / "metrics.jsonl").unlink()
    (tmp_path / "bare" / "config.json").write_text((runs[0] / "config.json").read_text())
    text = shown(monkeypatch, capsys, runs[0], bare)
    assert "the configs are equal" in text
    assert [cell.strip() for cell in row_of(text, "validation_loss, best")] == ["4.5000 at 5", "-"]
    with pytest.raises(InputError, match="logged no steps"):
        shown(monkeypatch, capsys, bare, "--plot", tmp_path / "x.png")


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["RUN", "RUN", "--step", 1], "--step must be given with one run, got 2"),
        (["RUN", "nosuch"], "nosuch: no such run directory"),
        (["RUN", "--plot", "curves.jpeg"], "--plot must be a file ending in .png, .pdf, .svg, got curves.jpeg"),
        (["RUN", "--plot", "none/curves.png"], "--plot must be in an existing directory"),
        (["--count", 1], "a token store, a run or a config must be given"),
    ],
)
def test_bad_input(runs, words, rule, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=rule):
        shown(monkeypatch, capsys, *(runs[0] if word == "RUN" else word for word in words))


def test_only_seeds_of_the_selected_rate_make_a_deviation():
    """Fails when one seed at each of two learning rates is shown with a deviation of 0."""
    runs = [{"seed": 0, "learning_rate": 1e-3}, {"seed": 0, "learning_rate": 3e-3}]
    results = {"learning_rate": 3e-3, "runs": runs, "dev": {"accuracy": {"mean": 0.5, "std": 0.0}}}
    assert _result(results, "dev", "accuracy") == "0.5000"
    second = {"seed": 1, "learning_rate": 3e-3}
    assert _result(results | {"runs": [*runs, second]}, "dev", "accuracy") == "0.5000 ± 0.0000"
