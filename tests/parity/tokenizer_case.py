"""What both sides of the tests of tokenizers encode: sentences of books, and text that is not like books."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

# Published vocabularies, as jaxlm names them below the directory of vocabularies.
SPECS = {
    "gpt1": "gpt1:{}/openai-gpt",
    "gpt2": "gpt2:{}/gpt2",
    "bert-cased": "wordpiece:{}/bert/bert-base-cased-vocab.txt",
    "bert-uncased": "wordpiece:{}/bert/bert-base-uncased-vocab.txt",
}
# GPT-1's treatment of text loses the places.
WITH_OFFSETS = ("gpt2", "bert-cased", "bert-uncased")

# No backslash, where Hugging Face's GPT-1 leaves the original; no spelling of a special token, which is text here; and
# nothing of DIFFERENT.
ODD = (
    "",
    " ",
    "\n",
    "\t \r\n \u00a0\u2003",
    "a",
    "  two  blanks  ",
    "line\nbreaks\r\nof\rall\n\nkinds",
    "emoji \U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 flag \U0001f1eb\U0001f1f7 tone \U0001f44d\U0001f3fd.",
    "combining e\u0301 a\u030a o\u0308 \u1e9b\u0323 n\u0303n\u0303 and \u0301alone",
    "precomposed caf\u00e9 na\u00efve \u00c5ngstr\u00f6m \u0130stanbul Stra\u00dfe \ufb01ne \u2126hm",
    "\u4e2d\u6587\u5b57\u7b26 \u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8 \ud55c\uad6d\uc5b4",
    "\U00020000 mixed\u4e2din",
    "\u0627\u0644\u0639\u0631\u0628\u064a\u0629 \u05e2\u05d1\u05e8\u05d9\u05ea",
    "\u0939\u093f\u0928\u094d\u0926\u0940 \u0e44\u0e17\u0e22",
    "control \x00 \x01\x02 \x1b[0m \x7f \x80 \ufffd end",
    "zero\u200bwidth soft\u00adhyphen \u2060join \ufeffmark \u202ertl\u202c",
    "x" * 99 + " " + "y" * 100 + " " + "z" * 101 + " " + "ab" * 100 + " " + "w" * 201,
    "-" * 60 + "!" * 60 + "?!?!?!" * 10,
    "supercalifragilisticexpialidocious antidisestablishmentarianism pneumonoultramicroscopicsilicovolcanoconiosis",
    "$3.50 1,000,000.00 10:30am 50% 3.14e-10 #hashtag @user a_b_c x*y/z {k: [v]} <b>tag</b> ~tilde~ `code` ^",
    "don't won't I'll she's they'd we've DON'T it\u2019s",
    "\u201cquoted\u201d \u2018single\u2019 em\u2014dash en\u2013dash dots\u2026",
    "U.S.A. e.g. Mr. Dr. http://example.org/a?b=c&d user@mail.example 8am (:-) :'( <3 o_O",
    "\u00bd \u00b2 \u2167 \u2460 \uff21\uff22\uff23 \uff11\uff12\uff13 \u33a1",
    "ALL CAPITALS and MiXeD CaSe AND \u00c9\u00c8 \u0394\u0391 \u03c3\u03c2",
    "unassigned \u0378 a\u0378b \U000e0080 x\U00012550y, noncharacter \uffff a\ufffeb",
)

# Where the `tokenizers` library, lower-casing, reads what stands first as Google's code reads what stands second.
DIFFERENT = {
    "a capital sigma at the end of a word": ("\u039f\u0394\u039f\u03a3 a", "\u03bf\u03b4\u03bf\u03c3 a"),
    "private use": ("cat\ue000s the\U000f0000 \U0010fffd a", "cats the a"),
    "ideographs that part no words": ("the\U0002b820cat a", "the\u0378cat a"),
    "punctuation newer than Unicode 8": ("the\u2e43cat a", "the\u0378cat a"),
    "a combining mark newer than Unicode 8": ("the\u1ab0\u1df6cat a", "the\u0378cat a"),
    "a mark that was punctuation": ("the\u166dcat a", "the \u166d cat a"),
}


def sentences(books: Path) -> Iterator[tuple[str, list[str]]]:
    """Each book of the test split and its sentences, as jaxlm's preparation finds them in its paragraphs.

    Left out is what has a backslash (one sentence), as in ODD.
    """
    from jaxlm.data.sentences import borders_by

    borders = borders_by("split", "en")
    for book in sorted((books / "test").glob("*.txt")):
        found = []
        for paragraph in book.read_text(encoding="utf-8").split("\n\n"):
            ends = [0, *borders(paragraph), len(paragraph)]
            found += [paragraph[start:end] for start, end in zip(ends, ends[1:], strict=False) if end > start]
        found = [sentence for sentence in found if "\\" not in sentence]
        yield book.stem, found


def digest(rows: Iterable[Sequence[int]]) -> str:
    """SHA-256, in hex, over rows of ids, each after its length."""
    total = hashlib.sha256()
    for row in rows:
        total.update(np.array([len(row), *row], "<i4").tobytes())
    return total.hexdigest()
