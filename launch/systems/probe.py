"""A linear probe of a language model's states for named entities, without training the model.

    python launch/systems/probe.py --run runs/systems/gpt --data ner/wnut17 --output probe.json

The features of a word are the states of its last token, given the sentence. Scikit-learn's logistic regression predicts
the word's tag from them; the metric is F1 of exact entities on the test file. The same probe of the token embeddings
shows what a word gives without its sentence. Each seed trains on another random four fifths of the sentences.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

import jaxlm
from jaxlm.errors import InputError, run_command
from jaxlm.files import write_json
from jaxlm.tasks.datasets.spans_and_tags import NER
from jaxlm.tasks.examples import TaggedSentence
from jaxlm.tasks.kinds.tags import read_sentences
from jaxlm.tasks.metrics.tags import entity_metrics

BATCH = 256  # sentences whose states are in memory at a time
SHARE = 0.8  # of the sentences, for each seed


def word_states(model: jaxlm.LoadedModel, sentences: Sequence[TaggedSentence]) -> np.ndarray:
    """Return the embedding and the last layer's state of each word's last token, float32 (2, words, width).

    A word without tokens has those of the word before it; words after the longest input of the model are zero.
    """
    tokenizer = model.run.tokenizer
    around = [model.run.tokenizer.specials[role] for role in ("cls", "sep")] if not model.run.model.is_causal else []
    width = model.run.model.config.width
    found = []
    for start in range(0, len(sentences), BATCH):
        some = sentences[start : start + BATCH]
        rows, ends = [], []
        for sentence in some:
            ids, last = around[:1], []
            for number, word in enumerate(sentence.tokens):
                ids = ids + tokenizer.encode(f" {word}" if number else word)
                last.append(len(ids) - 1)
            rows.append([*ids, *around[1:]][: model.length])
            ends.append(last)
        states = model.hidden_states([row or [0] for row in rows])
        for of_row, row, last in zip(states, rows, ends, strict=True):
            features = np.zeros((2, len(last), width), np.float32)
            for word, at in enumerate(last):
                if len(around[:1]) <= at < len(row):
                    features[:, word] = of_row[[0, -1], at, :width]  # wider layers pad the others with zeros
            found.append(features)
    return np.concatenate(found, axis=1)


def probe(states: np.ndarray, sentences, test_states: np.ndarray, test_sentences, seed: int) -> float:
    """Return the F1 of entities on the test sentences, in percent."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    rng = np.random.default_rng(seed)
    kept = rng.random(len(sentences)) < SHARE
    words = np.repeat(kept, [len(sentence.tokens) for sentence in sentences])
    tags = np.concatenate([sentence.tags for sentence in sentences])
    classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=200))
    classifier.fit(states[words], tags[words])
    flat = iter(classifier.predict(test_states))
    predicted = [[str(next(flat)) for _ in sentence.tokens] for sentence in test_sentences]
    truth = [list(sentence.tags) for sentence in test_sentences]
    return 100 * entity_metrics(truth, predicted)["entity_f1"]


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run", required=True, help="pretraining run")
    parser.add_argument("--data", type=Path, required=True, help="directory with train.conll and test.conll")
    parser.add_argument("--seeds", type=int, default=3, help="number of probes (default 3)")
    parser.add_argument("--output", type=Path, required=True, help="JSON file of the results")
    arguments = parser.parse_args()
    if arguments.seeds < 1:
        raise InputError(f"--seeds must be at least 1, got {arguments.seeds}; give a larger one")
    model = jaxlm.load(arguments.run)
    train, test = (
        read_sentences(arguments.data / f"{name}.conll", NER.task, labelled=True).examples for name in ("train", "test")
    )
    states, test_states = word_states(model, train), word_states(model, test)
    found = {
        name: [probe(states[layer], train, test_states[layer], test, seed) for seed in range(arguments.seeds)]
        for name, layer in (("embeddings", 0), ("last_layer", 1))
    }
    parameters = sum(int(leaf.size) for leaf in jax.tree.leaves(model.run.params["backbone"]))
    write_json(arguments.output, {"parameters": parameters, **found})
    print(json.dumps({name: [round(value, 1) for value in values] for name, values in found.items()}))


if __name__ == "__main__":
    run_command(main)
