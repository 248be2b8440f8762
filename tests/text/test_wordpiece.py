"""WordPiece vocabularies trained here: the same bytes every time, special tokens first, words cut where it is safe."""

import random
import subprocess
import sys

import numpy as np
import pytest
from test_text import random_text, sentences
from tokenizers import Tokenizer as Library
from tokenizers import models, normalizers, pre_tokenizers

from jaxlm.errors import InputError
from jaxlm.text import load_tokenizer, tokenizer_from_spec, train_sentencepiece, train_wordpiece, wordpiece
from jaxlm.text.wordpiece import FILE, build_wordpiece


@pytest.fixture(scope="module")
def tokenizer():
    return train_wordpiece(sentences(400), 105)


def test_special_tokens_come_first_and_the_size_is_as_asked(tokenizer):
    assert tokenizer.size == 105 and tokenizer.kind == "wordpiece" and tokenizer.lower_case
    assert tokenizer.pieces(range(5)) == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert tokenizer.specials == {"pad": 0, "unknown": 1, "cls": 2, "sep": 3, "mask": 4}
    pieces = tokenizer.pieces(range(5, 105))
    assert len(set(pieces)) == 100 and "captain" in pieces and not any("[" in piece for piece in pieces)
    assert all(piece == piece.lower() for piece in pieces)


def test_training_is_a_function_of_the_text(tokenizer):
    """The library alone numbers characters in the order of a hash table that differs between processes."""
    assert train_wordpiece(iter(sentences(400)), 105).files == tokenizer.files
    assert train_wordpiece(reversed(sentences(400)), 105).fingerprint == tokenizer.fingerprint
    assert train_wordpiece(sentences(400, seed=1)[:100], 105).fingerprint != tokenizer.fingerprint
    program = (
        "import os, sys; sys.path[:0] = ['tests/text', 'tests/fixtures'];"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
        "from test_wordpiece import *; print(train_wordpiece(sentences(400), 105).fingerprint)"
    )
    for _ in range(2):
        other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert other.stdout.split()[-1] == tokenizer.fingerprint


def test_case_is_a_choice(tokenizer, tmp_path):
    cased = train_wordpiece(sentences(400), 135, "cased")
    assert not cased.lower_case and cased.decode(cased.encode("Captain café")) == "Captain café"
    assert tokenizer.decode(tokenizer.encode("Captain café")) == "captain cafe"
    # Where no letter shows it, the choice is kept beside the vocabulary.
    small = train_wordpiece(["the sea the wind"] * 30, 24, "cased")
    assert not small.lower_case and set(small.files) == {FILE, "case.txt"}
    small.save(tmp_path / "t")
    loaded = load_tokenizer(tmp_path / "t")
    assert not loaded.lower_case and loaded.fingerprint == small.fingerprint
    assert loaded.encode("THE") == [small.specials["unknown"]]


def test_a_trained_vocabulary_reads_like_a_published_one(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "t")
    same = tokenizer_from_spec(f"wordpiece:{tmp_path}/t/{FILE}")
    assert same.fingerprint == tokenizer.fingerprint == load_tokenizer(tmp_path / "t").fingerprint
    assert same.encode("The sea") == tokenizer.encode("The sea")


def test_text_never_yields_a_special_token(tokenizer):
    rng = random.Random(1)
    forbidden = {tokenizer.specials[role] for role in ("pad", "cls", "sep", "mask")}
    for _ in range(500):
        text = random_text(rng) + rng.choice(["[MASK]", "[CLS]", "[PAD] x", "##sea"])
        assert not forbidden & set(tokenizer.encode(text))


@pytest.mark.parametrize("case", ["uncased", "cased"])
def test_cutting_changes_no_id(case, tokenizer):
    """At places that `is_split_point` allows, and at those that `split_point` finds; what combines is never cut off."""
    tokenizer = tokenizer if case == "uncased" else train_wordpiece(sentences(400), 135, "cased")
    assert tokenizer.can_split
    rng = random.Random(2)
    tried = 0
    for _ in range(600):
        text = "".join(random_text(rng) + rng.choice([".", "。", " ", "\u0301", '!"', "", " ”"]) for _ in range(4))
        ids = tokenizer.encode(text)
        places = [place for place in range(len(text) + 1) if tokenizer.is_split_point(text, place)]
        places += [place] if (place := tokenizer.split_point(text, len(text) // 2)) else []
        for place in rng.sample(places, min(8, len(places))):
            tried += 1
            assert tokenizer.encode(text[:place]) + tokenizer.encode(text[place:]) == ids, (text, place)
    assert tried > 2_000


@pytest.mark.parametrize("lower_case", [True, False])
def test_words_that_are_kept_change_no_id(tokenizer, lower_case, monkeypatch):
    """The reference is the library on whole texts. Fails if words end where BERT's do not, or old ids are mixed up."""
    monkeypatch.setattr(wordpiece, "KEPT_CHARACTERS", 400)
    ours = build_wordpiece(tokenizer.files[FILE], lower_case=lower_case)
    pieces = {piece: k for k, piece in enumerate(tokenizer.files[FILE].decode().split())}
    library = Library(models.WordPiece(pieces, unk_token="[UNK]", max_input_chars_per_word=200))
    library.normalizer = normalizers.BertNormalizer(lowercase=lower_case)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    rng = random.Random(0)
    # White space, control characters, combining marks, an ideograph, letters that change their length, and long words.
    parts = list(' \n\t\r,.;-"' * 3 + "\0\v\f\x1c\x85\xa0\xad\u0301\u0338\u3000\u200b\ufffd海İΣéK_'’—")
    parts += ["captain", "Sea ", "the", "[MASK]", "##s", "a" * 199]
    replaced = 0
    for _ in range(300):
        texts = ["".join(rng.choices(parts, k=rng.randrange(40))) for _ in range(4)]
        before = ours._known
        assert ours.encode_batch(texts) == [library.encode(text).ids for text in texts], texts
        replaced += ours._known is not before
    assert 2 < replaced < 300


def test_rare_characters_make_room_for_words():
    rng = random.Random(3)
    rare = ["".join(chr(rng.randrange(0x0430, 0x0530)) for _ in range(30)) for _ in range(100)]
    for size in (40, 60, 120, 300):
        tokenizer = train_wordpiece(rare + ["the sea the wind"] * 500, size)
        assert tokenizer.size == size and len(tokenizer.encode("the sea")) <= 4
    assert train_wordpiece(rare, 300).size == 300


def test_what_cannot_be_trained_says_what_could_be():
    with pytest.raises(InputError, match=r"must exceed.*ask for"):
        train_wordpiece(sentences(10), 5)
    with pytest.raises(InputError, match="no text"):
        train_wordpiece(["", " \n\t "], 400)
    with pytest.raises(InputError, match=r"must be at most \d+, got 5000") as caught:
        train_wordpiece(sentences(200), 5000)
    largest = int(str(caught.value).split("at most ")[1].split(",")[0])
    assert train_wordpiece(sentences(200), largest).size == largest


def test_continuing_pieces_are_marked(tokenizer):
    assert tokenizer.continues.shape == (105,) and tokenizer.continues.dtype == bool
    for i, piece in enumerate(tokenizer.pieces(range(105))):
        assert tokenizer.continues[i] == piece.startswith("##")
    plain = build_wordpiece(b"[UNK]\n[CLS]\n##\n#\n##a\nb\n")
    assert plain.continues.tolist() == [False, False, False, False, True, False]
    grown = tokenizer.with_specials(["delimiter"])
    assert grown.continues.shape == (106,) and not grown.continues[105]


def test_continuing_pieces_of_sentencepiece():
    tokenizer = train_sentencepiece(sentences(400), 440)
    continues = tokenizer.continues
    for i, piece in enumerate(tokenizer.pieces(range(440))):
        opens = piece.startswith("\u2581") or piece in ("<0x0A>", "<0x0D>") or i in tokenizer.specials.values()
        assert continues[i] == (not opens), piece
    ids = tokenizer.encode("stormy grey-green captain")
    words = np.cumsum(~continues[ids])
    assert words[-1] == 2 + (not continues[ids[0]]), "a word begins at each blank"


@pytest.mark.data
def test_published_vocabularies_mark_what_continues(data_directory):
    vocabulary = data_directory / "vocab"
    bert = tokenizer_from_spec(f"wordpiece:{vocabulary / 'bert' / 'bert-base-cased-vocab.txt'}")
    assert bert.continues.sum() == sum(piece.startswith("##") for piece in bert.pieces(range(bert.size))) > 5_000
    gpt2 = tokenizer_from_spec(f"gpt2:{vocabulary / 'gpt2'}")
    ids = gpt2.encode("unbelievable stories\nagain")
    assert [bool(x) for x in gpt2.continues[ids]][-3:] == [False, False, True]
