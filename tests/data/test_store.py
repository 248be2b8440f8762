"""The token store: what is written is read, what was altered is refused, what is unfinished is not a store."""

import json
import math
import shutil

import numpy as np
import pytest
from toy_store import write_store

from jaxlm.data.store import DESCRIPTION, open_store, partial_path, token_dtype
from jaxlm.data.writer import StoreWriter
from jaxlm.errors import InputError
from jaxlm.text import train_sentencepiece
from jaxlm.training.validation import text_sizes

PARTS = {
    "sea": ["The sea was calm.", "A ship\n\nsailed  by, slowly."],
    "wind": ["The wind rose over the sea."] * 3,
}


@pytest.fixture(scope="module")
def tokenizer():
    return train_sentencepiece(["the sea and the wind rose over the calm ship " * 3] * 30, 290)


@pytest.fixture
def store(tokenizer, tmp_path):
    return write_store(tmp_path / "store", PARTS, tokenizer, weights=[3.0, 1.0])


def test_what_is_written_is_read(store, tokenizer):
    texts = [text for part in PARTS.values() for text in part]
    assert store.documents == 5 and store.vocab_size == 290
    assert store.tokens.dtype == np.uint16 and store.tokens.shape == (store.num_tokens,)
    assert store.document_starts[0] == 0 and store.document_starts[-1] == store.num_tokens
    end = tokenizer.specials["end"]
    for k, text in enumerate(texts):
        ids = store.tokens[store.document_starts[k] : store.document_starts[k + 1]]
        assert ids[-1] == end and store.tokenizer().decode(ids) == text
    assert store.bytes == sum(len(text.encode()) for text in texts)
    assert store.words == sum(len(text.split()) for text in texts)
    assert store.characters == sum(map(len, texts))
    assert store.tokenizer_fingerprint == store.tokenizer().fingerprint == tokenizer.fingerprint
    assert not isinstance(store.tokens, np.ndarray) or isinstance(store.tokens, np.memmap)
    store.verify()


def test_sections_are_the_sources(store):
    first, second = store.sections
    assert (first.source, first.weight, first.documents) == ("sea", 3.0, 2)
    assert (second.source, second.weight, second.documents) == ("wind", 1.0, 3)
    assert (first.first_document, first.first_token) == (0, 0)
    assert (second.first_document, second.first_token) == (2, first.tokens)
    assert first.tokens + second.tokens == store.num_tokens and first.bytes + second.bytes == store.bytes


def test_unigram_entropy_is_that_of_the_tokens(store):
    _, counts = np.unique(store.tokens, return_counts=True)
    expected = -sum(c / counts.sum() * math.log(c / counts.sum()) for c in counts)
    assert store.unigram_entropy() == pytest.approx(expected, rel=1e-12)
    assert np.array_equal(store.token_counts, np.bincount(store.tokens, minlength=290))


def test_large_vocabularies_take_four_bytes():
    assert token_dtype(65_536) == np.uint16 and token_dtype(65_537) == np.uint32


def test_the_fingerprint_covers_contents(store, tokenizer, tmp_path):
    same = write_store(tmp_path / "same", PARTS, tokenizer, weights=[3.0, 1.0])
    other = write_store(
        tmp_path / "other", {**PARTS, "wind": ["The wind rose over the se."] * 3}, tokenizer, [3.0, 1.0]
    )
    assert same.fingerprint == store.fingerprint != other.fingerprint
    assert open_store(store.path).fingerprint == store.fingerprint


def test_damage_is_found(store):
    tokens = store.path / "tokens.bin"
    content = bytearray(tokens.read_bytes())
    content[7] ^= 1
    tokens.write_bytes(content)
    damaged = open_store(store.path)  # sizes fit, contents are read on request only
    with pytest.raises(InputError, match=r"tokens\.bin is damaged"):
        damaged.verify()
    tokens.write_bytes(content[:-2])
    with pytest.raises(InputError, match=r"tokens\.bin has \d+ bytes, but description\.json says"):
        open_store(store.path)
    tokens.unlink()
    with pytest.raises(InputError, match=r"tokens\.bin is missing"):
        open_store(store.path)


def test_an_altered_description_is_found(store):
    path = store.path / DESCRIPTION
    whole = path.read_text()
    path.write_text(whole.replace('"documents": 5', '"documents": 6', 1))
    with pytest.raises(InputError, match="does not match its fingerprint"):
        open_store(store.path)
    path.write_text(whole[:100])
    with pytest.raises(InputError, match="damaged or not a token store"):
        open_store(store.path)
    path.write_text(json.dumps({**json.loads(whole), "version": 99}))
    with pytest.raises(InputError, match="must be a store of version 1, got 99; use a newer version of jaxlm"):
        open_store(store.path)
    path.write_text('{"model_type": "gpt2"}')
    with pytest.raises(InputError, match="not a token store"):
        open_store(store.path)


def test_an_exchanged_tokenizer_is_found(store):
    shutil.rmtree(store.path / "tokenizer")
    train_sentencepiece(["quite another text about quite other things"] * 20, 290).save(store.path / "tokenizer")
    with pytest.raises(InputError, match="not the tokenizer that made this store"):
        store.tokenizer()


def test_what_is_not_a_store_says_so(tokenizer, tmp_path):
    with pytest.raises(InputError, match="no such token store; make one with python -m jaxlm.prepare"):
        open_store(tmp_path / "nothing")
    StoreWriter(partial_path(tmp_path / "half"), tokenizer)
    with pytest.raises(InputError, match="not finished; run the same jaxlm.prepare command again"):
        open_store(tmp_path / "half")


def test_a_writer_goes_on_after_its_last_commit(tokenizer, tmp_path, store):
    """What was appended and not committed, torn or whole, is cut off, and the store comes out the same."""
    directory = tmp_path / "again.partial"
    end = [tokenizer.specials["end"]]

    def append(writer, text):
        ids = tokenizer.encode(text) + end
        sizes = len(text.encode()), len(text.split())
        writer.append(np.array(ids), np.array([len(ids)]), *sizes, characters=len(text))

    done = 0
    for attempt in range(20):
        writer = StoreWriter(directory, tokenizer)
        assert writer.parts == done
        todo = [
            (source, weight, text)
            for (source, texts), weight in zip(PARTS.items(), [3.0, 1.0], strict=True)
            for text in texts
        ]
        if done == len(todo):
            break
        source, weight, text = todo[done]
        if not writer.state["sections"] or writer.state["sections"][-1]["source"] != source:
            writer.begin_section(source, weight)
        append(writer, text)
        if attempt % 2:
            writer.commit()
            done += 1
            append(writer, "lost")  # a process dies here
        for file in writer._files.values():
            file.sync()
    writer.finish(tmp_path / "again", arguments={}, inputs=[])
    assert open_store(tmp_path / "again").fingerprint == store.fingerprint
    assert not directory.exists()


@pytest.mark.parametrize("name", ["store/tokens.bin", "store/document_starts.bin", "counts-1.bin", "writer.json"])
def test_a_writer_refuses_what_was_altered_since_its_last_commit(tokenizer, tmp_path, name):
    """Fails when a resumed preparation makes a store, with right checksums, of what a disk or a hand has altered."""
    directory = tmp_path / "store.partial"
    writer = StoreWriter(directory, tokenizer)
    writer.begin_section("sea", None)
    for text in ("the sea", "the wind"):
        ids = tokenizer.encode(text)
        writer.append(np.array(ids), np.array([len(ids)]), len(text), 2, None, len(text))
    writer.commit()
    assert StoreWriter(directory, tokenizer).parts == 1
    content = bytearray((directory / name).read_bytes())
    content[-1 if name == "counts-1.bin" else len(content) // 2] ^= 1
    (directory / name).write_bytes(content)
    with pytest.raises(InputError, match=f"{name.rpartition('/')[2]}.*delete {directory} and prepare again") as refused:
        StoreWriter(directory, tokenizer)
    assert "\n" not in str(refused.value)


def test_characters_are_code_points(tokenizer, tmp_path):
    """Fails when bytes or tokens are counted as characters."""
    store = write_store(tmp_path / "accents", {"x": ["né à", "ü"]}, tokenizer)
    assert (store.characters, store.bytes) == (5, 8)


def test_characters_that_were_not_counted_are_not_made_up(tokenizer, tmp_path):
    """Fails when the count of a part is given as that of a store with parts of an earlier version, which have none."""
    writer = StoreWriter(tmp_path / "store.partial", tokenizer)
    writer.begin_section("sea", None)
    for characters in (3, None, 3):
        writer.append(
            np.array(tokenizer.encode("sea")), np.array([len(tokenizer.encode("sea"))]), 3, 1, None, characters
        )
    writer.finish(tmp_path / "store", arguments={}, inputs=[])
    store = open_store(tmp_path / "store")
    assert store.characters is None and "characters" not in store.description
    assert text_sizes([store]) == {"words": 3, "bytes": 9, "characters": None}
