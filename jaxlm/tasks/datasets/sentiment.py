"""Sentiment: the trees of the Stanford Sentiment Treebank, and the reviews of IMDb.

The treebank (Socher et al. 2013) has a bracketed tree per line, with a label for each word and phrase, from 0, very
negative, to 4, very positive: `(3 (2 It) (4 (2 's) (4 good)))`. `sst_fine` has these five classes. `sst_binary` has
two, and leaves out what is neutral (2). Dev and test have whole sentences. Train also has the phrases of more than
three words, as in CoVe's experiments (McCann et al. 2017): 93,703 rows from the 8,544 sentences, 56,405 of them not
neutral (the paper: 94.2k and 56.4k). A phrase that occurs several times is as many rows. `sst2` is GLUE's selection
from the same treebank, whose training file has phrases of any length.

Some public copies of `train.txt` have 9,645 lines, the 8,544 of train and then the 1,101 of `dev.txt`: lines at the end
of train that are those of dev are dropped and counted. Escapes of the Penn Treebank become the characters they denote.

IMDb (Maas et al. 2011) has 25,000 reviews each in `train` and `test`, one per file, in the folders `neg` and `pos`.
The other folder of train, `unsup`, has no labels and is not read. Markup in the texts (`<br />`) stays.
"""

import re
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

from jaxlm.errors import InputError
from jaxlm.reading.lines import Lines
from jaxlm.tasks.builtin import PAPERS, BuiltIn, Catalogue, papers, read_table
from jaxlm.tasks.examples import Example, Split
from jaxlm.tasks.kinds.texts import Classification
from jaxlm.tasks.task import Columns, Task

MIN_PHRASE = 4  # words of the shortest phrase in train
# A word with its label, the beginning of a phrase, or its end. A word may have other white space than blanks (8 1/2).
_NODE = re.compile(r" *(?:\(([0-4]) +(?:([^ ()]+) *\))?|(\)))")
_ESCAPES = {"-LRB-": "(", "-RRB-": ")", "\\/": "/", "\\*": "*"}
_ESCAPE = re.compile("|".join(map(re.escape, _ESCAPES)))


def phrases_of(tree: str) -> list[tuple[str, list[str]]]:
    """Return the label and the words of each word and phrase of a bracketed tree, the whole sentence last.

    Raises:
      ValueError: brackets that do not match, a label that is not from 0 to 4, or a phrase without words.
    """
    words: list[str] = []
    phrases: list[tuple[str, list[str]]] = []
    opened: list[tuple[str, int]] = []  # the label of each phrase that has not ended, and its first word
    position = 0
    while position < len(tree):
        node = _NODE.match(tree, position)
        if node is None or (phrases and not opened):
            raise ValueError(f"the tree is damaged at {tree[position : position + 40]!r}")
        label, word, ends = node.groups()
        if label:
            opened.append((label, len(words)))
        if word:
            words.append(_ESCAPE.sub(lambda found: _ESCAPES[found[0]], word))
        if word or ends:
            if not opened or opened[-1][1] == len(words):
                raise ValueError(f"the tree is damaged at {tree[position : position + 40]!r}")
            label, first = opened.pop()
            phrases.append((label, words[first:]))
        position = node.end()
    if opened:
        raise ValueError(f"{len(opened)} brackets are not closed")
    return phrases


def read_trees(path: Path, task: Task, *, labelled: bool, classes: Mapping[str, str]) -> Split:
    """Read the whole sentences of a file of trees (`.txt`), or a file with named columns.

    classes: the class of each label of the trees; phrases with another label are dropped and counted.

    Raises:
      InputError: a damaged tree, with its line; a file without any.
    """
    if path.suffix != ".txt":
        return read_table(path, task, labelled=labelled)
    return _split(path, _lines(path), classes, 0)


def read_phrases(path: Path, task: Task, *, labelled: bool, classes: Mapping[str, str]) -> Split:
    """Read the sentences and phrases of a training file, without the lines of `dev.txt` at its end; see `read_trees`.

    A phrase has at least `MIN_PHRASE` words.
    """
    lines, dev = _lines(path), [line for _, line in _lines(path.with_name("dev.txt"))]
    own = len(lines) - len(dev)
    appended = [line for _, line in lines[own:]] == dev
    dropped = [(number, "a line of dev.txt") for number, _ in lines[own:]] if appended else []
    return _split(path, lines[:own] if appended else lines, classes, MIN_PHRASE, dropped)


def _lines(path: Path) -> list[tuple[int, str]]:
    return [(number, line.strip()) for number, line in Lines(path) if line.strip()]


def _split(
    path: Path,
    lines: Iterable[tuple[int, str]],
    classes: Mapping[str, str],
    min_phrase: int,
    dropped: Iterable[tuple[int, str]] = (),
) -> Split:
    """Return the sentences of trees, and their phrases of at least `min_phrase` words; 0: none."""
    examples, left_out = [], list(dropped)
    for number, line in lines:
        try:
            *parts, sentence = phrases_of(line)
        except ValueError as error:
            raise InputError(
                f"{path} line {number} must be a tree such as (3 (2 It) (4 works)), got another line: {error}; "
                "correct the line"
            ) from None
        for label, words in [*(part for part in parts if 0 < min_phrase <= len(part[1])), sentence]:
            if label in classes:
                examples.append(Example((" ".join(words),), (), classes[label]))
            else:
                left_out.append((number, f"label {label}"))
    if not examples:
        raise InputError(f"{path} has no trees with one of the labels {', '.join(classes)}; give another file")
    return Split(tuple(examples), len(examples) + len(left_out), tuple(left_out), 0)


def _treebank(name: str, labels: tuple[str, ...], words: tuple[str, ...], classes: Mapping[str, str]) -> BuiltIn:
    """Return a task of the treebank. words: another spelling of its labels. classes: see `read_trees`."""
    return BuiltIn(
        Classification(
            name=name,
            labels=labels,
            spellings=(words,) if words else (),
            columns=Columns(texts=(("sentence", "text"),), label=("label",)),
            papers=PAPERS,
        ),
        {part: (f"{part}.txt", f"trees/{part}.txt") for part in ("train", "dev", "test")},
        read=partial(read_trees, classes=classes),
        read_train=partial(read_phrases, classes=classes),
    )


_FINE = ("very negative", "negative", "neutral", "positive", "very positive")


def read_reviews(path: Path, task: Task, *, labelled: bool) -> Split:
    """Read a directory with a folder of texts for each label, or a file with named columns.

    Raises:
      InputError: a folder that is missing or has no texts.
    """
    if path.is_file():
        return read_table(path, task, labelled=labelled)
    examples = []
    for label in task.labels:
        files = sorted((path / label).glob("*.txt"))
        if not files:
            raise InputError(f"{path / label} must be a folder of .txt files, got none; keep the layout of the archive")
        examples += [Example((Lines(file).text().strip(),), (), label) for file in files]
    return Split(tuple(examples), len(examples), (), sum(not example.texts[0] for example in examples))


SENTIMENT = (
    _treebank("sst_fine", ("0", "1", "2", "3", "4"), _FINE, {label: label for label in "01234"}),
    _treebank(
        "sst_binary",
        ("negative", "positive"),
        (),
        {"0": "negative", "1": "negative", "3": "positive", "4": "positive"},
    ),
    BuiltIn(
        Classification(
            name="imdb",
            labels=("neg", "pos"),
            columns=Columns(texts=(("text", "sentence"),), label=("label",)),
            papers=papers(length=512),
        ),
        {part: (part, f"aclImdb/{part}") for part in ("train", "test")},
        Catalogue("imdb_reviews", ("text",), label_names=("neg", "pos"), splits={"train": "train", "test": "test"}),
        read=read_reviews,
    ),
)
