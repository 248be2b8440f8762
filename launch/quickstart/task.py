"""The demonstration's task: which of two sentences is the original? The other has two inner words exchanged.

    python launch/quickstart/task.py --corpus runs/quickstart/corpus --output runs/quickstart/task

Only word order distinguishes the two: a bag of words sees no difference, pairs of neighbouring words see some of it,
and a language model has learnt it from text without labels. The output is train.jsonl, dev.jsonl and test.jsonl with
the fields `first`, `second` and `answer` (the name of the original's field). Everything is derived from the md5 of the
sentences: there is no seed, and the same corpus gives the same files.
"""

import argparse
import hashlib
import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from parts import words_of

from jaxlm.errors import InputError, RunError, run_command

FORMAT = 1
SPLITS = {"train": "labelled", "dev": "dev", "test": "test"}  # split → part of the corpus
FEWEST_WORDS, MOST_WORDS = 8, 24
_SIMPLE = re.compile(r"[A-Z][A-Za-z]*(?:,? [A-Za-z]+(?:['-][A-Za-z]+)*)*\.")  # words, commas, a full stop
_INNER = re.compile(r"[a-z]+")


def number_of(text: str, purpose: str) -> int:
    """Return a fixed number below 2**64 for a text, a different one for each purpose."""
    digest = hashlib.md5(f"{purpose}\n{text}".encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest[:8], "big")


def exchanged(sentence: str) -> str | None:
    """Return `sentence` with two different inner words exchanged; None if it is unsuitable for the task.

    Inner words exclude the first and the last. Only plain lower-case words move, so that no comma and no capital letter
    gives the answer away.
    """
    words = sentence.split(" ")
    if not (FEWEST_WORDS <= len(words) <= MOST_WORDS and _SIMPLE.fullmatch(sentence)):
        return None
    inner = [i for i in range(1, len(words) - 1) if _INNER.fullmatch(words[i])]
    choices = [(i, j) for i in inner for j in inner if i < j and words[i] != words[j]]
    if not choices:
        return None
    i, j = choices[number_of(sentence, "words") % len(choices)]
    words[i], words[j] = words[j], words[i]
    return " ".join(words)


def pairs(sentences: Iterable[str], most: int) -> list[dict[str, str]]:
    """Return up to `most` examples from the suitable sentences, in an order unrelated to that of the sentences."""
    chosen = sorted(set(sentences), key=lambda sentence: (number_of(sentence, "order"), sentence))
    found: list[dict[str, str]] = []
    for sentence in chosen:
        other = exchanged(sentence)
        if other is None or words_of(other) == words_of(sentence):
            continue
        if number_of(sentence, "position") % 2 == 0:
            found.append({"first": sentence, "second": other, "answer": "first"})
        else:
            found.append({"first": other, "second": sentence, "answer": "second"})
        if len(found) == most:
            break
    return found


def build(corpus: Path, output: Path, sizes: dict[str, int]) -> dict:
    """Write the task's files at `output` unless they are complete; return the content of task.json."""
    try:
        fingerprint = json.loads((corpus / "corpus.json").read_text(encoding="utf-8"))["fingerprint"]
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"{corpus} has no complete corpus; make it with launch/quickstart/corpus.py --output"
        ) from error
    wanted = {"format": FORMAT, "corpus": fingerprint, "sizes": sizes}
    try:
        summary = json.loads((output / "task.json").read_text(encoding="utf-8"))
        if all(summary.get(name) == value for name, value in wanted.items()):
            print(f"task: {output} is complete")
            return summary
        raise InputError(
            f"{output} was made from another corpus or with other sizes; delete it or name another --output"
        )
    except (OSError, ValueError, AttributeError):
        if output.exists() and (not output.is_dir() or any(output.iterdir())):
            raise InputError(f"{output} has other content; delete it or name another --output") from None
    splits = {}
    for split, part in SPLITS.items():
        sentences = (corpus / f"{part}.sentences.txt").read_text(encoding="utf-8").splitlines()
        splits[split] = pairs(sentences, sizes[split])
        if not splits[split]:
            raise InputError(f"{corpus}: no sentence of the {part} split suits the task; collect more text with --root")
    partial = output.with_name(output.name + ".partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for split, rows in splits.items():
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            (partial / f"{split}.jsonl").write_text(text, encoding="utf-8", newline="\n")
        summary = wanted | {"pairs": {split: len(rows) for split, rows in splits.items()}}
        (partial / "task.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        if output.exists():
            output.rmdir()
        partial.rename(output)
    except OSError as error:
        raise RunError(f"{output}: not writable ({error.strerror}); make room or name another --output") from error
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description="Make pairs of sentences, one of which is the original.")
    parser.add_argument("--corpus", type=Path, required=True, help="output directory of launch/quickstart/corpus.py")
    parser.add_argument("--output", type=Path, required=True, help="new directory to write")
    parser.add_argument("--train", type=int, default=1000, help="maximum number of training pairs (default 1000)")
    parser.add_argument("--dev", type=int, default=500, help="maximum number of pairs to choose settings (default 500)")
    parser.add_argument("--test", type=int, default=1500, help="maximum number of pairs for the table (default 1500)")
    arguments = parser.parse_args()
    sizes = {split: getattr(arguments, split) for split in SPLITS}
    summary = build(arguments.corpus, arguments.output, sizes)
    print(
        "  "
        + ", ".join(f"{split} {count:,} pairs" for split, count in summary["pairs"].items())
        + f" in {arguments.output}"
    )
    with (arguments.output / "train.jsonl").open(encoding="utf-8") as file:
        print("  for example " + file.readline().strip())


if __name__ == "__main__":
    run_command(main)
