"""Zero-shot tasks with an encoder: pseudo-log-likelihoods against a plain loop over masked copies of one text."""

import json
import random

import jax
import numpy as np
import pytest
import toy_encoder
from toy_runs import assert_one_line, run_here

from jaxlm.inference.loaded_run import load_run
from jaxlm.models.model import Inputs
from jaxlm.zero_shot.comparisons import best_threshold
from jaxlm.zero_shot.model import ZeroShotModel
from jaxlm.zero_shot.task import Text

pytestmark = pytest.mark.usefixtures("two_devices")

VARIANTS = ("token", "word")


def sentence(rng: random.Random) -> str:
    """Three to six words of one to three syllables, each of which is a token."""
    words = ("".join(rng.choices(toy_encoder.WORDS, k=rng.randint(1, 3))) for _ in range(rng.randint(3, 6)))
    return " ".join(words)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("encoder")
    return toy_encoder.pretrained(directory / "run", toy_encoder.write_vocabulary(directory))


@pytest.fixture(scope="module")
def reference(run):
    """(variant, context, text) -> the log-probability of each token of the text.

    A token is masked, and in the variant `word` (Kauf and Ivanova, 2023) the later tokens of its word, which begin with
    ## in the vocabulary.
    """
    loaded = load_run(run)
    forward = jax.jit(lambda ids, real: logits(loaded, ids, real))

    def scores(variant, context, text):
        before, ids = (loaded.tokenizer.encode(part) if part else [] for part in (context, text))
        pieces, found = loaded.tokenizer.pieces([*before, *ids]), []
        assert pieces[len(before) :] == loaded.tokenizer.pieces(loaded.tokenizer.encode(text))
        for place in range(len(before), len(pieces)):
            copy = [*before, *ids]
            copy[place] = loaded.tokenizer.specials["mask"]
            later = place + 1
            while variant == "word" and later < len(pieces) and pieces[later].startswith("##"):
                copy[later] = loaded.tokenizer.specials["mask"]
                later += 1
            specials = loaded.tokenizer.specials
            padded = np.zeros((1, 32), np.int32)
            padded[0, : len(copy) + 2] = [specials["cls"], *copy, specials["sep"]]
            row = np.asarray(forward(padded, padded * 0 + (np.arange(32) < len(copy) + 2)), np.float64)[0, place + 1]
            found.append(row[[*before, *ids][place]] - np.log(np.exp(row - row.max()).sum()) - row.max())
        return np.array(found)

    return scores


def logits(loaded, ids, real):
    outputs = loaded.model(loaded.params, Inputs(ids, np.arange(ids.shape[1])[None], real))
    return loaded.model.logits(loaded.params, outputs.states, outputs.output)


def evaluate(run, task, *more):
    ended = run_here("evaluate", "zero-shot", "--run", run, "--task", task, "--batch-size", 8, *more)
    assert ended.code == 0, ended.errors
    return [json.loads(line) for line in ended.output.splitlines()]


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_token_is_scored_given_the_others(run, reference, variant):
    """Fails when a later token of the same word stays visible in one variant or is masked in the other, when a token of
    the context is scored, or when a text depends on its neighbours."""
    rng, loaded = random.Random(0), load_run(run)
    model = ZeroShotModel(
        loaded.model,
        loaded.tokenizer,
        mesh=loaded.mesh,
        batch_size=8,
        within_word=variant == "word",
        show_progress=False,
    )
    model.params = loaded.params
    parts = [(sentence(rng), sentence(rng)) if number % 2 else (sentence(rng),) for number in range(6)]
    texts = [Text((first, " " + second[0]) if second else (first,), len(second), "x") for first, *second in parts]
    for (first, *second), found in zip(parts, model.scores(texts), strict=True):
        expected = reference(variant, first if second else "", second[0] if second else first)
        np.testing.assert_allclose(np.concatenate([part.log_probs for part in found.parts]), expected, atol=2e-5)


def test_the_tasks_compare_these_scores(run, reference, tmp_path):
    """Fails when a sum is taken for a mean, the threshold of CoLA is that of dev, or the variant is ignored."""
    rng = random.Random(1)
    pairs = [(sentence(rng), sentence(rng)) for _ in range(12)]
    rows = [{"sentence_good": good, "sentence_bad": bad, "UID": "a", "field": "f"} for good, bad in pairs]
    (tmp_path / "blimp.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    choices = [[sentence(rng) for _ in range(5)] for _ in range(6)]
    lines = ["\t".join(["o", *texts, str(number % 4)]) for number, texts in enumerate(choices)]
    (tmp_path / "codah.tsv").write_text("".join(line + "\n" for line in lines))
    sentences = {"train": [sentence(rng) for _ in range(9)], "dev": [sentence(rng) for _ in range(7)]}
    (tmp_path / "CoLA").mkdir()
    for name, texts in sentences.items():
        labelled = (f"s\t{number % 3 % 2}\t\t{text}\n" for number, text in enumerate(texts))
        (tmp_path / "CoLA" / f"{name}.tsv").write_text("".join(labelled))
    accuracies = set()
    for variant in VARIANTS:
        more = () if variant == "token" else ("--pseudo-likelihood", "word")
        found = evaluate(run, f"blimp:{tmp_path / 'blimp.jsonl'}", *more)
        blimp = {line["metric"]: line for line in found if "paradigm" not in line and "field" not in line}
        scores = [[reference(variant, "", text) for text in pair] for pair in pairs]
        for metric, of in (("accuracy_sum", np.sum), ("accuracy_mean", np.mean)):
            assert blimp[metric]["value"] == pytest.approx(np.mean([of(good) > of(bad) for good, bad in scores]))
            accuracies.add(blimp[metric]["value"])
        assert blimp["accuracy_sum"]["left_context"] == "all other tokens of the text"
        assert blimp["accuracy_sum"].get("options", {}) == ({} if not more else {"pseudo_likelihood": "word"})
        (codah,) = evaluate(run, f"codah:{tmp_path / 'codah.tsv'}", *more)
        means = [[reference(variant, prompt, choice).mean() for choice in rest] for prompt, *rest in choices]
        assert codah["value"] == pytest.approx(np.mean(np.argmax(means, axis=1) == np.arange(6) % 4))
        cola = {line["metric"]: line for line in evaluate(run, f"cola:{tmp_path / 'CoLA'}", *more)}
        of = {
            name: np.array([reference(variant, "", text).mean() for text in texts]) for name, texts in sentences.items()
        }
        labels = {name: np.arange(len(texts)) % 3 % 2 == 1 for name, texts in sentences.items()}
        threshold = best_threshold(of["train"], labels["train"])
        assert cola["matthews"]["threshold"] == pytest.approx(threshold, abs=2e-5)
        assert cola["accuracy"]["value"] == pytest.approx(np.mean((of["dev"] > threshold) == labels["dev"]))
    assert len(accuracies) > 1


def test_tasks_that_need_a_causal_model_are_refused(run, tmp_path):
    """Fails when an encoder is given a task that has no meaning for it."""
    (tmp_path / "lambada.jsonl").write_text('{"text": "ba be bi"}\n')
    words = ["zero-shot", "--run", run, "--task", f"lambada:{tmp_path / 'lambada.jsonl'}"]
    assert_one_line(run_here("evaluate", *words), 2, "--task lambada must have a causal model, got an encoder")
