"""Ten common jobs in one script that uses the documented Python API alone."""

import json

import numpy as np
import pytest

import jaxlm

pytestmark = pytest.mark.usefixtures("two_devices")


def test_ten_jobs(folder, monkeypatch):
    """Fails when a job that the README shows needs anything but `import jaxlm`, or gives values of another form."""
    monkeypatch.chdir(folder)

    # 1. Make a token store.
    store = jaxlm.prepare_store("text:books/*.txt", tokenizer="store:stores/books", output="jobs/store")
    assert store["documents"] == 2 and store["tokens"] > 50

    # 2. Pretrain, watch the loss, and stop when it is low enough.
    losses: list[float] = []

    def watch(record: dict) -> bool:
        losses.append(record.get("loss", np.inf))
        return losses[-1] < 100.0

    changes = {"num_steps": 20, "length": 32, "log_every": 1, "optimizer.warmup": 1}
    run = jaxlm.run_pretraining("debug/gpt", run="jobs/gpt", store=store["store"], changes=changes, callbacks=[watch])
    assert not run["complete"] and 1 <= run["step"] <= 2 and np.isfinite(losses[0])

    # 3. Continue a text.
    model = jaxlm.load(run["run"])
    (text,) = model.generate(["The cat"], length=8, seed=1)
    assert isinstance(text, str) and not text.startswith("The cat")

    # 4. Which of two sentences is more likely?
    scores = [one["log_probability"] for one in model.score(["The cat sat on the mat.", "mat the on sat cat The."])]
    assert all(score < 0 for score in scores)

    # 5. Probabilities of the next token.
    (logits,) = model.logits(["The cat sat on the"])
    probabilities = np.exp(logits[-1] - logits[-1].max())
    probabilities /= probabilities.sum()
    assert np.isclose(probabilities.sum(), 1) and model.decode([int(probabilities.argmax())]) is not None

    # 6. Similarity of texts.
    vectors = model.embed(["The cat sat.", "The cat sat.", "A crow."], pooling="mean")
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    assert np.isclose(vectors[0] @ vectors[1], 1, atol=1e-5) and vectors[0] @ vectors[2] < 0.9999

    # 7. Fine-tune a classifier on a file, and read its metrics.
    results = jaxlm.run_finetuning(
        "finetune/gpt1",
        run="jobs/tuned",
        start="runs/gpt",
        task="custom",
        custom={"train": "rows.tsv", "dev": "rows.tsv", "text": "text", "label": "label"},
        changes={"num_epochs": 1, "batch_size": 8, "length": 16},
    )
    assert 0 <= results["dev"]["accuracy"]["mean"] <= 1

    # 8. Label new rows.
    labelled = jaxlm.load("jobs/tuned").predict([{"text": "The cat sat."}, {"text": "A bird sang."}])
    assert [line["index"] for line in labelled] == [0, 1] and set(labelled[0]["scores"]) == {"bad", "good"}
    assert json.loads(json.dumps(labelled)) == labelled

    # 9. Fill a blank, and look inside an encoder.
    bert = jaxlm.load("runs/bert")
    (candidates,) = bert.fill("ba [MASK] bo")
    assert len(candidates) == 5 and candidates[0]["probability"] >= candidates[-1]["probability"]
    assert bert.hidden_states(["ba bo"])[0].shape == (2, 4, 16)

    # 10. Answer a question, and tag a sentence.
    assert jaxlm.load("runs/answers").answer("ba ?", "ba be bi bo")["prediction"] in "ba be bi bo"
    assert len(jaxlm.load("runs/tagger").tag(["ba", "be"])["prediction"]) == 2
