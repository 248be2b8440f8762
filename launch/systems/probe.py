"""A linear probe of a language model's states for named entities or parts of speech, without training the model.

    python launch/systems/probe.py --run runs/systems/gpt --data ner/wnut17 --output probe.json
    python launch/systems/probe.py --run runs/elmo --task ud_pos --data ud/ewt --all-layers --output probe.json

The features of a word are the states of its last token, given the sentence; of a model with a source, those of its
encoder. Scikit-learn's logistic regression predicts the word's tag from them; the metric is F1 of exact entities, or
the fraction of correct parts of speech, on the test file. The same probe of the token embeddings shows what a word
gives without its sentence. Each seed trains on another random four fifths of the sentences.
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
from jaxlm.tasks import read_task
from jaxlm.tasks.datasets.spans_and_tags import NER
from jaxlm.tasks.examples import TaggedSentence
from jaxlm.tasks.kinds.tags import read_sentences
from jaxlm.tasks.metrics.tags import entity_metrics, token_accuracy

PARTS = ("train", "test")
BATCH = 256  # sentences whose states are in memory at a time
SHARE = 0.8  # of the sentences, for each seed


def word_states(
    model: jaxlm.LoadedModel, sentences: Sequence[TaggedSentence], layers: Sequence[int] = (0, -1)
) -> np.ndarray:
    """Return the states of each word's last token, float32 (layers, words, width). layers: 0 are the embeddings.

    A word without tokens has those of the word before it; words after the longest input of the model are zero.
    """
    width, found = model.run.model.config.width, []
    for start in range(0, len(sentences), BATCH):
        rows, places = rows_of(model, sentences[start : start + BATCH])
        for states, of_words in zip(model.hidden_states(rows, truncate=True), places, strict=True):
            features = np.zeros((len(layers), len(of_words), width), np.float32)
            for word, at in enumerate(of_words):
                if 0 <= at < states.shape[1]:
                    features[:, word] = states[list(layers), at, :width]  # wider layers pad the others with zeros
            found.append(features)
    return np.concatenate(found, axis=1)


def rows_of(model: jaxlm.LoadedModel, sentences: Sequence[TaggedSentence]) -> tuple[list, list[list[int]]]:
    """Return what a model reads for each sentence, and the place of each word's last token in it, or -1.

    ELMo reads words. Others read ids: an encoder's between CLS and SEP, those of a source before its end.
    """
    if model.run.model.token_characters:
        return [" ".join(one.tokens) for one in sentences], [list(range(len(one.tokens))) for one in sentences]
    tokenizer, specials, built = model.run.tokenizer, model.run.tokenizer.specials, model.run.model
    after = [specials["end"]] if built.has_source else [] if built.is_causal else [specials["sep"]]
    before = [] if built.has_source or built.is_causal else [specials["cls"]]
    rows, places = [], []
    for sentence in sentences:
        ids, last = list(before), []
        for number, word in enumerate(sentence.tokens):
            ids = ids + tokenizer.encode(f" {word}" if number else word)
            last.append(len(ids) - 1 if len(ids) > len(before) else -1)
        rows.append([*ids, *after] or [0])
        places.append(last)
    return rows, places


def probe(
    states: np.ndarray, sentences, test_states: np.ndarray, test_sentences, seed: int, task: str = "ner"
) -> float:
    """Return the metric of a task on the test sentences, in percent."""
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
    if task == "ner":
        return 100 * entity_metrics(truth, predicted)["entity_f1"]
    return 100 * token_accuracy(truth, predicted)["accuracy"]


def read(task: str, directory: Path) -> list[Sequence[TaggedSentence]]:
    """Return the sentences of train and test. NER is read without the dev file, which `read_task` needs."""
    if task == "ner":
        return [read_sentences(directory / f"{part}.conll", NER.task, labelled=True).examples for part in PARTS]
    _, data = read_task(task, str(directory))
    return [data.splits[part].examples for part in PARTS]


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run", required=True, help="pretraining run")
    parser.add_argument("--task", choices=("ner", "ud_pos"), default="ner", help="what is predicted (default ner)")
    parser.add_argument("--data", type=Path, required=True, help="directory of the task, with train and test")
    parser.add_argument("--all-layers", action="store_true", help="probe every layer, not the first and the last")
    parser.add_argument("--seeds", type=int, default=3, help="number of probes (default 3)")
    parser.add_argument("--output", type=Path, required=True, help="JSON file of the results")
    arguments = parser.parse_args()
    if arguments.seeds < 1:
        raise InputError(f"--seeds must be at least 1, got {arguments.seeds}; give a larger one")
    model, (train, test) = jaxlm.load(arguments.run), read(arguments.task, arguments.data)
    last = model.run.model.family.num_text_layers(model.run.model.config)
    named = {"embeddings": 0, "last_layer": last}
    if arguments.all_layers:
        named = {"embeddings": 0, **{f"layer_{number}": number for number in range(1, last)}, "last_layer": last}
    states, test_states = (word_states(model, some, list(named.values())) for some in (train, test))
    found = {
        name: [probe(states[at], train, test_states[at], test, seed, arguments.task) for seed in range(arguments.seeds)]
        for at, name in enumerate(named)
    }
    parameters = sum(int(leaf.size) for leaf in jax.tree.leaves(model.run.params))
    write_json(arguments.output, {"parameters": parameters, **found})
    print(json.dumps({name: [round(value, 1) for value in values] for name, values in found.items()}))


if __name__ == "__main__":
    run_command(main)
