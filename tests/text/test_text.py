"""Vocabularies trained here: exact round trips, special tokens that text cannot spell, the same bytes every time."""

import json
import random
import subprocess
import sys

import pytest

from jaxlm.errors import InputError
from jaxlm.text import ROLES, load_tokenizer, tokenizer_from_spec, train_sentencepiece
from jaxlm.text.piece_models import SENTENCE_BYTES, split_sentence
from jaxlm.text.tokenizer import split_before_white_space

WORDS = "the a of sea ship captain wind night stormy dark grey-green it's naïve 42 café Ωμέγα 日本 мир".split()


def sentences(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(3, 20))).capitalize() + "." for _ in range(count)]


def random_text(rng: random.Random) -> str:
    """Text of all planes, with many blanks, breaks, controls and things that look like special tokens."""
    alphabets = [
        lambda: chr(rng.choice([rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)])),
        lambda: chr(rng.randrange(0x20, 0x7F)),
        lambda: rng.choice(
            [" ", "  ", "\n", "\n\n", "\t", "\r\n", "\0", "\u00a0", "\u3000", "\u200b", "\ufeff", "\ufffd"]
        ),
        lambda: rng.choice(WORDS),
        lambda: rng.choice(["<pad>", "<unk>", "<s>", "</s>", "<mask>", "<0x41>", "<extract>", "\u2585", "e\u0301"]),
    ]
    return "".join(rng.choice(alphabets)() for _ in range(rng.randrange(0, 60))).replace("\u2581", "")


@pytest.fixture(scope="module")
def tokenizer():
    return train_sentencepiece(sentences(400), 440)


def test_size_and_specials_are_as_asked(tokenizer):
    assert tokenizer.size == 440
    assert list(tokenizer.specials) == list(ROLES)
    assert sorted(tokenizer.specials.values()) == list(range(len(ROLES)))
    assert tokenizer.kind == "sentencepiece"


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_any_text_comes_back_exactly(model_type):
    tokenizer = train_sentencepiece(sentences(400), 340, model_type)
    rng = random.Random(1)
    texts = ["", " ", "\n", "  a  b  ", "a\n\nb\n", "\ttab", "<pad>", "\0"] + [random_text(rng) for _ in range(1500)]
    special = set(tokenizer.specials.values())
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert tokenizer.decode(ids) == text
        assert ids == tokenizer.encode(text)
        assert not special & set(ids), f"{text!r} yields a special token"
    assert tokenizer.encode("") == []
    assert tokenizer.decode([]) == ""


def test_a_corpus_full_of_special_spellings_teaches_none():
    # A piece spelt like a special token would be a second meaning of one id, or an error of the trainer.
    texts = ["<pad> <mask> </s> <s> <unk> <0x41> <extract> x"] * 300 + sentences(200)
    tokenizer = train_sentencepiece(texts, 420)
    ids = tokenizer.encode(texts[0])
    assert not set(ids) & set(tokenizer.specials.values())
    assert tokenizer.decode(ids) == texts[0]


def test_decode_leaves_special_tokens_out(tokenizer):
    ids = tokenizer.encode("the sea")
    specials = tokenizer.specials
    framed = [specials["start"], *ids[:1], specials["mask"], *ids[1:], specials["end"], specials["pad"]]
    assert tokenizer.decode(framed) == "the sea"
    assert tokenizer.pieces(framed)[0] == "<s>"
    with pytest.raises(ValueError, match="of 440, got 440"):
        tokenizer.decode([440])


def test_added_specials_are_new_rows(tokenizer, tmp_path):
    assert tokenizer.with_specials(["pad", "extract"]) is tokenizer
    with pytest.raises(ValueError, match="role of a special token must be one of"):
        tokenizer.with_specials(["pda"])


def test_training_is_a_function_of_the_text(tokenizer):
    again = train_sentencepiece(iter(sentences(400)), 440)
    assert again.files == tokenizer.files and again.fingerprint == tokenizer.fingerprint
    assert train_sentencepiece(sentences(400, seed=1), 440).fingerprint != tokenizer.fingerprint
    program = (
        "import os, sys; sys.path[:0] = ['tests/text', 'tests/fixtures'];"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
        "from test_text import *; print(train_sentencepiece(sentences(400), 440).fingerprint)"
    )
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert other.stdout.split()[-1] == tokenizer.fingerprint, "another process on one core trains other bytes"


def test_long_lines_are_split_and_nothing_is_lost():
    word = "x" * 50
    blanks, solid, wide = " ".join([word] * 400), "y" * 10_000, "日" * 5_000
    for text in (blanks, solid, wide):
        parts = list(split_sentence(text))
        assert "".join(parts) == text and max(len(part.encode()) for part in parts) <= SENTENCE_BYTES
    assert list(split_sentence("a\r\nb\0c\n\n  \n")) == ["a", "b", "c"]
    # A word that occurs in long lines only is learnt; the library alone would drop those lines.
    tokenizer = train_sentencepiece([" ".join(["zebra"] * 2000)] * 3 + sentences(200), 420)
    assert len(tokenizer.encode(" zebra")) == 1


def test_cutting_before_white_space_changes_no_id(tokenizer):
    assert tokenizer.can_split
    rng = random.Random(2)
    for _ in range(300):
        text = "".join(random_text(rng) for _ in range(5))
        limit = rng.randrange(1, 60)
        place = tokenizer.split_point(text, limit)
        assert 0 <= place <= limit
        if place:
            assert tokenizer.encode(text[:place]) + tokenizer.encode(text[place:]) == tokenizer.encode(text)


def test_the_cut_is_the_last_one_within_the_limit():
    assert split_before_white_space("ab cd ef", 5) == 5
    assert split_before_white_space("ab cd ef", 4) == 2
    assert split_before_white_space("ab   cd", 4) == 2
    assert split_before_white_space(" abcd", 5) == 0
    assert split_before_white_space("ab\n cd", 5) == 2
    assert split_before_white_space("", 5) == split_before_white_space("abc", 5) == 0


def test_save_and_load(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "t")
    loaded = load_tokenizer(tmp_path / "t")
    assert loaded.fingerprint == tokenizer.fingerprint and loaded.specials == tokenizer.specials
    assert loaded.encode("the wind") == tokenizer.encode("the wind")
    assert tokenizer_from_spec(f"sentencepiece:{tmp_path}/t/sentencepiece.model").fingerprint == tokenizer.fingerprint


def test_a_damaged_tokenizer_is_refused(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    description = tmp_path / "tokenizer_description.json"
    whole = description.read_text()
    fields = json.loads(whole)
    description.write_text(json.dumps({**fields, "specials": {**fields["specials"], "pad": 5}}))
    with pytest.raises(InputError, match="do not match their fingerprint"):
        load_tokenizer(tmp_path)
    description.write_text(whole[:50])
    with pytest.raises(InputError, match="tokenizer_description.json is damaged"):
        load_tokenizer(tmp_path)
    description.write_text(whole)
    model = tmp_path / "sentencepiece.model"
    content = bytearray(model.read_bytes())
    content[len(content) // 2] ^= 1
    model.write_bytes(content)
    with pytest.raises(InputError):
        load_tokenizer(tmp_path)
    model.unlink()
    with pytest.raises(InputError, match="sentencepiece.model"):
        load_tokenizer(tmp_path)


def test_what_cannot_be_trained_says_what_could_be():
    with pytest.raises(InputError, match=r"must exceed.*ask for"):
        train_sentencepiece(sentences(10), 100)
    with pytest.raises(InputError, match="no text"):
        train_sentencepiece(["", " \n\t "], 400)
    with pytest.raises(InputError, match=r"must be at most \d+, got 5000") as caught:
        train_sentencepiece(sentences(200), 5000)
    largest = int(str(caught.value).split("at most ")[1].split(",")[0])
    assert train_sentencepiece(sentences(200), largest).size == largest


def test_a_small_vocabulary_over_a_large_script_still_has_words():
    rng = random.Random(3)
    rare = ["".join(chr(rng.randrange(0x4E00, 0x9FA0)) for _ in range(30)) for _ in range(100)]
    for size in (290, 320, 400, 800):  # whatever is asked, up to the largest, is reached
        tokenizer = train_sentencepiece(rare + ["the sea the wind"] * 500, size)
    assert tokenizer.size == 800 and len(tokenizer.encode("the sea")) < len("the sea")
    assert tokenizer.decode(tokenizer.encode(rare[0])) == rare[0]


@pytest.mark.parametrize("spec", ["", "gpt2:", "word2vec:x"])
def test_unknown_specs_name_the_known_ones(spec):
    with pytest.raises(InputError, match="sentencepiece:FILE"):
        tokenizer_from_spec(spec)


def test_a_spec_without_its_place_is_told_what_is_missing():
    with pytest.raises(InputError, match="must have a colon and a place or a size, got 'gpt2'; give gpt2:DIR, or hf:"):
        tokenizer_from_spec("gpt2")


@pytest.mark.parametrize("kind", ["sentencepiece", "wordpiece", "gpt1", "gpt2", "hf", "store"])
def test_missing_files_are_named(kind, tmp_path):
    with pytest.raises(InputError, match="nothing-here"):
        tokenizer_from_spec(f"{kind}:{tmp_path}/nothing-here")


@pytest.mark.parametrize("kind, name", [("sentencepiece", "m"), ("wordpiece", "m"), ("hf", "tokenizer.json")])
def test_files_of_another_kind_are_refused(kind, name, tmp_path):
    (tmp_path / name).write_text("not what it should be\n")
    with pytest.raises(InputError, match=name):
        tokenizer_from_spec(f"{kind}:{tmp_path / name}")
