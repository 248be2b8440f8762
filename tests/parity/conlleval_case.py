"""Gold and predicted tags on which the scores of entities are compared with CoNLL's `conlleval`.

`any` has tags in any order, which begin entities with I- and change their type inside. `bio` has well-formed ones, and
`chunk` the tags of CoNLL-2000's whole test file, of which a fifth are replaced by any of its 23 tags.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

Sentences = list[list[str]]

TYPES = ("NP", "VP", "creative-work")  # a type may have a hyphen
TAGS = ("O", *(f"{mark}-{kind}" for kind in TYPES for mark in "BI"))
SENTENCES, LONGEST = 400, 12
REPLACED = 0.2


def well_formed(tags: Sequence[str]) -> list[str]:
    """Return tags with B- for each I- that does not continue an entity of its type."""
    before = ("O", *tags)
    return [
        f"B{tag[1:]}" if tag[0] == "I" and last[2:] != tag[2:] else tag
        for last, tag in zip(before[:-1], tags, strict=True)
    ]


def replaced(truth: Sentences, tags: Sequence[str], seed: int) -> Sentences:
    """Return tags of which a fifth are replaced by any tag."""
    rng = np.random.default_rng(seed)
    return [[str(rng.choice(tags)) if rng.random() < REPLACED else tag for tag in sentence] for sentence in truth]


def invented() -> dict[str, tuple[Sentences, Sentences]]:
    """Return the gold and the predicted tags of `any` and `bio`."""
    rng = np.random.default_rng(0)
    truth = [rng.choice(TAGS, int(rng.integers(1, LONGEST))).tolist() for _ in range(SENTENCES)]
    guess = replaced(truth, TAGS, 1)
    return {"any": (truth, guess), "bio": ([well_formed(one) for one in truth], [well_formed(one) for one in guess])}


def chunks(test_file: Path) -> tuple[Sentences, Sentences]:
    """Return the gold and the predicted tags of `chunk`, from the `test.txt` of CoNLL-2000."""
    truth = [[line.split(" ")[2] for line in part.split("\n")] for part in test_file.read_text().strip().split("\n\n")]
    return truth, replaced(truth, sorted({tag for tags in truth for tag in tags}), 2)
