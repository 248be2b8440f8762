"""Places of pieces in their text: what spans are cut out by and words are found by, for each kind of tokenizer."""

import numpy as np
import pytest

from jaxlm.errors import InputError
from jaxlm.tasks.token_rows import first_tokens
from jaxlm.text import tokenizer_from_spec, train_sentencepiece
from jaxlm.text.wordpiece import build_wordpiece

# Two code points of which a lower-casing tokenizer makes one, four bytes, a mark without a width, Chinese, two blanks.
TEXT = "Zoe\u0301  saw\u200b the \U0001f642 ﬁne CAFÉ, 北京 don't"
VOCABULARY = "[PAD] [UNK] [CLS] [SEP] [MASK] zoe saw the ﬁ ##ne cafe , 北 京 don ' t".replace(" ", "\n").encode()


def wordpiece(tmp_path):
    return build_wordpiece(VOCABULARY)


def json_file(tmp_path):
    (tmp_path / "tokenizer.json").write_text(build_wordpiece(VOCABULARY)._library.to_str())
    return tokenizer_from_spec(f"hf:{tmp_path}")


def sentencepiece(tmp_path):
    return train_sentencepiece(["the cat saw the fine cat and the dog ran "] * 9, 300)


@pytest.mark.parametrize("make", [wordpiece, json_file, sentencepiece])
def test_ids_are_those_of_encode_and_places_are_in_order(tmp_path, make):
    tokenizer = make(tmp_path)
    for text in (TEXT, "", " ", "plain words only"):
        ids, places = tokenizer.encode_batch_with_offsets([text])[0]
        assert ids == tokenizer.encode(text)
        assert places.shape == (len(ids), 2) and places.dtype == np.int64
        assert (places[:, 0] <= places[:, 1]).all() and (np.diff(places[:, 0]) >= 0).all()
        assert not len(ids) or (places.min() >= 0 and places.max() <= len(text))
    both = tokenizer.encode_batch_with_offsets(["the cat", TEXT])
    assert [ids for ids, _ in both] == tokenizer.encode_batch(["the cat", TEXT])


@pytest.mark.parametrize("make", [wordpiece, json_file])
def test_places_count_code_points_of_the_text_before_it_was_treated(tmp_path, make):
    tokenizer = make(tmp_path)
    ids, places = tokenizer.encode_batch_with_offsets([TEXT])[0]
    found = dict(zip(tokenizer.pieces(ids), (TEXT[a:b] for a, b in places), strict=True))
    assert found["cafe"] == "CAFÉ" and found["[UNK]"] == "\U0001f642" and found["京"] == "京"
    assert found["zoe"].startswith("Zoe") and found["ﬁ"] == "ﬁ" and found["##ne"] == "ne"


def test_places_of_sentencepiece_cover_the_text(tmp_path):
    tokenizer = sentencepiece(tmp_path)
    ids, places = tokenizer.encode_batch_with_offsets([TEXT])[0]
    covered = np.zeros(len(TEXT), bool)
    for start, end in places:
        assert end > start  # a character spelt in bytes is the place of each of them
        covered[start:end] = True
    assert covered.all()


@pytest.mark.parametrize("make", [wordpiece, sentencepiece])
def test_words_are_found_by_their_places(tmp_path, make):
    words = ("the", "Zoe\u0301", "don't", "CAFÉ", "北京", "saw")
    tokenizer = make(tmp_path)
    _, places = tokenizer.encode_batch_with_offsets([" ".join(words)])[0]
    starting = first_tokens(words, places)
    assert [number for number in starting if number >= 0] == list(range(len(words)))


def test_a_kind_without_places_says_so(tmp_path):
    class Other(type(sentencepiece(tmp_path))):
        kind = "other"
        encode_batch_with_offsets = type(sentencepiece(tmp_path)).__mro__[1].encode_batch_with_offsets

    with pytest.raises(InputError, match="token offsets, which other tokenizers do not give"):
        Other.encode_batch_with_offsets(Other.__new__(Other), ["x"])


@pytest.mark.data
def test_published_vocabularies(data_directory):
    vocabulary = data_directory / "vocab"
    specs = (
        f"wordpiece:{vocabulary}/bert/bert-base-cased-vocab.txt",
        f"wordpiece:{vocabulary}/bert/bert-base-uncased-vocab.txt",
        f"sentencepiece:{vocabulary}/sentencepiece_cc_all.32000.100extra.model",
    )
    for spec in specs:
        tokenizer = tokenizer_from_spec(spec)
        ids, places = tokenizer.encode_batch_with_offsets([TEXT])[0]
        assert ids == tokenizer.encode(TEXT)
        words = [TEXT[a:b].strip(" \u200b") for a, b in places]
        assert "CAFÉ" in "".join(words) and "\U0001f642" in words and "the" in words
