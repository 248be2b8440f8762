"""The demonstration's baseline: scikit-learn's TF-IDF of words and word pairs with logistic regression.

    python launch/quickstart/baseline.py --task runs/quickstart/task --output runs/quickstart/baseline.json

It reads the same labelled pairs as the fine-tuned models. The features of a pair are the difference of its two vectors,
so common words cancel and the order does not matter; the inverse regularization is chosen on dev.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from jaxlm.errors import InputError, run_command

INVERSE_REGULARIZATIONS = (0.1, 1.0, 10.0, 100.0)


def read_pairs(path: Path) -> list[dict[str, str]]:
    """Return the rows of a file that task.py wrote."""
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise InputError(f"{path} has no readable pairs; make them with launch/quickstart/task.py --output") from error


def baseline(splits: dict[str, list[dict[str, str]]]) -> dict[str, float]:
    """Return the accuracies (fractions) on dev and test of the setting that is best on dev, and that setting."""
    from scipy.sparse import vstack
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    vectorizer = TfidfVectorizer(ngram_range=(1, 2), token_pattern=r"[A-Za-z]+(?:['-][A-Za-z]+)*", sublinear_tf=True)
    vectorizer.fit(row[side] for row in splits["train"] for side in ("first", "second"))
    features, answers = {}, {}
    for split, rows in splits.items():
        first, second = (vectorizer.transform([row[side] for row in rows]) for side in ("first", "second"))
        features[split] = first - second
        answers[split] = np.array([row["answer"] == "first" for row in rows])

    # Both orders of every pair, so that the classes are balanced and no intercept is needed.
    both = vstack([features["train"], -features["train"]])
    labels = np.concatenate([answers["train"], ~answers["train"]])
    tried = {}
    for inverse in INVERSE_REGULARIZATIONS:
        model = LogisticRegression(C=inverse, fit_intercept=False, max_iter=2000).fit(both, labels)
        tried[inverse] = (float(np.mean(model.predict(features["dev"]) == answers["dev"])), model)
    best = max(tried, key=lambda inverse: tried[inverse][0])
    dev, model = tried[best]
    test = float(np.mean(model.predict(features["test"]) == answers["test"]))
    return {"dev_accuracy": dev, "test_accuracy": test, "inverse_regularisation": best}


def main() -> None:
    parser = argparse.ArgumentParser(description="TF-IDF of words and word pairs, and logistic regression.")
    parser.add_argument("--task", type=Path, required=True, help="output directory of launch/quickstart/task.py")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    arguments = parser.parse_args()
    metrics = baseline({split: read_pairs(arguments.task / f"{split}.jsonl") for split in ("train", "dev", "test")})
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
    print(
        f"  TF-IDF of words and word pairs: accuracy {metrics['test_accuracy']:.1%} on test,"
        f" {metrics['dev_accuracy']:.1%} on dev"
    )


if __name__ == "__main__":
    run_command(main)
