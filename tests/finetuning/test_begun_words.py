"""Word vectors from a file in runs: tables that begin with them, fixed and trained ones, resumed runs, bad input."""

import numpy as np
import pytest
from test_cvt_runs import files  # noqa: F401
from toy_runs import assert_one_line, checksums, run_here

import jaxlm

pytestmark = pytest.mark.usefixtures("two_devices")

TOY = "--model.word-width 6 --model.character-width 0 --model.width 8 --model.units 4 4 --length 8".split()
TOY += "--num-steps 4 --batch-size 8 --log-every 1 --eval-every 4 --checkpoint-every 2".split()
WIDTH = 5
VECTORS = {f"w{digit}": np.arange(WIDTH, dtype=np.float32) - digit / 4 for digit in (0, 3, 5, 9)} | {"no": np.ones(5)}


@pytest.fixture(scope="module")
def place(files):  # noqa: F811
    lines = [f"{word} {' '.join(map(str, vector))}\n" for word, vector in VECTORS.items()]
    (files / "vectors.txt").write_text("".join(lines))
    return files


def tuned(place, name, *more, config="debug/bilstm", head="linear"):
    words = ["--task", "ner", "--task-dir", place, "--tokenizer", f"hf:{place / 'tokenizer'}"]
    sizes = [word for word in TOY if not ("--word-vectors" in more and word in ("--model.word-width", "6"))]
    return run_here("finetune", config, "--run", place / name, *words, *sizes, "--head", head, *more)


def table_of(run, name="tokens"):
    loaded = jaxlm.load(str(run))
    return np.asarray(loaded.params["backbone"]["embeddings"][name]), loaded.run.tokenizer


def assert_fixed(table, tokenizer):
    words = tokenizer.pieces(range(tokenizer.size))
    assert table.shape == (len(words), WIDTH) and len(VECTORS.keys() & set(words)) == 4
    for word, row in zip(words, table, strict=True):
        if word in VECTORS:
            np.testing.assert_array_equal(row, VECTORS[word], err_msg=word)


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
    assert_fixed(table, tokenizer)
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


def test_fixed_words_of_cross_view_training(place):
    """Fails when a labelled or an unlabelled batch, or their momentum, moves a fixed word."""
    more = ("--word-vectors", place / "vectors.txt", "--freeze-words", "--sample", 16, "--unlabelled", "rest")
    ended = tuned(place, "cvt", *more, "--optimizer.warmup", 1, config="finetune/cvt", head="cross_view")
    assert ended.code == 0, ended.errors
    assert_fixed(*table_of(place / "cvt"))


def test_fixed_words_of_a_translations_source(place):
    """Fails when the target's words are fixed too, or the source's are not."""
    rows = [line.split() for line in (place / "train.txt").read_text().splitlines() if line]
    text = "".join(f"{' '.join(words)}\t{' '.join(reversed(words))}\n" for words in rows)
    (place / "rows.tsv").write_text("source\ttarget\n" + text)
    columns = "--task custom --custom.kind text --custom.text source --custom.label target".split()
    columns += [word for part in ("train", "dev") for word in (f"--custom.{part}", place / "rows.tsv")]
    more = ("--word-vectors", place / "vectors.txt", "--freeze-words", "--tokenizer", f"hf:{place / 'tokenizer'}")
    sizes = "--model.width 8 --options.target-length 9 --length 20 --num-steps 4 --batch-size 8".split()
    ended = run_here("finetune", "debug/mt_lstm", "--run", place / "mt", *columns, *more, *sizes)
    assert ended.code == 0, ended.errors
    assert_fixed(*table_of(place / "mt", "source_tokens"))
    target, tokenizer = table_of(place / "mt", "target_tokens")
    assert all(np.abs(target[tokenizer.encode(word)[0]]).max() < 0.2 for word in VECTORS if word != "no")


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
