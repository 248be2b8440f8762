"""Loaded models: the commands' results, transformers' numbers, and calls from several threads."""

import json
import threading

import numpy as np
import pytest
import toy_encoder
import toy_runs
from toy_devices import first_devices

import jaxlm

pytestmark = pytest.mark.usefixtures("two_devices")

TEXTS = ["The cat sat on the mat.", "A bird", "sang in the tree."]
WORDS = ["ba be bi", "bo", "da de di do ga ge"]
WHY = "install the extra [parity]"


@pytest.fixture(scope="module")
def models(folder):
    """Every run of the folder, loaded once."""
    names = ("gpt", "gpt2", "lstm", "packed", "bert", "tuned", "answers", "tagger")
    return {name: jaxlm.load(folder / "runs" / name) for name in names}


def texts_for(name: str) -> list[str]:
    return WORDS if name in ("bert", "answers", "tagger") else TEXTS


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    return x - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) - x.max(-1, keepdims=True)


@pytest.mark.parametrize("name", ["gpt", "gpt2", "lstm", "packed"])
def test_logits_are_those_that_score_the_text(models, name):
    """Fails when logits belong to another position, padding or another text changes them, or ids are read unlike their
    text. The scores are those of `evaluate score`, which shares no code with logits beyond the model.
    """
    model = models[name]
    left = model.run.prefix_ids
    ids = [[*left, *model.run.tokenizer.encode(text)] for text in TEXTS]
    found = model.logits(ids)
    assert [len(rows) for rows in found] == [len(row) for row in ids] and found[0].dtype == np.float32
    for row, logits, score in zip(ids, found, model.score(TEXTS), strict=True):
        total = log_softmax(logits[:-1])[np.arange(len(row) - 1), row[1:]].sum()
        assert score["log_probability"] == pytest.approx(total, abs=2e-4) and score["tokens"] == len(row) - 1
    encoded = model.encode(TEXTS)
    assert encoded == (ids if name == "packed" else [row[len(left) :] for row in ids])
    for one, other in zip(model.logits(TEXTS), model.logits(encoded), strict=True):
        np.testing.assert_array_equal(one, other)
    (alone,) = model.logits(TEXTS[1:2])
    np.testing.assert_allclose(alone, model.logits(TEXTS)[1], atol=1e-5)
    greedy = model.generate(TEXTS[1:2], length=1, temperature=0)
    allowed = np.ones(model.run.tokenizer.size, bool)
    allowed[[i for role, i in model.run.tokenizer.specials.items() if role != "end"]] = False
    best = int(np.where(allowed, alone[-1, : len(allowed)], -np.inf).argmax())
    assert model.decode([*encoded[1], best]) == model.decode(encoded[1]) + greedy[0]


@pytest.mark.parametrize("name", ["gpt", "lstm", "bert", "tuned", "tagger"])
def test_states_and_embeddings_belong_together(models, name):
    """Fails when a pooling takes another token or counts padding, or when layers or texts change places."""
    model, texts = models[name], texts_for(name)
    states, ids = model.hidden_states(texts), model.encode(texts)
    layers = model.run.model.config.num_layers + 1
    assert [found.shape for found in states] == [(layers, len(row), 16) for row in ids]
    by_hand = {"mean": [found[-1].mean(axis=0) for found in states], "last": [found[-1, -1] for found in states]}
    if not model.run.model.is_causal:
        by_hand["cls"] = [found[-1, 0] for found in states]
    for pooling, wanted in by_hand.items():
        found = model.embed(texts, pooling)
        assert found.shape == (3, 16) and found.dtype == np.float32
        np.testing.assert_allclose(found, np.stack(wanted), atol=1e-5)
    assert model.embed([]).shape == (0, 16) and model.hidden_states([]) == [] == model.encode([])
    devices, mesh = (8, {"data": 2, "tensor": 4}) if name == "gpt" else (2, {"tensor": 2})
    with first_devices(devices):
        one_by_one = jaxlm.load(model.name, batch_size=1, mesh=mesh)
        np.testing.assert_allclose(one_by_one.embed(texts), model.embed(texts), atol=1e-5)


@pytest.mark.parity
@pytest.mark.parametrize("name", ["gpt", "gpt2", "bert"])
def test_logits_and_states_are_those_of_transformers(models, folder, tmp_path, name):
    """Fails when ids, logits or states differ from the export's in transformers, or the export loads as another model,
    or loading it writes a file.
    """
    torch = pytest.importorskip("torch", reason=WHY)
    transformers = pytest.importorskip("transformers", reason=WHY)
    model, texts, out = models[name], texts_for(name), tmp_path / "out"
    assert toy_runs.run_here("convert", "export", folder / "runs" / name, "--to", f"hf:{out}").code == 0
    kind = transformers.AutoModelForPreTraining if name == "bert" else transformers.AutoModelForCausalLM
    theirs = kind.from_pretrained(out).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    before = sorted(out.rglob("*"))
    again = jaxlm.load(f"hf:{out}")
    assert again.kind == model.kind and again.name == f"hf:{out}" and sorted(out.rglob("*")) == before
    for text, ids, logits, states, same in zip(
        texts, model.encode(texts), model.logits(texts), model.hidden_states(texts), again.logits(texts), strict=True
    ):
        assert tokenizer(text)["input_ids"] == ids
        with torch.no_grad():
            wanted = theirs(torch.tensor([ids]), output_hidden_states=True)
        scores = wanted.prediction_logits if name == "bert" else wanted.logits
        np.testing.assert_allclose(logits, scores[0].numpy(), atol=2e-4)
        np.testing.assert_allclose(same, logits, atol=1e-6)
        np.testing.assert_allclose(states[-1], wanted.hidden_states[-1][0].numpy(), atol=2e-4)


@pytest.mark.parity
def test_a_gpt_classifier_labels_as_the_pipeline_of_its_export(models, folder, tmp_path):
    """Fails when the export is not fed as the model was trained: without start and extract, or cut elsewhere."""
    pytest.importorskip("torch", reason=WHY)
    transformers = pytest.importorskip("transformers", reason=WHY)
    assert toy_runs.run_here("convert", "export", folder / "runs/tuned", "--to", f"hf:{tmp_path / 'out'}").code == 0
    classify = transformers.pipeline("text-classification", str(tmp_path / "out"), device="cpu")
    texts = [*TEXTS, "One. Two!", "the hill " * 30]  # the last one is truncated to the run's length
    found = classify(texts, truncation=True, top_k=None)
    for model, count in ((models["tuned"], 5), (jaxlm.load(f"hf:{tmp_path / 'out'}"), 4)):
        for line, theirs in zip(model.predict([{"text": text} for text in texts[:count]]), found, strict=False):
            assert line["prediction"] == theirs[0]["label"]
            assert line["scores"] == pytest.approx({one["label"]: one["score"] for one in theirs}, abs=1e-4)


def test_predictions_are_those_of_the_command(models, folder, tmp_path):
    """Fails when the method reads a column otherwise, or batches change a prediction."""
    rows = {
        "tuned": [{"text": text, "other": number} for number, text in enumerate(TEXTS)],
        "answers": toy_encoder.make_rows("span", 9, 5),
        "tagger": [{"tokens": row["tokens"]} for row in toy_encoder.make_rows("tagging", 7, 6)],
    }
    for name, given in rows.items():
        file, output = toy_encoder.write_lines(tmp_path / f"{name}.jsonl", given), tmp_path / f"{name}.out"
        run = folder / "runs" / name
        ended = toy_runs.run_here("predict", "--run", run, "--input", file, "--output", output)
        assert ended.code == 0, ended.errors
        assert models[name].predict(given) == toy_encoder.lines(output), name
        assert models[name].predict([]) == []
    first, tokens = rows["answers"][0], rows["tagger"][0]["tokens"]
    assert models["answers"].answer(first["question"], first["context"]) == {
        name: value for name, value in models["answers"].predict([first])[0].items() if name != "index"
    }
    assert models["tagger"].tag(tokens)["tokens"] == tokens and len(models["tagger"].tag(tokens)["prediction"]) == 6


def test_scores_texts_and_fillings_are_those_of_the_commands(models, folder, tmp_path):
    """Fails when a method and its command differ."""
    for name in ("gpt", "bert"):
        texts, output = texts_for(name), tmp_path / f"{name}.out"
        (tmp_path / "texts.txt").write_text("\n".join(texts) + "\n")
        scored = ["score", "--run", folder / "runs" / name, "--input", tmp_path / "texts.txt", "--output", output]
        assert toy_runs.run_here("evaluate", *scored).code == 0
        wanted = [{key: line[key] for key in ("log_probability", "tokens")} for line in toy_encoder.lines(output)]
        for found, line in zip(models[name].score(texts), wanted, strict=True):
            assert found == pytest.approx(line, abs=1e-5)
    output = tmp_path / "samples"
    flags = ["--prompt", TEXTS[1], "--length", 6, "--num-samples", 3, "--top-k", 20, "--seed", 5, "--output", output]
    assert toy_runs.run_here("generate", "--run", folder / "runs/gpt", *flags).code == 0
    settings = {"length": 6, "num_samples": 3, "top_k": 20, "seed": 5}
    samples = toy_encoder.lines(output)
    assert models["gpt"].generate(TEXTS[1:2], **settings) == [line["generated"] for line in samples]
    assert models["gpt"].generate([TEXTS[1], TEXTS[0]], **settings)[:3] == [line["generated"] for line in samples]
    text = "ba [MASK] bo [MASK]"
    flags = ["--prompt", text, "--top", 4, "--output", tmp_path / "filled"]
    assert toy_runs.run_here("generate", "--run", folder / "runs/bert", *flags).code == 0
    (line,) = toy_encoder.lines(tmp_path / "filled")
    for found, wanted in zip(models["bert"].fill(text, top=4), line["fillings"], strict=True):
        assert [one["piece"] for one in found] == [one["piece"] for one in wanted]
        assert [one["probability"] for one in found] == pytest.approx([one["probability"] for one in wanted], abs=1e-6)


REFUSALS = [
    ("bert", "generate", (["ba"],), "generate needs a decoder"),
    ("gpt", "predict", ([{"text": "a"}],), "must have a fine-tuned run"),
    ("gpt", "fill", ("a [MASK]",), "must have an encoder trained to fill masks"),
    ("bert", "fill", ("ba",), "put [MASK] into the prompt"),
    ("answers", "logits", (["ba"],), "has no scores over the vocabulary"),
    ("answers", "score", (["ba"],), "no masked language model's head"),
    (
        "tuned",
        "answer",
        ("a", "b"),
        "must be fine-tuned on questions on texts for answer, got the kind 'classification'",
    ),
    ("gpt", "tag", (["a"],), "must be fine-tuned on tagged sentences for tag, got the kind 'language model'"),
    ("tagger", "tag", ("a b",), "tokens must be a list of strings, got a string"),
    ("gpt", "logits", ("a text",), "texts must be a list of strings, got a string"),
    ("gpt", "logits", (["a", 3],), "texts[1] must be a string, got 3"),
    ("gpt", "logits", ([[1, 999]],), "texts[0] must be a text, or ids from 0 to"),
    ("gpt", "logits", ([[0.5]],), "texts[0] must be a text, or ids"),
    ("gpt", "embed", (["the hill " * 30],), "texts[0] must have at most 16 tokens"),
    ("gpt", "embed", (["a"], "cls"), "pooling must be mean or last"),
    ("bert", "embed", (["ba"], "max"), "pooling must be mean, first, last or cls"),
    ("tuned", "predict", ([{"txt": "a"}],), "rows: row 1 has no field 'text'"),
    ("tuned", "predict", (["a"],), "rows: row 1 must be a dictionary"),
    ("answers", "predict", ([{"question": "a"}],), "rows: row 1 has no field 'context'"),
    ("gpt", "score", ("a",), "texts must be a list of strings"),
    ("gpt", "decode", ([99999],), "ids must be a list of numbers from 0 to "),
    ("gpt", "decode", ("abc",), "ids must be a list of numbers from 0 to "),
    ("gpt", "generate", ("a",), "prompts must be a list of strings"),
]


@pytest.mark.parametrize(("name", "method", "arguments", "message"), REFUSALS)
def test_what_a_model_does_not_do_is_one_line(models, name, method, arguments, message):
    """Fails when a call ends in another error, or in a message that does not name the reason."""
    with pytest.raises(jaxlm.InputError) as caught:
        getattr(models[name], method)(*arguments)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_loading_refuses_in_one_line(folder, tmp_path):
    """Fails when a wrong source or setting ends in something else than an InputError of one line."""
    run = folder / "runs" / "gpt"
    for source, settings, message in (
        (tmp_path / "nothing", {}, "no such run directory"),
        (f"hf:{tmp_path / 'nothing'}", {}, "is not a directory"),
        (f"{run}@5", {}, "5"),
        (run, {"batch_size": 0}, "batch_size must be at least 1"),
        (run, {"mesh": {"tensor": 3}}, "does not fit 2 devices"),
        (run, {"mesh": {"model": 2}}, "mesh.model: no such field"),
        (run, {"custom": {"text": "a"}}, "custom must be left out"),
    ):
        with pytest.raises(jaxlm.InputError, match=message.replace("(", "[(]")) as caught:
            jaxlm.load(source, **settings)
        assert "\n" not in str(caught.value)
    kept = jaxlm.load(run, beyond_length=True)
    assert (kept.length, jaxlm.load(run).length) == (48, 16)
    assert kept.embed(["the hill " * 30], truncate=True).shape == (1, 16)


def test_two_models_in_threads_do_not_disturb_each_other(models):
    """Fails when a call depends on the thread it is made from, or on another model's call at the same time."""
    calls = {
        "gpt": lambda model: (model.score(TEXTS), model.logits(TEXTS)[0].tolist()),
        "bert": lambda model: (model.score(WORDS), model.logits(WORDS)[0].tolist()),
        "tuned": lambda model: model.predict([{"text": text} for text in TEXTS]),
    }
    alone = {name: json.dumps(call(models[name])) for name, call in calls.items()}
    found: list[tuple[str, str]] = []

    def repeat(name):
        found.extend((name, json.dumps(calls[name](models[name]))) for _ in range(3))

    threads = [threading.Thread(target=repeat, args=(name,)) for name in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 9 and all(alone[name] == result for name, result in found)
