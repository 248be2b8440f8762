"""Detokenizers against text as people write it, and their inverses on any sequence of tokens."""

import random

import pytest

from jaxlm.zero_shot.detokenizers import (
    ONE_BILLION_WORDS,
    PENN_TREEBANK,
    PTB,
    WIKITEXT,
    plain_text,
)

WRITTEN = {
    WIKITEXT: {
        " = = = Early life = = = ": "=== Early life ===",
        " = Du Fu ( poet ) = ": "= Du Fu (poet) =",
        " ": "",
        ' The " well @-@ known " <unk> , who didn \'t sell 1 @,@ 234 @.@ 5 of them . ': (
            'The "well-known" <unk>, who didn\'t sell 1,234.5 of them.'
        ),
        " The Beach Boys ' \" Surfer Girl \" [ it 's old ] ; $ 5 , 34 % ( e.g. , Dr. No ) ! ": (
            "The Beach Boys' \"Surfer Girl\" [it's old]; $5, 34% (e.g., Dr. No)!"
        ),
        " he said : \" like , ' Yeah , we love this song ' \" . ": "he said: \"like, 'Yeah, we love this song'\".",
    },
    PTB: {
        " no it was n't black monday ": "no it wasn't black monday",
        " cities\\/abc paid $ N to mr. <unk> 's & the traders ' funds ": (
            "cities/abc paid $N to mr. <unk>'s & the traders' funds"
        ),
    },
    ONE_BILLION_WORDS: {
        'The U.S. said ( AP ) : " He has n\'t , " and left -- in Jan. 2008 .': (
            'The U.S. said (AP): "He hasn\'t," and left -- in Jan. 2008.'
        ),
    },
    PENN_TREEBANK: {
        "`` Well , '' said he -LRB- to Mr. Brown 's dog -RRB- , `` I ca n't ! ''": (
            '"Well," said he (to Mr. Brown\'s dog), "I can\'t!"'
        ),
        "` Oh ! ' said XXXXX ; it was I . And so": "'Oh!' said XXXXX; it was I. And so",
    },
}


@pytest.mark.parametrize("detokenizer", WRITTEN, ids=lambda one: one.name)
def test_lines_become_the_text_that_was_tokenized_and_come_back(detokenizer):
    """Fails when a rule of a data set is missing, or its inverse is."""
    for line, plain in WRITTEN[detokenizer].items():
        assert detokenizer.plain(line) == plain
        assert detokenizer.tokenized(plain) == line.strip(" ")
        assert detokenizer.comes_back(line, plain)


@pytest.mark.parametrize("detokenizer", WRITTEN, ids=lambda one: one.name)
def test_any_sequence_of_tokens_comes_back(detokenizer):
    """Fails when two tokens are joined that the inverse does not separate: the text would be that of another line."""
    words = {token for line in WRITTEN[detokenizer] for token in line.split()} | {"a", "K", "7", "no", "etc", "<unk>"}
    words = sorted(word for word in words if detokenizer.comes_back(word, detokenizer.plain(word)))
    assert len(words) > 12
    generator = random.Random(0)
    joined = 0
    for _ in range(3000):
        line = " ".join(generator.choices(words, k=generator.randint(1, 12)))
        plain = detokenizer.plain(line)
        assert detokenizer.comes_back(line, plain), (line, plain, detokenizer.tokenized(plain))
        joined += line.count(" ") - plain.count(" ")
    assert joined > 2000


@pytest.mark.parametrize(
    ("detokenizer", "line"),
    [(WIKITEXT, " a word, glued "), (WIKITEXT, " 3-4 "), (PTB, " don't "), (ONE_BILLION_WORDS, "( a) b")],
)
def test_a_line_with_a_token_that_the_inverse_separates_does_not_come_back(detokenizer, line):
    """Fails when the check compares something else than the tokens of the line."""
    assert not detokenizer.comes_back(line, detokenizer.plain(line))


def test_plain_text_is_that_of_the_penn_treebank():
    assert plain_text("do n't -LRB- `` no '' -RRB-") == 'don\'t ("no")'
