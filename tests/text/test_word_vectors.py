"""Files of word vectors: what is read from them, how words are looked up, the vocabulary of their words, bad lines."""

import gzip

import numpy as np
import pytest

from jaxlm.errors import InputError
from jaxlm.text import load_tokenizer, tokenizer_from_spec
from jaxlm.text.word_vectors import read_vectors, vectors_of

# A comma, a word with blanks, a word of digits, and words that differ in their case alone.
TEXT = ", 0.1 -2e-1 3\n. . . 1 2 3\n1992 4 5 6\nthe 7 8 9\nThe -7 -8 -9\n\N{LATIN SMALL LETTER E WITH ACUTE}t 0 0 1\n"
WORDS = {",": [0.1, -0.2, 3], ". . .": [1, 2, 3], "1992": [4, 5, 6], "the": [7, 8, 9], "The": [-7, -8, -9]}
WORDS["\N{LATIN SMALL LETTER E WITH ACUTE}t"] = [0, 0, 1]


@pytest.mark.parametrize("before", ["", f"{len(WORDS)} 3\n"])
@pytest.mark.parametrize("end", ["\n", " \n", "\r\n"])
def test_the_words_and_numbers_of_a_file(tmp_path, before, end):
    """Fails when word2vec's first line, its blank at the end of a line, or blanks in a word are misread."""
    path = tmp_path / "vectors.txt"
    path.write_bytes((before + TEXT).replace("\n", end).encode())
    compressed = tmp_path / "vectors.gz"
    compressed.write_bytes(gzip.compress(path.read_bytes()))
    for file in (path, compressed):
        found = dict(read_vectors(str(file)))
        assert list(found) == list(WORDS)
        for word, vector in WORDS.items():
            np.testing.assert_array_equal(found[word], np.float32(vector))


def test_a_word_is_found_by_its_spelling_then_in_lower_case(tmp_path):
    """Fails when the vector of another spelling is taken where the word's own is there, before it or after it."""
    (tmp_path / "v").write_text("the 1 1\nThe 2 2\nof 3 3\nNATO 4 4\nUs 5 5\n")
    vocabulary = ["<unk>", "The", "THE", "the", "Of", "nato", "NATO", "us", "Us"]
    found = vectors_of(str(tmp_path / "v"), vocabulary)
    assert found.width == 2 and found.rows[:, 0].tolist() == [0, 2, 1, 1, 3, 0, 4, 0, 5]
    assert found.known.tolist() == [False, True, True, True, True, False, True, False, True]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a 1 2\nb 3\n", "v line 2 must have a word and 2 numbers, as the first line says, got 1 after the word"),
        ("a 1 2\nb 3 4 5\n", "v line 2 must have a word and 2 numbers, as the first line says, got 3 after the word"),
        ("a 1 2\n\nb 3 4\n", "v line 2 must have a word and 2 numbers, as the first line says, got 0 after the word"),
        ("a 1 2\n 3 4\n", "v line 2 must have a word and 2 numbers"),
        ("a\n", "v line 1 must have a word and numbers, got 0 after the word"),
        ("a 1 2\nb 3 x\n", "v line 2 must have finite numbers after the word, got 'x'"),
        ("a 1 2\nb 3 nan\n", "v line 2 must have finite numbers after the word, got 'nan'"),
        ("a 1 1e40\n", "v line 1 must have finite numbers after the word, got '1e40'"),
        ("a 1 2\nb 3 4\na 5 6\n", "v line 3 must have a word of its own, got 'a', the word of line 1"),
        ("", "v must have vectors of words, got none"),
        ("3 2\na 1 2\nb 3 4\n", "v must have 3 words, as its first line says, got 2"),
        ("x 1 2\n", "word_vectors must have vectors for words of the vocabulary, got none in"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(tmp_path, text, said):
    (tmp_path / "v").write_text(text)
    with pytest.raises(InputError) as caught:
        vectors_of(str(tmp_path / "v"), ["a", "b"])
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_the_words_of_a_file_are_a_vocabulary(tmp_path):
    """Fails when a word has the id of another one, when text keeps its case before words that have none, or loses it
    before others, and when the saved tokenizer differs from the first.
    """
    cased, lower = tmp_path / "cased", tmp_path / "lower"
    cased.write_text("The 1 1\nof 2 2\na b 4 4\n<unk> 3 3\n")
    lower.write_text("the 1 1\nof 2 2\n")
    for file, wanted in ((cased, ["The", "of", "<unk>"]), (lower, ["the", "of", "<unk>"])):
        tokenizer = tokenizer_from_spec(f"vectors:{file}")
        assert tokenizer.size == 4 and tokenizer.unknown_word == tokenizer.specials["unknown"]
        assert tokenizer.pieces(tokenizer.encode("The of nothing")) == wanted
        tokenizer.save(file.with_suffix(".saved"))
        again = load_tokenizer(file.with_suffix(".saved"))
        assert again.encode("The of nothing") == tokenizer.encode("The of nothing")
        assert again.fingerprint == tokenizer.fingerprint and again.unknown_word == tokenizer.unknown_word
