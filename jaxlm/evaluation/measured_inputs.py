"""Inputs of the measurements of a machine, made on it: a text and a labelled set of the words `w0`, `w1`, …"""

import random
from pathlib import Path

_ROWS = {"train": 1600, "dev": 64}


def write_text(file: Path) -> None:
    """Write 4,000 lines of random words, in which each word is followed by one of four."""
    rng = random.Random(0)
    follow = [rng.choices(range(500), k=4) for _ in range(500)]
    lines, word = [], 0
    for _ in range(4000):
        line = [word]
        while len(line) < 20:
            line.append(word := rng.choice(follow[word]))
        lines.append(" ".join(f"w{one}" for one in line))
    file.write_text("\n".join(lines) + "\n")


def write_task(folder: Path, words: int) -> None:
    """Write train.tsv and dev.tsv with rows of so many words, whose label is told by the first one."""
    rng = random.Random(1)
    for name, count in _ROWS.items():
        rows = ["text\tlabel"]
        for _ in range(count):
            label = rng.randrange(2)
            rest = " ".join(f"w{rng.randrange(500)}" for _ in range(words - 1))
            rows.append(f"w{500 + label} {rest}\t{('no', 'yes')[label]}")
        (folder / f"{name}.tsv").write_text("\n".join(rows) + "\n")
