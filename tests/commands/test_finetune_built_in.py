"""The tasks of words and of sentiment through the real commands, from toy directories in the layouts of their files."""

import json
import random

import pytest
import toy_encoder
import toy_runs
from sklearn.metrics import accuracy_score
from toy_encoder import WORDS, lines
from toy_runs import run_here

from jaxlm import predict

pytestmark = pytest.mark.usefixtures("two_devices")
toy_runs.COMMANDS["predict"] = predict.main

FIXED = "--length 24 --batch-size 8 --num-epochs 1 --log-every 1 --optimizer.peak-lr 1e-2 --sample 16".split()
ROWS = {"train": 24, "dev": 9, "test": 7}


def sentence(rng):
    """Four words and a tag for each, of which the first of WORDS is another one."""
    words = rng.sample(WORDS[1:], 4)
    words[rng.randrange(4)] = WORDS[0]
    return words, [word == WORDS[0] for word in words]


def write_chunk(place, part, rows):
    text = "".join(
        "".join(f"{w} NN {'B-NP' if own else 'O'}\n" for w, own in zip(*row, strict=True)) + "\n" for row in rows
    )
    (place / f"{part}.txt").write_text(text)


def write_ud_pos(place, part, rows):
    blocks = []
    for words, own in rows:
        tagged = enumerate(zip(words, own, strict=True), 1)
        blocks += [f"{k}\t{w}\t_\t{'NOUN' if is_own else 'X'}\t_\t_\t0\t_\t_\t_\n" for k, (w, is_own) in tagged] + [
            "\n"
        ]
    (place / f"x-ud-{part}.conllu").write_text("# toy\n" + "".join(blocks))


def write_trees(place, part, rows):
    trees = [f"({4 * own[0]} (2 (2 {a}) (2 {b})) (2 (2 {c}) (2 {d})))\n" for (a, b, c, d), own in rows]
    (place / f"{part}.txt").write_text("".join(trees))


def write_imdb(place, part, rows):
    for number, (words, own) in enumerate(rows if part != "dev" else ()):
        folder = place / part / ("pos" if own[0] or number == 0 else "neg")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}_1.txt").write_text(" ".join(words))


WRITERS = {
    "chunk": (write_chunk, "entity_f1"),
    "ud_pos": (write_ud_pos, "accuracy"),
    "sst_binary": (write_trees, "accuracy"),
    "imdb": (write_imdb, "accuracy"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "ud_pos")) for name in WRITERS]
)
def test_a_task_is_trained_predicted_and_scored(tmp_path, name):
    """Fails when a task lacks what a command asks of it, or when the test predictions are not those of the run.

    The accuracy is compared with scikit-learn's.
    """
    rng, (write, metric) = random.Random(0), WRITERS[name]
    for part, count in ROWS.items():
        write(tmp_path, part, [sentence(rng) for _ in range(count)])
    run, vocabulary = tmp_path / "run", toy_encoder.write_vocabulary(tmp_path / "vocabulary")
    words = ["--task", name, "--task-dir", tmp_path, "--tokenizer", f"wordpiece:{vocabulary}"]
    ended = run_here("finetune", "finetune/bert", "--run", run, *words, *toy_encoder.FLAGS, *FIXED)
    assert ended.code == 0, ended.errors
    (only,) = json.loads((run / "results.json").read_text())["runs"]
    assert json.loads((run / "results.json").read_text())["metric"] == metric and metric in only["dev"]
    tested = [line["prediction"] for line in lines(run / "predictions.jsonl") if line["split"] == "test"]
    files = {"ud_pos": "x-ud-test.conllu", "imdb": "test"}
    judged = tmp_path / ("judged.conll" if name in ("chunk", "ud_pos") else "judged.jsonl")
    file = tmp_path / files.get(name, "test.txt")
    ended = run_here("evaluate", "task", "--run", run, "--input", file, "--output", judged)
    assert ended.code == 0, ended.errors
    if judged.suffix == ".conll":
        rows = [word.split("\t") for word in judged.read_text().split("\n") if word]
        found, gold, guesses = sum(tested, []), *([row[k] for row in rows] for k in (1, 2))
    else:
        found, gold, guesses = tested, *([line[key] for line in lines(judged)] for key in ("label", "prediction"))
    assert guesses == found
    if metric == "accuracy":  # that of chunks is of tags as BIO
        assert only["test"]["accuracy"] == pytest.approx(accuracy_score(gold, guesses))
