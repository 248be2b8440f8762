"""Vocabularies of words, characters and bytes against counts by hand, and as stores, exports and copies."""

import random

import numpy as np
import pytest
from toy_runs import assert_one_line, run_here

from jaxlm.data.store import open_store
from jaxlm.errors import InputError
from jaxlm.text import bytes_tokenizer, load_tokenizer, published_files, train_characters, train_words
from jaxlm.text.units import END, whole_words

pytestmark = pytest.mark.usefixtures("two_devices")

LINES = " the cat sat \n the dog <unk> sat\n\n the cat\tran \n"


def test_words_are_those_between_white_space_and_line_ends():
    """Fails when a line end or <unk> is not counted as published figures count them, or when ties have no order."""
    words = train_words([LINES], 7)
    assert [words.pieces([i])[0] for i in range(words.size)] == ["<unk>", END, "\n", "the", "cat", "sat", "dog"]
    ids = words.encode(LINES)
    assert len(ids) == len(LINES.split()) + LINES.count("\n")
    lines = ["the cat sat", "the dog <unk> sat", "", "the cat <unk>"]
    assert words.pieces(ids) == [piece for line in lines for piece in (*line.split(), "\n")]
    assert words.decode([i for i in ids if i != 0]) == "the cat sat\nthe dog sat\n\nthe cat\n"
    assert words.specials == {"unknown": 0, "end": 1} and words.lossy_note


def test_a_minimum_count_leaves_rare_words_out():
    assert train_words([LINES], 99, minimum_count=2).size == 2 + len({"\n", "the", "cat", "sat"})
    assert train_words([LINES], 99).size == 2 + len({"\n", "the", "cat", "sat", "dog", "ran"})


def test_the_text_cannot_end_a_document():
    """Fails when the spelling of the special token in a text becomes its id."""
    for tokenizer in (train_words([f"a {END}"], 99), train_characters([END], 99), bytes_tokenizer()):
        assert tokenizer.specials["end"] not in tokenizer.encode(f"a {END} {END}\n{END}")


@pytest.mark.parametrize("text", ["naïve \u2028\x85 Ωmega\r\n\t", "", "\0 \ufeff\n\n", "🙂 <unk> </s>"])
def test_bytes_and_characters_keep_every_text(text):
    """Fails when white space, a control character or a character of several bytes is changed."""
    ids = bytes_tokenizer().encode(text)
    assert ids == list(text.encode()) and bytes_tokenizer().decode(ids) == text
    characters = train_characters([text, "abc"], 999)
    assert characters.decode(characters.encode(text)) == text and len(characters.encode(text)) == len(text)


def test_characters_are_the_most_frequent_ones():
    characters = train_characters(["aabbbc c"], 5)
    assert characters.pieces(characters.encode("abc d")) == ["a", "b", "c", "<unk>", "<unk>"]


@pytest.mark.parametrize(
    "make", [lambda t: train_words([t], 50), lambda t: train_characters([t], 50), lambda t: bytes_tokenizer()]
)
def test_parts_of_a_text_have_the_ids_of_the_whole(make, tmp_path):
    """Fails when a text may be split where its ids change, and when a saved copy or an export gives other ids."""
    from tokenizers import Tokenizer as Library

    rng = random.Random(0)
    text = "".join(rng.choice(["ab", "c", " ", "\n", "  ", "é"]) for _ in range(400))
    tokenizer = make(text)
    ids = tokenizer.encode(text)
    places = [place for place in range(1, len(text)) if tokenizer.is_split_point(text, place)]
    assert len(places) > 50
    for place in places:
        assert tokenizer.encode(text[:place]) + tokenizer.encode(text[place:]) == ids
    tokenizer.save(tmp_path / "copy")
    copy = load_tokenizer(tmp_path / "copy")
    assert copy.encode(text) == ids and copy.fingerprint == tokenizer.fingerprint
    assert copy.lossy_note == tokenizer.lossy_note
    exported = Library.from_str(published_files(tokenizer, 64)["tokenizer.json"].decode())
    assert exported.encode(text, add_special_tokens=False).ids == ids


def test_fragments_do_not_break_words():
    """Fails when a word at the border of two fragments counts as two."""
    rng = random.Random(1)
    text = " ".join("".join(rng.choices("abc", k=rng.randint(1, 9))) for _ in range(300))
    cuts = sorted(rng.sample(range(1, len(text)), 40))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    fragments = [(part, number == len(parts) - 1) for number, part in enumerate(parts)]
    found = list(whole_words([*fragments, *fragments]))
    assert [word for part in found for word in part.split()] == 2 * text.split()
    assert "".join(found) == 2 * text


def test_stores_of_lines_and_of_texts(tmp_path):
    """Fails when a store loses its line ends, or when counts of words come from a sample."""
    (tmp_path / "text.txt").write_text(LINES)
    for spec, size in (("words:6", 6), ("characters:9", 9), ("bytes", 257)):
        kind = spec.partition(":")[0]
        ended = run_here(
            "prepare", "--source", f"text:{tmp_path}/text.txt", "--tokenizer", spec, "--output", tmp_path / kind
        )
        assert ended.code == 0, ended.errors
        store = open_store(tmp_path / kind)
        tokenizer = store.tokenizer()
        assert store.vocab_size == tokenizer.size == size
        np.testing.assert_array_equal(
            store.tokens[0 : store.num_tokens], [*tokenizer.encode(LINES), tokenizer.specials["end"]]
        )
    source, words = f"lines:{tmp_path}/text.txt", ("--tokenizer", "words:9", "--minimum-count", 2)
    ended = run_here("prepare", "--source", source, *words, "--output", tmp_path / "lines")
    assert ended.code == 0 and open_store(tmp_path / "lines").documents == 2


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--tokenizer", "words:2"), "must exceed 2"),
        (("--tokenizer", "words:many"), "integer SIZE"),
        (("--tokenizer", "bytes", "--minimum-count", 2), "--minimum-count must be 1"),
    ],
)
def test_mistakes(tmp_path, flags, said):
    (tmp_path / "text.txt").write_text(LINES)
    ended = run_here("prepare", "--source", f"text:{tmp_path}/text.txt", *flags, "--output", tmp_path / "store")
    assert_one_line(ended, 2, said)


def test_blank_text_has_no_vocabulary():
    with pytest.raises(InputError, match="only blanks"):
        train_words([" \n "], 9)
