"""Spellings of the words without an id in stores, against a scan of the text by a regular expression.

Fails when a word is lost, has the spelling of another one or depends on how the text was divided, and when damage in
the arrays is read without a word.
"""

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from toy_store import contents, write_store

from jaxlm.data import arrays
from jaxlm.data.arrays import CHECKSUMS, DamagedStore, chunk_checksums
from jaxlm.data.preparation import PrepareConfig, prepare
from jaxlm.data.store import description_fingerprint, open_store
from jaxlm.data.writer import StoreWriter, store_of_text
from jaxlm.errors import InputError
from jaxlm.text import bytes_tokenizer, load_tokenizer, train_characters, train_words
from jaxlm.text.event_tokenizer import events_tokenizer
from jaxlm.text.tokenizer import BackwardTokenizer
from jaxlm.views.data import document_lines, store_lines

WORDS = ["the", "cat", "né", "<unk>", "🙂.", "sat", "x" * 700, "a\u00a0b", "…", "Ωmega"]
ARRAYS = ("unknown_places", "unknown_words", "spellings", "spelling_starts")


def texts(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    words = [*WORDS, *(f"w{k}" for k in range(60))]
    sentence = lambda: " ".join(rng.choices(words, k=rng.randint(1, 12)))  # noqa: E731
    return ["\n".join(sentence() for _ in range(rng.randint(1, 9))) for _ in range(count)]


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("\n\n".join(texts(60)), encoding="utf-8")
    Path("b.txt").write_text("\n\n".join(texts(30, seed=1)), encoding="utf-8")
    source = ("lines:a.txt", "text:b.txt")
    return PrepareConfig(source=source, tokenizer="words:30", output="store", workers=1, unit_bytes=700)


@pytest.fixture
def store(tmp_path):
    return write_store(tmp_path / "store", texts(40), train_words(texts(40), 30))


def test_every_word_has_its_spelling(tmp_path):
    """Fails when a word without an id is not that of the text, or its number does not count first appearances."""
    documents, sizes = texts(50), (6, 30)
    for size in sizes:
        store = write_store(
            tmp_path / str(size), {"a": documents[:20], "b": documents[20:]}, train_words(documents, size)
        )
        known = store.tokenizer().pieces(range(size))
        words = [word for text in documents for word in (*re.findall(r"\n|\S+", text), known[store.end])]
        ids = store.word_ids(0, store.num_tokens)
        spelt = store.spellings(0, store.num_types)
        assert [spelt[i] for i in ids] == words and spelt[:size] == known
        unknown = [word for word in words if word not in known[1:]]
        assert spelt[size:] == list(dict.fromkeys(unknown)) and "<unk>" in unknown and len(unknown) > 100
        np.testing.assert_array_equal(np.where(ids >= size, 0, ids), store.tokens[:])
        assert ids.dtype == np.int32 and [store.spelling(i) for i in (1, size)] == [known[1], unknown[0]]
        rng = random.Random(size)
        for _ in range(200):
            first, end = sorted(rng.choices(range(store.num_tokens + 1), k=2))
            np.testing.assert_array_equal(store.word_ids(first, end), ids[first:end])
            places = np.random.default_rng(first).integers(store.num_tokens, size=(3, 7))
            np.testing.assert_array_equal(store.word_ids_at(places), ids[places], strict=True)
        store.verify()
    assert f"{store.num_types - size:,} words without an id" in "\n".join(store_lines(store, 1))


def test_a_document_is_written_back_with_every_word(tmp_path):
    """The reference is the text, whose white space within a line is blanks. Fails when a word without an id is lost, is
    `<unk>`, or has another one's place.
    """
    documents = [text.replace("\u00a0", " ") for text in texts(5)]
    forward = train_words(documents, 8)
    for name, tokenizer in (("forward", forward), ("backward", BackwardTokenizer(forward))):
        store = write_store(tmp_path / name, documents, tokenizer)
        for number, text in enumerate(documents):
            assert "\n".join(document_lines(store, number, None)) == text
            next(document_lines(store, number, tmp_path / "out.txt"))
            assert (tmp_path / "out.txt").read_text(encoding="utf-8") == text
        assert documents[0].split("\n")[0] in "\n".join(store_lines(store, 5))


def test_workers_units_and_kills_do_not_matter(corpus, monkeypatch):
    """Fails when numbers depend on the worker or on the part, or when what a killed process wrote is read again."""
    whole = contents(prepare(corpus).path)
    again = contents(prepare(replace(corpus, output="again", workers=3, unit_bytes=250)).path)
    assert {name: again[f"{name}.bin"] for name in (*ARRAYS, "tokens")} == {
        name: whole[f"{name}.bin"] for name in (*ARRAYS, "tokens")
    }
    assert again == whole
    commit = StoreWriter.commit

    class Killed(Exception):
        pass

    def commit_and_die(writer):
        commit(writer)
        for file in writer._files.values():  # what a later part had written
            file.write(b"torn")
            file.sync()
        raise Killed

    monkeypatch.setattr(StoreWriter, "commit", commit_and_die)
    deaths = 0
    while True:
        try:
            store = prepare(replace(corpus, output="killed"))
            break
        except Killed:
            deaths += 1
    assert deaths > 10 and contents(store.path) == whole


def test_only_stores_of_words_keep_spellings(tmp_path):
    """Fails when stores of other vocabularies get arrays, and so another fingerprint, or backward words lose theirs."""
    documents = texts(20)
    words = train_words(documents, 20)
    words.save(tmp_path / "words")
    assert words.unknown_word == load_tokenizer(tmp_path / "words").unknown_word == 0
    others = (train_characters(documents, 20), bytes_tokenizer(), events_tokenizer("performance"))
    assert all(other.unknown_word is None for other in others)
    for number, other in enumerate(others[:2]):
        plain = write_store(tmp_path / str(number), documents, other)
        assert plain.num_types is None and not {"unknown", *ARRAYS} & {*plain.description, *plain.description["arrays"]}
        np.testing.assert_array_equal(plain.word_ids(3, 9), plain.tokens[3:9])
    backward = write_store(tmp_path / "backward", documents, BackwardTokenizer(words))
    spelt = backward.spellings(0, backward.num_types)
    first = [spelt[i] for i in backward.word_ids(0, int(backward.document_starts[1]) - 1)]
    assert first[::-1] == re.findall(r"\n|\S+", documents[0])


def test_a_text_that_is_evaluated_keeps_them_too(tmp_path):
    (tmp_path / "text.txt").write_text("the zebra the", encoding="utf-8")
    with store_of_text(tmp_path / "text.txt", train_words(["the the"], 3)) as store:
        assert [store.spelling(i) for i in store.word_ids(0, 3)] == ["the", "zebra", "the"]


def test_a_window_reads_its_own_tokens_alone(store, monkeypatch):
    """Fails when a window reads chunks of tokens that it does not have."""
    monkeypatch.setattr(arrays, "CHUNK", 64)
    (store.path / CHECKSUMS).write_bytes(chunk_checksums(store.path, store.description))
    read, pread = [], arrays.os.pread
    opened = open_store(store.path)
    opened.word_ids(0, 1)
    monkeypatch.setattr(arrays.os, "pread", lambda *args: read.append(args[1:]) or pread(*args))
    opened.word_ids(320, 340)
    assert (64, 640) in read and len(read) <= 2 + 2  # of tokens, and of the numbers of words


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("name", ARRAYS)
def test_damage_is_one_line(store, name, old):
    if old:
        (store.path / CHECKSUMS).unlink()
    path = store.path / f"{name}.bin"
    content = bytearray(path.read_bytes())
    content[-3] ^= 16
    path.write_bytes(content)
    with pytest.raises(DamagedStore, match=rf"{name}\.bin is damaged") as raised:
        damaged = open_store(store.path)
        damaged.word_ids(0, damaged.num_tokens)
        damaged.spellings(0, damaged.num_types)
    assert "\n" not in str(raised.value)
    with pytest.raises(DamagedStore, match=rf"{name}\.bin is damaged"):
        open_store(store.path).verify()
    path.unlink()
    with pytest.raises(InputError, match=rf"{name}\.bin is missing"):
        open_store(store.path)


LIES = {
    "a place of another store": ("unknown_places", "<i8", 10**9, r"unknown_places\.bin must have values from 0 to"),
    "an order": ("unknown_places", "<i8", 0, r"unknown_places\.bin must be ascending"),
    "a word": ("unknown_words", "<i4", 10**6, r"unknown_words\.bin must have values from 0 to"),
    "an end": ("spelling_starts", "<i8", 10**6, r"spelling_starts\.bin must have values from 0 to"),
    "a byte": ("spellings", "u1", 255, r"spellings\.bin must be UTF-8"),
}


@pytest.mark.parametrize(("name", "dtype", "value", "said"), LIES.values(), ids=LIES)
def test_values_that_no_text_has_are_one_line(store, name, dtype, value, said):
    """Fails if an array whose checksums are right ends in a traceback or is read as another text."""
    values = np.fromfile(store.path / f"{name}.bin", dtype)
    values[7] = value
    values.tofile(store.path / f"{name}.bin")
    description = json.loads((store.path / "description.json").read_text())
    description["arrays"][name]["sha256"] = arrays.file_sha256(store.path / f"{name}.bin")
    description["fingerprint"] = description_fingerprint(description)
    (store.path / "description.json").write_text(json.dumps(description))
    (store.path / CHECKSUMS).write_bytes(chunk_checksums(store.path, description))
    with pytest.raises(DamagedStore, match=said):
        altered = open_store(store.path)
        altered.word_ids(0, altered.num_tokens)
        altered.spellings(0, altered.num_types)


def test_a_description_that_lies_is_one_line(store):
    path = store.path / "description.json"
    description = json.loads(path.read_text())
    description["unknown"]["words"] += 1
    description["fingerprint"] = description_fingerprint(description)
    path.write_text(json.dumps(description))
    with pytest.raises(InputError, match=r"spelling_starts is <i8 .*; delete it and prepare it again"):
        open_store(store.path)


def test_what_an_earlier_version_began_is_refused(tmp_path):
    """Fails when the parts of a version that kept no spelling become a store whose first words have none."""
    tokenizer = train_words(texts(20), 20)
    writer = StoreWriter(tmp_path / "store.partial", tokenizer)
    writer.begin_section("a", None)
    writer.state.pop("unknown")
    writer.append(np.array([2, 3]), np.array([2]), 5, 2, None, 5)
    writer.commit()
    with pytest.raises(InputError, match="begun by another version of jaxlm, without spellings; delete it"):
        StoreWriter(tmp_path / "store.partial", tokenizer)
