"""`finetune --with-inputs --sample`: the run's predictions beside the rows of the files, and the run's identity."""

import dataclasses
import io
import json
import math

import jax
import numpy as np
import pytest
import toy_encoder
from toy_encoder import WORDS, arguments, lines, make_files, write_lines
from toy_runs import assert_one_line, run_here

from jaxlm.distributed.mesh import use_mesh
from jaxlm.errors import RunError
from jaxlm.inference.loaded_run import load_run
from jaxlm.inference.prediction import Predictor
from jaxlm.tasks.predicted import LineWriter
from jaxlm.tasks.registry import read_rows

pytestmark = pytest.mark.usefixtures("two_devices")


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    place = tmp_path_factory.mktemp("tuned")
    vocabulary = toy_encoder.write_vocabulary(place)
    files = make_files(place / "files", "classification")
    write_lines(files / "test.jsonl", [{"text": row["text"] + " é"} for row in lines(files / "test.jsonl")])
    words = arguments(place / "run", files, "classification", "--tokenizer", f"wordpiece:{vocabulary}")
    words += [*toy_encoder.FLAGS, "--sample", 16, "--num-epochs", 0.5]
    ended = run_here("finetune", *words, "--with-inputs")
    assert ended.code == 0, ended.errors
    return place, files, words, ended


def test_predictions_have_the_columns_and_labels_of_their_rows(tuned):
    """Fails if a line has another row's text, if rows without a label have one, or if é is an escape."""
    place, files, _, _ = tuned
    found = lines(place / "run" / "predictions.jsonl")
    assert (place / "run" / "predictions.jsonl").read_text(encoding="utf-8").count("é") == 7
    assert [(line["split"], line["index"]) for line in found] == [
        (part, index) for part, n in (("dev", 13), ("test", 7)) for index in range(n)
    ]
    rows = {part: lines(files / f"{part}.jsonl") for part in ("dev", "test")}
    for line in found:
        row = rows[line["split"]][line["index"]]
        assert {name: line[name] for name in ("text", "label") if name in line} == row
        own = ["text", "label"] if line["split"] == "dev" else ["text"]
        assert list(line) == ["split", "index", "seed", "learning_rate", *own, "prediction", "scores"]
    right = [line["prediction"] == line["label"] for line in found if line["split"] == "dev"]
    (first,) = json.loads((place / "run" / "results.json").read_text())["runs"]
    assert first["dev"]["accuracy"] == pytest.approx(sum(right) / 13)


def test_scores_that_are_not_finite_are_refused(tuned, tmp_path):
    """Fails if a row with NaN among good ones gets the first label, or if a line is not JSON."""
    run = load_run(tuned[0] / "run")
    texts = [" ".join(WORDS[2:7])] * 2 + [f"{WORDS[2]} {WORDS[0]}"]
    write_lines(tmp_path / "three.jsonl", [{"text": text} for text in texts])
    (token,) = run.given_tokenizer.encode(WORDS[0])
    spoilt = jax.tree.map(lambda x: x, run.params)
    spoilt["backbone"]["embeddings"]["tokens"] = spoilt["backbone"]["embeddings"]["tokens"].at[token].set(np.nan)
    with use_mesh(run.mesh):
        good, bad = (
            Predictor(dataclasses.replace(run, params=params), "predict", batch_size=8)
            for params in (run.params, spoilt)
        )
        examples = list(read_rows(str(tmp_path / "three.jsonl"), good.task))
        assert len(good.lines(examples)[0]) == 3 and len(bad.lines(examples[:2])[0]) == 2
        with pytest.raises(RunError, match=r"the scores of row 102 \(counted from 0\) must be finite, got NaN"):
            bad.lines(examples, first=100)
    written = io.StringIO()
    LineWriter(written, "jsonl").write([{"index": 0, "prediction": "a", "scores": {"a": float("nan")}, "x": -math.inf}])
    strict = json.loads(written.getvalue(), parse_constant=lambda name: pytest.fail(name))
    assert strict["scores"] == {"a": "NaN"} and strict["x"] == "-Infinity"


def test_the_sample_is_part_of_the_run(tuned):
    """Fails if the run trains on all rows, or if another sample continues it; inputs may be left out on resume."""
    place, _, words, ended = tuned
    assert "train: 16 of the 32 examples are used, chosen by seed 0" in ended.output
    saved = json.loads((place / "run" / "config.json").read_text())
    assert saved["sample"] == 16 and saved["with_inputs"] is True and saved["num_steps"] == 1  # floor(16 / 8 * 0.5)
    assert "is complete" in run_here("finetune", *words).output
    before = (place / "run" / "predictions.jsonl").read_bytes()
    bare = [
        {name: value for name, value in line.items() if name not in ("text", "label")}
        for line in map(json.loads, before.splitlines())
    ]
    write_lines(place / "run" / "predictions.jsonl", bare)  # as a run without inputs leaves them
    again = run_here("finetune", *words, "--with-inputs").output
    assert "predictions.jsonl now has the columns and labels of its rows" in again and "is complete" in again
    assert (place / "run" / "predictions.jsonl").read_bytes() == before
    assert "now has" not in run_here("finetune", *words, "--with-inputs").output
    other = [17 if word == 16 else word for word in words]
    assert_one_line(run_here("finetune", *other), 2, "sample: 16 -> 17")
