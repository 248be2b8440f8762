"""The quickstart: its corpus, its task and its baseline, on small made-up libraries.

What could go wrong: text that depends on where libraries lie or on the number of workers; the same sentence in two
packages; test text that the model was trained on; pairs that give their answer away.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from paths import REPOSITORY

QUICKSTART = REPOSITORY / "launch" / "quickstart"
sys.path.insert(0, str(QUICKSTART))  # the scripts are plain files that import each other

import baseline  # noqa: E402
import corpus  # noqa: E402
import parts  # noqa: E402
import prose  # noqa: E402
import sources  # noqa: E402
import task  # noqa: E402

from jaxlm.errors import InputError  # noqa: E402

NOUNS = (
    "array branch buffer cache client color column cursor device event field filter frame graph handle image".split()
)
NOUNS += "index label layer limit lock margin matrix method module node number object option packet parser path".split()
VERBS = "adds checks closes copies counts creates draws finds gives holds keeps loads makes moves opens reads".split()
PLACES = (
    "before every call|after the last step|in the given order|while it is open|for each of them|with no copy".split("|")
)


def sentence_of(rng: random.Random) -> str:
    first, second, third = rng.sample(NOUNS, 3)
    return f"The {first} {rng.choice(VERBS)} the {second} of a {third}{rng.randrange(10**6)} {rng.choice(PLACES)}."


def library(root: Path, files: int = 150, seed: int = 0) -> Path:
    """A tree of sources whose documentation is all different."""
    rng = random.Random(seed)
    for number in range(files):
        path = root / f"package{number % 7}" / f"module{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        docs = [" ".join(sentence_of(rng) for _ in range(3)) for _ in range(4)]
        path.write_text(
            f'"""{docs[0]}\n\n{docs[1]}\n"""\nraise SystemExit("imported")\n\n\ndef f():\n    """{docs[2]}"""\n'
            f"    # {docs[3]}\n    return 1\n"
        )
    return root


def run_script(name: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, QUICKSTART / name, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)} | environment,
        timeout=120,
    )


def sentences_in(directory: Path, part: str) -> list[str]:
    documents = [Path(directory / f"{part}.txt").read_text(encoding="utf-8")]
    return [s for text in documents for line in text.splitlines() for s in prose._sentences(line) if s]


# --- prose ------------------------------------------------------------------------------------------------------------


def test_prose_keeps_sentences_and_leaves_code_tables_and_lists_out():
    text = """Return the mean of ``x`` along an axis.

    The :func:`~numpy.mean` is taken over
    the flattened array by default. See e.g. the guide for more of it.

    Parameters
    ----------
    x : array_like
        The values whose mean is
        wanted by the caller.
    axis, dtype : int, optional

    Notes
    -----
    It looks like this::

        The result = sum(x) / len(x) is in here.

    >>> mean([1, 2])
    1.5

    .. code-block:: python

        This is the code of a block and not a text.

    ====== ======
    a      b
    ====== ======

    Args:
      name: The name of the file that is read.
      mode: What to do with the file when it is there.

    - Items of a list are paragraphs of
      their own if they are sentences.
    """
    found = [sentence for paragraph in prose.paragraphs_of(text) for sentence in paragraph]
    assert found == [
        "Return the mean of x along an axis.",
        "The numpy.mean is taken over the flattened array by default.",
        "See e.g. the guide for more of it.",
        "The values whose mean is wanted by the caller.",
        "It looks like this:",
        "The name of the file that is read.",
        "What to do with the file when it is there.",
        "Items of a list are paragraphs of their own if they are sentences.",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Der Wert wird von der Funktion nicht kopiert.",
        "Die Größe der Matrix ist in der Regel klein.",
        "Copyright 2020 by the authors of this and all rights reserved.",
        "if (x == 1) { return the value of it; }.",
        "Alpha beta gamma delta epsilon zeta eta.",
        "not the beginning of a sentence in any case.",
        "A b c.",
        "The a_b_c of x_y and the d_e of f_g or h_i.",
    ],
)
def test_what_is_not_english_prose_is_refused(text):
    assert not prose.is_prose(text)


def test_texts_of_a_source_in_the_order_of_the_file():
    source = b'''#!/usr/bin/env python
"""Module."""
# One comment
# of two lines.
x = 1  # not this one
class A:
    "Short quotes are docstrings too."
    # Another comment.
    y: int
    """What y is."""
    def f(self):
        """Method.

        # not a comment
        """
add_newdoc("numpy", "ndarray",
    """
    An array object that represents many things, with a fixed size and a dtype that is known.
    """)
topics = {"assert": """
    The assert statement is long enough to be taken as documentation of the language.
    """}
def g(): return lambda: 1
'''
    assert [text.split("\n")[0].strip() or text.split("\n")[1].strip() for text in sources.texts_of_source(source)] == [
        "Module.",
        "One comment",
        "Short quotes are docstrings too.",
        "Another comment.",
        "What y is.",
        "Method.",
        "An array object that represents many things, with a fixed size and a dtype that is known.",
        "The assert statement is long enough to be taken as documentation of the language.",
    ]
    assert sources.texts_of_source(b'"""Broken."""\ndef f(:\n') == []
    assert sources.texts_of_source("# Größe\n".encode("latin-1")) == []


# --- corpus -----------------------------------------------------------------------------------------------------------


def test_the_corpus_depends_on_what_is_installed_and_not_on_where_or_how(tmp_path):
    here, there = library(tmp_path / "here" / "lib"), library(tmp_path / "elsewhere" / "deep" / "packages")
    first = run_script("corpus.py", "--output", tmp_path / "a", "--root", here, PYTHONHASHSEED="1")
    second = run_script("corpus.py", "--output", tmp_path / "b", "--root", there, "--workers", 1, PYTHONHASHSEED="2")
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    for name in ("pretrain.txt", "labelled.txt", "dev.txt", "test.txt", "test.sentences.txt"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
        assert (tmp_path / "a" / name).stat().st_size > 0
    summaries = [json.loads((tmp_path / name / "corpus.json").read_text()) for name in "ab"]
    assert summaries[0]["fingerprint"] == summaries[1]["fingerprint"]
    assert summaries[0]["fingerprint"] in first.stdout
    assert str(tmp_path) not in (tmp_path / "a" / "corpus.json").read_text()
    assert (
        sum(part["sentences"] for part in summaries[0]["parts"].values()) + sum(summaries[0]["removed"].values())
        == 1800
    )

    (here / "package0" / "module0.py").write_text('"""Another text than the one that was there before."""\n')
    third = run_script("corpus.py", "--output", tmp_path / "c", "--root", here)
    assert json.loads((tmp_path / "c" / "corpus.json").read_text())["fingerprint"] not in first.stdout, third.stderr


def test_a_complete_corpus_is_not_made_again_and_other_directories_are_left_alone(tmp_path, capsys):
    root = library(tmp_path / "lib")
    made = corpus.build(tmp_path / "out", [root], workers=1)
    stamp = (tmp_path / "out" / "pretrain.txt").stat().st_mtime_ns
    assert corpus.build(tmp_path / "out", [tmp_path / "gone"], workers=1) == made
    assert (tmp_path / "out" / "pretrain.txt").stat().st_mtime_ns == stamp
    assert "complete" in capsys.readouterr().out
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match="mine must be new"):
        corpus.build(tmp_path / "mine", [root], workers=1)
    with pytest.raises(InputError, match="too little documentation"):
        corpus.build(tmp_path / "few", [library(tmp_path / "one", files=1)], workers=1)
    assert not (tmp_path / "few").exists()
    with pytest.raises(InputError, match="must be a directory"):
        corpus.build(tmp_path / "none", [tmp_path / "gone"], workers=1)


def test_an_attempt_that_was_stopped_is_made_again(tmp_path):
    root = library(tmp_path / "lib")
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "pretrain.txt").write_text("torn")
    (tmp_path / "out").mkdir()
    assert corpus.build(tmp_path / "out", [root], workers=1)["parts"]["pretrain"]["sentences"] > 100
    assert not (tmp_path / "out.partial").exists()


def test_package_descriptions_are_read_and_vendored_copies_are_not_repeated(tmp_path):
    root = library(tmp_path / "lib")
    about = root / "thing-1.0.dist-info"
    about.mkdir()
    line = "This thing keeps the count of all the boxes that were ever opened by a visitor."
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: Thing\nVersion: 1.0\n\n# Thing\n\n{line}\n")
    shutil.copytree(root / "package0", root / "zebra" / "_vendor" / "package0")
    shutil.copytree(root / "package0", root / "package1" / "tests")  # fixtures are not read at all
    summary = corpus.build(tmp_path / "out", [root], workers=1)
    documents, files, _ = corpus.collect([root], workers=1)
    assert files == 150 + 22
    assert [d.paragraphs for d in documents if d.name == "thing description"] == [((line,),)]
    assert summary["removed"]["exact repeats"] == 22 * 12


def test_near_repeats_are_left_out_and_other_sentences_stay():
    long = "The quick parser reads the whole of the given file into a list of its many lines"
    documents = [
        parts.Document("a.py", ((f"{long}.", "Short words are all that this one has."),)),
        parts.Document("b.py", ((f"{long} today.", "It reads the whole of the file."), (f"{long.upper()}!",))),
    ]
    sentences = [s for document in documents for paragraph in document.paragraphs for s in paragraph]
    exact, near = parts.repeated(*parts.word_ids(sentences))
    assert exact.tolist() == [False, False, False, False, True]  # capitals and marks do not make another sentence
    assert near.tolist() == [False, False, True, False, False]


# --- what dev and test share with the rest ----------------------------------------------------------------------------


def fourgrams(sentence: str) -> list[tuple[str, ...]]:
    words = parts.words_of(sentence)
    return [tuple(words[i : i + 4]) for i in range(len(words) - 3)]


def worst_share(directory: Path) -> tuple[float, float]:
    """The largest share of 4-grams that a dev or test sentence has in the other parts, by plain sets; and the mean."""
    known = {part: {g for s in sentences_in(directory, part) for g in fourgrams(s)} for part in parts.PARTS}
    shares = []
    for part in ("dev", "test"):
        rest = set().union(*(grams for other, grams in known.items() if other != part))
        for sentence in (directory / f"{part}.sentences.txt").read_text(encoding="utf-8").splitlines():
            own = fourgrams(sentence)
            if own:
                shares.append(sum(gram in rest for gram in own) / len(own))
    return max(shares), sum(shares) / len(shares)


def test_no_dev_or_test_sentence_shares_more_than_30_per_cent_of_its_4_grams_with_the_rest(tmp_path):
    """Planted: copies of pretraining sentences with the last words changed. Fails without `parts.leaking`."""
    root = library(tmp_path / "lib")
    by_part = {part: [] for part in parts.PARTS}
    for name in sources.python_files(root):
        by_part[parts.PARTS[parts.part_of(name)]].append(root / name)
    known = "The brown clerk wrote the number of the train on a small card"
    by_part["pretrain"][0].write_text(f'"""{known} before he left the house for good."""\n')
    for part, ending in (("dev", "which nobody ever found"), ("test", "that was lost in the rain")):
        # Most 4-grams of the first sentence are known; of the second one, `wrote the number of`, and not even the rest.
        mine = f"My {part} uncle wrote the number of his own {part} house over {part} every door {part} there is."
        by_part[part][0].write_text(f'"""{known.replace("brown", "old")} {ending}. {mine}"""\n')
    corpus.build(tmp_path / "out", [root], workers=1)
    worst, mean = worst_share(tmp_path / "out")
    assert 0 < mean < worst <= 0.30
    for part in ("dev", "test"):
        text = (tmp_path / "out" / f"{part}.sentences.txt").read_text()
        assert "old clerk" not in text
        assert f"My {part} uncle" in text


def test_the_border_of_30_per_cent():
    parts_of = [0, 3, 3]
    common = "one two three four five six"  # 3 of its 4-grams are shared
    sentences = [common, f"{common} a b c d e f g", f"{common} a b c d"]  # 3 of 10 and 3 of 7
    ids, offsets = parts.word_ids(sentences)
    assert parts.leaking(ids, offsets, np.array(parts_of, np.int8)).tolist() == [False, False, True]


@pytest.fixture(scope="module")
def standard_library(tmp_path_factory) -> Path:
    """The real corpus of the standard library alone."""
    output = tmp_path_factory.mktemp("corpus") / "stdlib"
    corpus.build(output, [Path(sysconfig.get_path("stdlib"))], workers=1)
    return output


@pytest.mark.slow
def test_the_standard_library_alone_is_enough(standard_library, tmp_path):
    summary = json.loads((standard_library / "corpus.json").read_text())
    assert summary["parts"]["pretrain"]["bytes"] > 1_000_000
    worst, _ = worst_share(standard_library)
    assert worst <= 0.30
    made = task.build(standard_library, tmp_path / "task", {"train": 1000, "dev": 500, "test": 1500})
    assert min(made["pairs"].values()) >= 100
    text = (standard_library / "pretrain.txt").read_text(encoding="utf-8")
    words = [word.strip(".,") for word in text.lower().split()]
    assert 0.04 < words.count("the") / len(words) < 0.12  # it is English
    assert ">>>" not in text


# --- task and baseline ------------------------------------------------------------------------------------------------


def test_a_pair_differs_in_two_inner_words_and_nothing_else():
    rng = random.Random(1)
    originals = [
        f"The {rng.choice(NOUNS)} {rng.choice(VERBS)} the {rng.choice(NOUNS)}, and then it is {rng.choice(PLACES)}."
        for _ in range(600)
    ]
    rows = task.pairs(originals, 300)
    assert len(rows) == 300 and rows == task.pairs(reversed(originals), 300)
    for row in rows:
        right = row[row["answer"]].split()
        wrong = row["second" if row["answer"] == "first" else "first"].split()
        assert " ".join(right) in originals
        moved = [i for i, (a, b) in enumerate(zip(right, wrong, strict=True)) if a != b]
        assert len(moved) == 2 and Counter(right) == Counter(wrong)
        assert 0 < moved[0] and moved[1] < len(right) - 1
        assert all(right[i].isalpha() and right[i].islower() for i in moved)  # no comma moves
    positions = Counter(row["answer"] for row in rows)
    assert abs(positions["first"] - 150) < 45  # five deviations of a fair coin
    swaps = {
        tuple(i for i, (a, b) in enumerate(zip(r["first"].split(), r["second"].split(), strict=True)) if a != b)
        for r in rows
    }
    assert len(swaps) > 15


@pytest.mark.parametrize(
    "sentence",
    [
        "Too short to be of use.",
        "It has a number 3 in it and so it does not suit.",
        "The the the the the the the the the the.",
    ],
)
def test_sentences_that_do_not_suit_the_task(sentence):
    assert task.exchanged(sentence) is None


def test_the_files_of_the_task_are_a_choice_task_of_the_program(tmp_path):
    corpus.build(tmp_path / "corpus", [plain_library(tmp_path / "lib")], workers=1)
    done = run_script("task.py", "--corpus", tmp_path / "corpus", "--output", tmp_path / "task", "--train", 50)
    assert done.returncode == 0, done.stderr
    before = (tmp_path / "task" / "test.jsonl").read_bytes()
    again = run_script("task.py", "--corpus", tmp_path / "corpus", "--output", tmp_path / "task", "--train", 50)
    assert again.returncode == 0 and "complete" in again.stdout
    assert (tmp_path / "task" / "test.jsonl").read_bytes() == before
    other = run_script("task.py", "--corpus", tmp_path / "corpus", "--output", tmp_path / "task", "--train", 40)
    assert other.returncode == 2 and other.stderr.count("\n") == 1 and "other sizes" in other.stderr
    missing = run_script("task.py", "--corpus", tmp_path, "--output", tmp_path / "task2")
    assert missing.returncode == 2 and missing.stderr.count("\n") == 1

    from jaxlm.tasks import CustomConfig, read_task

    files = {part: str(tmp_path / "task" / f"{part}.jsonl") for part in ("train", "dev", "test")}
    settings = CustomConfig(kind="choice", choices=("first", "second"), label="answer", **files)
    description, data = read_task("custom", None, settings)
    assert description.labels == ("first", "second")
    rows = baseline.read_pairs(tmp_path / "task" / "train.jsonl")
    assert len(rows) == 50
    assert [(e.texts, e.choices, e.label) for e in data.splits["train"].examples] == [
        ((), (row["first"], row["second"]), row["answer"]) for row in rows
    ]


def plain_library(root: Path) -> Path:
    """A library whose sentences suit the task."""
    rng = random.Random(2)
    letters = "abcdefghijklmnopqrstuvwxyz"
    for number in range(150):
        name = lambda: "".join(rng.choice(letters) for _ in range(6))  # noqa: E731
        lines = [f"The {name()} of a {name()} is not in the {name()} that we {name()} with it." for _ in range(6)]
        path = root / f"m{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('"""' + " ".join(lines) + '"""\n')
    return root


def test_the_baseline_learns_from_neighbouring_words_and_only_from_them(tmp_path):
    corpus.build(tmp_path / "corpus", [plain_library(tmp_path / "lib")], workers=1)
    task.build(tmp_path / "corpus", tmp_path / "task", {"train": 60, "dev": 40, "test": 40})
    done = run_script("baseline.py", "--task", tmp_path / "task", "--output", tmp_path / "baseline.json")
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "baseline.json").read_text())
    assert figures["test_accuracy"] > 0.9  # every sentence has the same frame, so pairs of words tell nearly all
    rng = random.Random(0)
    coin = {
        split: [
            {"first": "a b c d e f", "second": "a b c d e f", "answer": rng.choice(["first", "second"])}
            for _ in range(50)
        ]
        for split in ("train", "dev", "test")
    }
    assert 0.2 < baseline.baseline(coin)["test_accuracy"] < 0.8
