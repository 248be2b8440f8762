"""Word vectors from a file in runs: tables that begin with them, fixed and trained ones, resumed runs, bad input."""

import numpy as np
import pytest
from test_cvt_runs import files  # noqa: F401
from toy_runs import assert_one_line, checksums, run_here

import jaxlm

pytestmark = pytest.mark.usefixtures("two_devices")

TOY = (
    "--model.word-width 6 --model.character-width 0 --model.width 8 --model.units 4 4 --length 8 --head linear".split()
)
TOY += "--num-steps 4 --batch-size 8 --log-every 1 --eval-every 4 --checkpoint-every 2".split()
WIDTH = 5
VECTORS = {f"w{digit}": np.arange(WIDTH, dtype=np.float32) - digit / 4 for digit in (0, 3, 5, 9)} | {"no": np.ones(5)}


@pytest.fixture(scope="module")
def place(files):  # noqa: F811
    lines = [f"{word} {' '.join(map(str, vector))}\n" for word, vector in VECTORS.items()]
    (files / "vectors.txt").write_text("".join(lines))
    return files


def tuned(place, name, *more, config="debug/bilstm"):
    words = ["--task", "ner", "--task-dir", place, "--tokenizer", f"hf:{place / 'tokenizer'}"]
    sizes = [word for word in TOY if not ("--word-vectors" in more and word in ("--model.word-width", "6"))]
    return run_here("finetune", config, "--run", place / name, *words, *sizes, *more)


def table_of(run, step=None):
    loaded = jaxlm.load(f"{run}@{step}" if step else str(run))
    return np.asarray(loaded.params["backbone"]["embeddings"]["tokens"]), loaded.run.tokenizer


@pytest.fixture(scope="module")
def fixed(place):
    ended = tuned(place, "fixed", "--word-vectors", place / "vectors.txt", "--freeze-words", "--ema", 0.9)
    assert ended.code == 0, ended.errors
    assert "4 of 13 words of the vocabulary have one of 5 numbers, 9 begin at random; all are fixed" in ended.output
    return place / "fixed"


def test_fixed_words_keep_their_vectors(place, fixed):
    """The reference is the file. Fails when a word has the vector of another one, when the optimizer or the average
    moves one, and when words without a vector do not begin as in a run without a file.
    """
    table, tokenizer = table_of(fixed)
    words = tokenizer.pieces(range(tokenizer.size))
    assert table.shape == (13, WIDTH)
    for word, row in zip(words, table, strict=True):
        if word in VECTORS:
            np.testing.assert_array_equal(row, VECTORS[word], err_msg=word)
    ended = tuned(place, "random", "--freeze-words", "--model.word-width", WIDTH)
    assert ended.code == 0, ended.errors
    fresh, _ = table_of(place / "random")
    others = [number for number, word in enumerate(words) if word not in VECTORS]
    np.testing.assert_array_equal(table[others], fresh[others])


def test_trained_words_begin_at_their_vectors(place):
    """Fails when the vectors are not where training begins, or a table is fixed without being asked to."""
    words = ("--word-vectors", place / "vectors.txt", "--optimizer.peak-lr", 1e-3)
    ended = tuned(place, "trained", *words)
    assert ended.code == 0 and "all are trained with the rest" in ended.output, ended.errors
    table, tokenizer = table_of(place / "trained")
    for word, vector in VECTORS.items():
        if word != "no":
            moved = np.abs(table[tokenizer.encode(word)[0]] - vector)
            assert 0 < moved.max() <= 5e-3, word  # four steps of Adam, of at most the rate each


def test_a_run_goes_on_with_the_same_vectors_alone(place, fixed, tmp_path):
    """Fails when another file is taken, or the same one elsewhere is refused."""
    more = ("--freeze-words", "--ema", 0.9)
    moved = tmp_path / "moved.txt"
    moved.write_text((place / "vectors.txt").read_text())
    before = checksums(fixed)
    ended = tuned(place, "fixed", "--word-vectors", moved, *more)
    assert ended.code == 0 and "is complete" in ended.output and checksums(fixed) == before
    moved.write_text((place / "vectors.txt").read_text().replace("no 1", "no 2"))
    assert_one_line(tuned(place, "fixed", "--word-vectors", moved, *more), 2, "the word vectors have changed")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--word-vectors", "{vectors}", "--model.word-width=6"), "--model.word-width must be 5, the width of"),
        (("--word-vectors", "{place}/none"), "none cannot be read: No such file"),
        (
            ("--freeze-words", "--model.word-width=0", "--model.character-width", 3),
            "must be above 0 with --freeze-words",
        ),
        (("--freeze-words", "--freeze-embeddings"), "--freeze-words must be False with --freeze-embeddings"),
        (("--mix-penalty", 0.1), "--mix-penalty must be 0 without --word-features"),
    ],
)
def test_wrong_usage_is_refused(place, more, said):
    more = [str(word).format(place=place, vectors=place / "vectors.txt") for word in more]
    assert_one_line(tuned(place, "wrong", *more), 2, said)
    assert not (place / "wrong").exists()
