"""Sentences found at preparation: the ids stay what they are, borders are where they belong, bytes are the same."""

import dataclasses
import json
import random
from pathlib import Path

import numpy as np
import pytest
from toy_store import contents, write_store

from jaxlm.data import sentences as sentences_module
from jaxlm.data.preparation import PrepareConfig, prepare
from jaxlm.data.sentences import line_ends, paragraphs, resolved, sentence_ends, sentences_of
from jaxlm.data.shards import blocks, encode_documents
from jaxlm.data.store import open_store
from jaxlm.data.writer import StoreWriter
from jaxlm.errors import InputError
from jaxlm.text import train_sentencepiece, train_wordpiece

WORDS = "the a of sea ship captain wind night stormy dark grey-green it's naïve 42 café and rose upon over".split()
ENDS = [".", ".", ".", "?", "!", '..."', '."', ".)", "。", " . . .", ".\u201d"]
GAPS = [" ", " ", " ", "  ", "\n", "\n\n", "\r\n", "\n \n", "", "\t", "\u00a0"]


def random_text(rng: random.Random, sentences: int) -> str:
    parts = []
    for _ in range(sentences):
        parts.append(" ".join(rng.choices(WORDS, k=rng.randint(1, 12))).capitalize() + rng.choice(ENDS))
        parts.append(rng.choice(GAPS))
    return "".join(parts)


def cut_anyhow(text: str, rng: random.Random, most: int):
    """The same document in other fragments."""
    parts = []
    while text:
        size = rng.randint(1, most)
        parts.append(text[:size])
        text = text[size:]
    return iter([(part, k == len(parts) - 1) for k, part in enumerate(parts)])


@pytest.fixture(scope="module")
def texts():
    rng = random.Random(0)
    return [random_text(rng, rng.randint(1, 60)) for _ in range(60)]


@pytest.fixture(scope="module")
def wordpiece(texts):
    return train_wordpiece(texts, 100)


@pytest.fixture(scope="module")
def bpe(texts):
    return train_sentencepiece(texts, 360)


@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
@pytest.mark.parametrize("borders", [sentence_ends("en"), line_ends])
def test_ids_are_the_same_and_nothing_is_lost(texts, kind, borders, request):
    tokenizer = request.getfixturevalue(kind)
    for text in texts:
        found = list(sentences_of(iter([(text, True)]), tokenizer, borders))
        assert "".join(sentence for sentence, _ in found) == text
        assert [last for _, last in found] == [False] * (len(found) - 1) + [True]
        ids = [i for part in tokenizer.encode_batch([sentence for sentence, _ in found]) for i in part]
        assert ids == tokenizer.encode(text)


def test_fragments_do_not_matter(texts, wordpiece, monkeypatch):
    """A document is the same sentences however it comes from the disk, long paragraphs too."""
    rng = random.Random(1)
    for most in (3, 50, 4000):
        for limit in (1 << 16, 100):
            monkeypatch.setattr(sentences_module, "PARAGRAPH", limit)
            for text in texts[:20]:
                whole = list(sentences_of(iter([(text, True)]), wordpiece, sentence_ends("en")))
                assert list(sentences_of(cut_anyhow(text, rng, most), wordpiece, sentence_ends("en"))) == whole
                assert "".join(part for part, _ in paragraphs(cut_anyhow(text, rng, most))) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("He came home. She left.", ["He came home.", " She left."]),
        ("Mr. Smith paid Dr. Watson $3.50 a day. He left.", ["Mr. Smith paid Dr. Watson $3.50 a day.", " He left."]),
        ('"Is it?" asked he. "It is!"', ['"Is it?" asked he.', ' "It is!"']),
        ("One line\nof two lines.\n\nA new paragraph", ["One line\nof two lines.", "\n\nA new paragraph"]),
        ("Heading\n\n\n  The text begins. It ends.\n", ["Heading", "\n\n\n  The text begins.", " It ends.", "\n"]),
        ("你好。再见！", ["你好。", "再见！"]),
        ("no end", ["no end"]),
        ("", [""]),
    ],
)
def test_sentences_of_english(text, expected, wordpiece):
    assert [part for part, _ in sentences_of(iter([(text, True)]), wordpiece, sentence_ends("en"))] == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one. two\nthree\n", ["one. two", "\nthree", "\n"]),
        ("one\r\n  \r\ntwo", ["one", "\r\n  \r\ntwo"]),
        ("one\n\n\ntwo", ["one", "\n\n\ntwo"]),
    ],
)
def test_lines_are_sentences(text, expected, wordpiece):
    assert [part for part, _ in sentences_of(iter([(text, True)]), wordpiece, line_ends)] == expected


def test_a_border_that_would_change_ids_is_left_out(bpe, wordpiece):
    """A BPE piece may reach over a full stop without a blank; for WordPiece it is a word of its own."""
    text = "The sea.The wind."
    assert len(list(sentences_of(iter([(text, True)]), bpe, lambda _: [8, 17]))) == 1
    assert len(list(sentences_of(iter([(text, True)]), wordpiece, lambda _: [8, 17]))) == 2
    accent = "The sea.\u0301 The wind."
    assert [part for part, _ in sentences_of(iter([(accent, True)]), wordpiece, lambda _: [8])] == [accent]


def test_long_paragraphs_keep_their_white_space():
    """sentencex leaves out the white space that ends a paragraph of more than ten thousand characters."""
    paragraph = "The wind rose over the sea. " * 600 + "\n\n"
    ends = sentence_ends("en")(paragraph)
    assert len(ends) == 600 and all(paragraph[end - 1] == "." for end in ends)


@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
def test_a_store_has_a_border_for_each_sentence(texts, kind, request, tmp_path):
    tokenizer = request.getfixturevalue(kind)
    store = write_store(tmp_path / "with", texts, tokenizer, sentences="split")
    plain = write_store(tmp_path / "without", texts, tokenizer)
    np.testing.assert_array_equal(store.tokens, plain.tokens)
    np.testing.assert_array_equal(store.document_starts, plain.document_starts)
    assert (
        (store.words, store.bytes)
        == (plain.words, plain.bytes)
        == (
            sum(len(text.split()) for text in texts),
            sum(len(text.encode()) for text in texts),
        )
    )
    assert plain.sentence_starts is None and plain.sentences is None
    starts = np.asarray(store.sentence_starts)
    assert len(starts) == store.sentences + 1 and starts[0] == 0 and starts[-1] == store.num_tokens
    assert (np.diff(starts) > 0).all(), "a sentence without a token"
    assert set(np.asarray(store.document_starts).tolist()) <= set(starts.tolist())
    expected = []
    for text in texts:
        for sentence, last in sentences_of(iter([(text, True)]), tokenizer, sentence_ends("en")):
            ids = tokenizer.encode(sentence) + ([tokenizer.specials["end"]] if last and kind == "bpe" else [])
            expected += [len(ids)] if ids else []
    np.testing.assert_array_equal(np.diff(starts), expected)
    store.verify()


def test_batches_of_encoding_change_nothing(texts, wordpiece, monkeypatch):
    def everything(batch, block):
        monkeypatch.setattr("jaxlm.data.shards.BATCH", batch)
        monkeypatch.setattr("jaxlm.data.shards.BLOCK", block)
        fragments = ((text, True) for text in texts)
        parts = list(encode_documents(blocks(fragments, wordpiece, sentence_ends("en")), wordpiece))
        joined = [np.concatenate([getattr(part, name) for part in parts]) for name in ("ids", "lengths", "sentences")]
        return [*joined, sum(part.words for part in parts)]

    whole = everything(1 << 20, 1 << 20)
    for batch, block in ((1, 30), (50, 500), (1000, 20)):
        for one, other in zip(everything(batch, block), whole, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = random.Random(5)
    Path("books").mkdir()
    for k in range(5):
        Path(f"books/{k}.txt").write_text(random_text(rng, 100 + 80 * k), encoding="utf-8")
    rows = "".join(json.dumps({"text": random_text(rng, rng.randint(1, 9))}) + "\n" for _ in range(80))
    Path("rows.jsonl").write_text(rows, encoding="utf-8")
    return PrepareConfig(
        source=("text:books/*.txt", "jsonl:rows.jsonl"),
        tokenizer="train-wordpiece:100",
        output="store",
        workers=1,
        unit_bytes=4000,
    )


def test_prepare_keeps_the_same_sentences_for_any_workers_and_units(corpus, capsys):
    store = prepare(corpus)
    assert f"{store.sentences:,} sentences" in capsys.readouterr().out
    assert store.tokenizer().kind == "wordpiece" and store.tokenizer().size == 100
    assert 1_000 < store.sentences < 2_200
    whole = contents(Path("store"))
    for workers, unit_bytes in ((2, 4000), (3, 700), (1, 1 << 22)):
        output = f"store-{workers}-{unit_bytes}"
        prepare(dataclasses.replace(corpus, output=output, workers=workers, unit_bytes=unit_bytes))
        assert contents(Path(output)) == whole, (workers, unit_bytes)
    assert prepare(corpus).fingerprint == store.fingerprint
    assert "complete already" in capsys.readouterr().out


def test_sentences_do_not_change_documents(corpus):
    by = {
        choice: prepare(dataclasses.replace(corpus, sentences=choice, output=choice))
        for choice in ("auto", "split", "lines", "none")
    }
    for store in by.values():
        np.testing.assert_array_equal(store.tokens, by["none"].tokens)
        np.testing.assert_array_equal(store.document_starts, by["none"].document_starts)
    assert by["none"].sentences is None and by["auto"].sentences == by["split"].sentences != by["lines"].sentences
    np.testing.assert_array_equal(by["auto"].sentence_starts, by["split"].sentence_starts)
    with pytest.raises(InputError, match="was made with --sentences lines, not split"):
        prepare(dataclasses.replace(corpus, sentences="split", output="lines"))
    with pytest.raises(InputError, match="was made with --language en, not de"):
        prepare(dataclasses.replace(corpus, language="de", output="auto"))
    cased = prepare(dataclasses.replace(corpus, wordpiece_case="cased", output="cased"))
    assert cased.tokenizer_fingerprint != by["auto"].tokenizer_fingerprint
    assert not cased.tokenizer().lower_case


def test_a_store_made_before_there_were_sentences_is_complete(corpus):
    """Its description says nothing of them; the same command must not refuse it."""
    from jaxlm.data.store import DESCRIPTION, description_fingerprint

    corpus = dataclasses.replace(corpus, tokenizer="train-sentencepiece:360")
    prepare(corpus)
    path = Path("store") / DESCRIPTION
    description = json.loads(path.read_text())
    for name in ("sentences", "language", "wordpiece_case"):
        del description["arguments"][name]
    description["fingerprint"] = description_fingerprint(description)
    path.write_text(json.dumps(description))
    assert prepare(corpus).sentences is None


def test_a_preparation_goes_on_where_it_stopped(corpus, monkeypatch):
    """Cut off after each of its parts in turn, what is not committed torn: the bytes come out the same."""
    prepare(dataclasses.replace(corpus, output="whole"))
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
    for _ in range(100):
        try:
            prepare(corpus)
            break
        except Killed:
            continue
    assert contents(Path("store")) == contents(Path("whole"))


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"tokenizer": "train-wordpiece:many"}, "must have an integer SIZE, for example train-wordpiece:16000"),
        ({"tokenizer": "train-wordpiece:6"}, "a WordPiece vocabulary must exceed .*, got 6"),
        ({"tokenizer": "train-wordpiece:50000"}, r"must be at most \d+, got 50000"),
        (
            {"tokenizer": "train-sentencepiece:360", "sentencepiece_model": "unigram", "sentences": "split"},
            "--sentences must be none for a vocabulary of kind 'sentencepiece'.*, got split",
        ),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(corpus, changes, rule):
    with pytest.raises(InputError, match=rule) as caught:
        prepare(dataclasses.replace(corpus, **changes))
    assert "\n" not in str(caught.value) and not Path("store.partial").exists()


def test_auto_is_split_for_wordpiece_alone(wordpiece, bpe):
    assert resolved("auto", wordpiece) == "split" and resolved("auto", bpe) == "none"
    assert resolved("lines", bpe) == "lines" and resolved("none", wordpiece) == "none"


def test_a_damaged_border_is_found(texts, wordpiece, tmp_path):
    store = write_store(tmp_path / "s", texts, wordpiece, sentences="split")
    file = store.path / "sentence_starts.bin"
    content = bytearray(file.read_bytes())
    content[8] ^= 1
    file.write_bytes(content)
    with pytest.raises(InputError, match=r"sentence_starts\.bin is damaged"):
        open_store(store.path).verify()
    file.unlink()
    with pytest.raises(InputError, match=r"sentence_starts\.bin is missing"):
        open_store(store.path)
