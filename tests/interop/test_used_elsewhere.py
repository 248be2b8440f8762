"""Exports in other programs: sentence-transformers, and ONNX Runtime by way of optimum.

The code is that of docs/used_elsewhere.md, which the tests run. optimum has an environment of its own, `.venv-optimum`
in the checkout or $JAXLM_OPTIMUM. The lm-evaluation-harness is compared in tests/evaluation/test_harness.py.
"""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import toy_encoder
from documents import blocks, commands, of_jaxlm
from paths import REPOSITORY
from toy_runs import run_here

import jaxlm
from jaxlm.distributed.mesh import use_mesh
from jaxlm.inference.prediction import Predictor
from jaxlm.tasks import CustomConfig, rows_of_records

pytestmark = [pytest.mark.parity, pytest.mark.slow]

WHY = "install the extra [parity]"
PAGE = blocks((REPOSITORY / "docs/used_elsewhere.md").read_text(encoding="utf-8"))
OPTIMUM = Path(os.environ.get("JAXLM_OPTIMUM", REPOSITORY / ".venv-optimum"))
SIZES = replace(
    toy_encoder.SIZES, num_positions=40, num_layers=3, width=24, num_heads=3, feed_forward_width=37, init_std=0.3
)
TEXTS = [
    "ba be bi",
    "bo",
    "da de di do ga ge gi go ka.",
    "ba be bi bo da de di do " * 5,
    "bafo lame ?",
    "ka ke ki",
    "no",
]
SECONDS = ["bo ba", "da de di do ga ge", "ke", "la", "ba?", "me mi mo", "fa"]  # the second texts of pairs
BATCHES = [slice(1), slice(1, 4), slice(7)]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with the runs and exports that the page names: bert, pretrained, and mine, a classifier of pairs."""
    for name in ("torch", "transformers"):
        pytest.importorskip(name, reason=WHY)
    directory = tmp_path_factory.mktemp("elsewhere")
    vocabulary = toy_encoder.write_vocabulary(directory / "vocabulary")
    rows = [
        {"text": first, "second": second, "label": ("no", "maybe", "yes")[k % 3]}
        for k, (first, second) in enumerate(zip(TEXTS, SECONDS, strict=True))
    ]
    file = toy_encoder.write_lines(directory / "rows.jsonl", rows)
    custom = CustomConfig(train=str(file), dev=str(file), text="text", text_pair="second", label="label")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toy_encoder, "SIZES", SIZES)
        patch.setattr(toy_encoder, "custom", lambda *_: custom)
        toy_encoder.pretrained(directory / "runs" / "bert", vocabulary, steps=(7,))
        toy_encoder.finetuned(directory / "runs" / "mine", vocabulary, directory, "classification")
        patch.chdir(directory)
        for program, *words in lines_of("convert"):
            if Path(words[1]).exists():
                assert run_here(program, *words).code == 0
    return directory


@pytest.fixture(autouse=True)
def inside(place, monkeypatch):
    monkeypatch.chdir(place)


def lines_of(program: str) -> list[list[str]]:
    """The commands of the page that start this program: a command of jaxlm, or a path that ends in it."""
    lines = [words for block in PAGE if block.language == "bash" for words in commands(block.text)]
    ours = [[found[0], *found[1]] for words in lines if (found := of_jaxlm(words)) and found[0] == program]
    return ours or [words for words in lines if words[0].endswith(program)]


def code(*words: str) -> str:
    """The one block of Python on the page that has all these words."""
    (found,) = [
        block.text for block in PAGE if block.language == "python" and all(word in block.text for word in words)
    ]
    return found


def run_code(*words: str) -> dict:
    """The names that the block defines."""
    names: dict = {}
    exec(compile(code(*words), "docs/used_elsewhere.md", "exec"), names)
    return names


def to_onnx(*changes: tuple[str, str]) -> Path:
    """The directory that the page's command of optimum writes, with some of its words replaced."""
    program = OPTIMUM / "bin" / "optimum-cli"
    if not program.exists():
        pytest.skip(f"{program} is missing: see docs/used_elsewhere.md, or set JAXLM_OPTIMUM to the environment")
    (line,) = lines_of("optimum-cli")
    replaced = dict(changes)
    words = [replaced.get(word, word) for word in line[1:]]
    ended = subprocess.run([program, *words], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return Path(words[-1])


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_sentence_transformers_embeds_as_jaxlm_does(pooling):
    """Fails when padding or a missing special token enters the mean, when a long text is cut at another token, when
    the weights do not load, or when the recipe does not run.
    """
    pytest.importorskip("sentence_transformers", reason=WHY)
    names = run_code("Pooling") if pooling == "cls" else run_code("SentenceTransformer(", "embeddings")
    wanted = jaxlm.load("runs/bert").embed(TEXTS, pooling, truncate=True)
    for batch_size in (1, 7):
        np.testing.assert_allclose(names["model"].encode(TEXTS, batch_size=batch_size), wanted, rtol=0, atol=1e-4)
    assert np.ptp(wanted, axis=0).min() > 0.1, "all texts are alike: nothing is told apart"
    if pooling == "mean":
        assert names["embeddings"].shape == (2, SIZES.width)


@pytest.mark.parametrize("task", ["feature-extraction", "fill-mask"])
def test_onnx_computes_the_states_and_scores_of_jaxlm(task):
    """Fails when the graph is of one size of batch or length, when padding changes a token, or when a weight, an
    epsilon or an activation is lost on the way.
    """
    onnxruntime = pytest.importorskip("onnxruntime", reason=WHY)
    transformers = pytest.importorskip("transformers", reason=WHY)
    directory = to_onnx(("mine", "bert"), ("text-classification", task), ("mine-onnx", f"bert-{task}"))
    session = onnxruntime.InferenceSession(directory / "model.onnx")
    tokenizer, model = transformers.AutoTokenizer.from_pretrained(directory), jaxlm.load("runs/bert")
    for rows in BATCHES:
        texts = TEXTS[rows]
        batch = tokenizer(texts, padding=True, truncation=True, return_tensors="np")
        (found,) = session.run(None, dict(batch))
        if task == "fill-mask":
            wanted = model.logits(texts, truncate=True)
        else:
            wanted = [states[-1] for states in model.hidden_states(texts, truncate=True)]
        ids = model.encode(texts, truncate=True)
        assert found.shape[:2] == (len(texts), max(map(len, ids)))
        for row, seen, own, values, other in zip(
            batch["input_ids"], batch["attention_mask"], ids, found, wanted, strict=True
        ):
            assert row[seen == 1].tolist() == own
            np.testing.assert_allclose(values[: len(own)], other, rtol=0, atol=1e-4)
            assert np.ptp(other) > 1


def test_onnx_labels_as_jaxlm_does():
    """Fails when logits, labels or the types of the second text differ, or when a recipe of the page does not run."""
    pytest.importorskip("onnxruntime", reason=WHY)
    pytest.importorskip("transformers", reason=WHY)
    directory = to_onnx()
    names = run_code("InferenceSession")
    assert names["logits"].shape == (2, 3)
    rows = [{"text": first, "second": second} for first, second in zip(TEXTS, SECONDS, strict=True)]
    model = jaxlm.load("runs/mine")
    predictor = Predictor(model.run, "predict", batch_size=8)
    with use_mesh(model.run.mesh):
        wanted = np.stack(predictor.predict(predictor.encode(list(rows_of_records(rows, predictor.task)))).outputs)
    assert np.ptp(wanted, axis=0).min() > 0.1, "all rows are alike: nothing is told apart"
    for part in BATCHES:
        batch = names["tokenizer"](TEXTS[part], SECONDS[part], padding=True, truncation=True, return_tensors="np")
        (found,) = names["session"].run(None, dict(batch))
        np.testing.assert_allclose(found, wanted[part], rtol=0, atol=1e-4)
    predicted = model.predict(rows)
    labels = json.loads((directory / "config.json").read_text())["id2label"]
    assert [labels[str(best)] for best in wanted.argmax(-1)] == [line["prediction"] for line in predicted]

    pairs = [{"text": row["text"], "text_pair": row["second"]} for row in rows]
    script = code("ORTModel") + f"import json\nprint(json.dumps([classify(one, truncation=True) for one in {pairs!r}]))"
    ended = subprocess.run([OPTIMUM / "bin" / "python", "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    for line, theirs in zip(predicted, json.loads(ended.stdout.splitlines()[-1]), strict=True):
        assert theirs["label"] == line["prediction"]
        assert theirs["score"] == pytest.approx(line["scores"][theirs["label"]], abs=1e-4)
