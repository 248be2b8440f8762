"""Samples of the training split: which rows, and what stays of the rest."""

import json

import numpy as np
import pytest

from jaxlm.tasks import CustomConfig, read_task


@pytest.fixture
def file(tmp_path):
    rows = [{"text": f"row {k}", "label": "rare" if k == 99 else "ab"[k % 2], "score": k} for k in range(100)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path / "train.jsonl")


def read(file, sample=None, seed=0, **settings):
    custom = CustomConfig(train=file, text="text", **({"label": "label"} | settings))
    return read_task("custom", None, custom, seed=seed, sample=sample)


def test_a_sample_is_a_part_of_train(file):
    """Fails if rows repeat, change their order or come from dev, or if dev or the labels depend on the sample."""
    task, whole = read(file)
    train = whole.splits["train"].examples
    before = ()
    for count in (1, 10, 40, 90):
        same, data = read(file, count)
        rows = data.splits["train"].examples
        at = [train.index(row) for row in rows]
        assert len(rows) == count and at == sorted(set(at))
        assert set(before) <= set(rows) and data.splits["dev"] == whole.splits["dev"] and same.labels == task.labels
        assert count == 90 or f"{count} of the 90 examples are used, chosen by seed 0" in "\n".join(data.report())
        assert (data.fingerprint() == whole.fingerprint()) == (count == 90)
        before = rows
    (_, other), (_, again) = read(file, 40, seed=0), read(file, 40, seed=1)
    assert [e.texts for e in other.splits["train"].examples] != [e.texts for e in again.splits["train"].examples]


def test_every_row_is_as_likely(file):
    """Fails if rows of one part of the file are preferred: 4,000 draws of 10 from 100, within five deviations."""
    counts = np.zeros(100)
    for seed in range(400):
        for example in read(file, 10, seed, dev=file)[1].splits["train"].examples:
            counts[int(example.texts[0].split()[1])] += 1
    assert counts.sum() == 4000 and np.abs(counts - 40).max() < 5 * np.sqrt(400 * 0.1 * 0.9)


def test_the_scale_of_scores_is_that_of_the_sample(file):
    task, data = read(file, 7, label="score", kind="regression")
    scores = np.array([example.label for example in data.splits["train"].examples])
    assert (task.mean, task.deviation) == pytest.approx((scores.mean(), scores.std()))
