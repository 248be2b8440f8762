r"""Detokenizers: the tokens of published data sets as plain text, and back.

Radford et al., 2019, section 3.1, score WikiText, the Penn Treebank and the One Billion Word Benchmark as plain text by
"invertible de-tokenizers", which were not published. Here two tokens are joined only where `tokenized`, the inverse,
separates them again. A line does not round-trip if one of its tokens would be split by the inverse, for example a
word with a comma at its end. `comes_back` finds such lines.

`<unk>` and the `N` of the Penn Treebank's numbers are tokens like others and stay. Blanks at the edges of a line are
not text.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

_TITLES = (
    "Adj Adm Adv Asst Bart Bldg Brig Bros Capt Cmdr Col Comdr Con Corp Cpl DR Dr Drs Ens Gen Gov Hon Hr Hosp Insp Lt "
    "MM MR MRS MS Maj Messrs Mlle Mme Mr Mrs Ms Msgr Op Ord Pfc Ph Prof Pvt Rep Reps Res Rev Rt Sen Sens Sfc Sgt Sr "
    "St Supt Surg v vs rev Rs Nos Nr Jan Feb Mar Apr Jun Jul Aug Sep Oct Nov Dec"
)
MOSES = frozenset(_TITLES.split())  # of the Moses tokenizer (nonbreaking_prefix.en), which made WikiText
PENN = MOSES | frozenset("Inc Co Ltd Jr Sept Ave etc".split())
_END_OF_WORD = re.compile(r"'(?:s|t|re|ve|ll|d|m)", re.IGNORECASE)


@dataclass(frozen=True, eq=False)
class Detokenizer:
    """Conversion of lines of tokens to plain text, and back.

    openers: text -> token that is joined to the next one. closers: text -> token that is joined to the one before it,
    longer ones first. A token that is both opens and closes in turn. inner: token -> text that joins both neighbours,
    where `inner_at` matches. contraction: pattern of the tokens that are the end of a word. within: token's part ->
    text. abbreviations: words that keep their full stop; so do initials, words with another full stop, and words before
    a small letter.
    """

    name: str
    openers: Mapping[str, str]
    closers: Mapping[str, str]
    contraction: str
    inner: Mapping[str, str] = field(default_factory=dict)
    inner_at: str = r"(?!)"
    within: tuple[tuple[str, str], ...] = ()
    abbreviations: frozenset[str] = MOSES
    not_initials: str = ""

    def plain(self, line: str) -> str:
        """Return the plain text of a line of tokens with blanks between them."""
        tokens = line.strip(" ").split(" ")
        chunks: list[list[str]] = []
        opened: set[str] = set()
        joins_next = False
        for index, token in enumerate(tokens):
            before, after = (chunks[-1] if chunks else []), [*tokens[index + 1 : index + 3], "", ""]
            left, right = self._sides(token, before[-1] if before else "", opened)
            joined = [*before, token, after[0]] if token in self.inner else [*before, token]
            following = after[1] if token in self.inner else after[0]
            if before and (left or joins_next) and self._separated(joined, following):
                before.append(token)
            else:
                chunks.append([token])
            joins_next = right
        return " ".join("".join(map(self._text, chunk)) for chunk in chunks)

    def tokenized(self, text: str) -> str:
        """Return the line of tokens of a plain text, the inverse of `plain`."""
        chunks = text.split(" ")
        return " ".join(
            token
            for chunk, following in zip(chunks, [*chunks[1:], ""], strict=True)
            for token in self._split(chunk, following)
        )

    def comes_back(self, line: str, plain: str) -> bool:
        """Return True if the tokens of `plain`, the plain text of `line`, are those of the line."""
        return self.tokenized(plain) == line.strip(" ")

    def _sides(self, token: str, before: str, opened: set[str]) -> tuple[bool, bool]:
        """Return two bools: the token is joined to the one before it, and to the next one. Keep the open quotes."""
        if token in self.inner:
            return True, True
        if token == "=" == before:  # headings of WikiText
            return True, False
        opens, closes = token in self.openers.values(), token in self.closers.values()
        if not (opens and closes):
            return closes or bool(re.fullmatch(self.contraction, token)), opens
        if token == "'" and token not in opened and before[-1:] in ("s", "S"):  # a genitive
            return True, False
        opened ^= {token}
        return token not in opened, token in opened

    def _separated(self, tokens: list[str], following: str) -> bool:
        """Return True if the inverse separates these tokens again."""
        return self._split("".join(map(self._text, tokens)), self._text(following)) == tokens

    def _split(self, chunk: str, following: str) -> list[str]:
        """Return the tokens of a text without blanks. following: the text after it."""
        if len(chunk) < 2 or not chunk.strip("="):
            return [self.openers.get(one, self.closers.get(one, one)) for one in chunk] or [""]
        left: list[str] = []
        right: list[str] = []
        while len(chunk) > 1 and chunk[0] in self.openers and not _END_OF_WORD.fullmatch(chunk):
            left.append(self.openers[chunk[0]])
            chunk = chunk[1:]
        ending = rf"(?<=[\w>.)\]\"])(?:{self.contraction})$"
        while chunk not in self.closers:
            if found := re.search(ending, chunk):
                token, end = found.group(), found.start()
            else:
                text = next((text for text in self.closers if chunk.endswith(text) and len(text) < len(chunk)), None)
                if text is None or (text == "." and self._keeps_stop(chunk[:-1], "" if right else following)):
                    break
                token, end = self.closers[text], len(chunk) - len(text)
            right.append(token)
            chunk = chunk[:end]
        alone = self.openers if left else self.closers
        words = [alone[chunk]] if chunk in alone else re.split(f"({self.inner_at})", chunk)
        if len(words) > 1:
            of_text = {text: token for token, text in self.inner.items()}
            words = [of_text.get(word, word) for word in words]
        for token, text in self.within:
            words = [word.replace(text, token) for word in words]
        return [*left, *words, *reversed(right)]

    def _keeps_stop(self, word: str, following: str) -> bool:
        initial = len(word) == 1 and word.isupper() and word not in self.not_initials
        dotted = "." in word and any(map(str.isalpha, word))
        return initial or dotted or word in self.abbreviations or following[:1].islower()

    def _text(self, token: str) -> str:
        if token in self._texts:
            return self._texts[token]
        for inside, text in self.within:
            token = token.replace(inside, text)
        return token

    @cached_property
    def _texts(self) -> Mapping[str, str]:
        return {token: text for table in (self.closers, self.openers) for text, token in table.items()} | dict(
            self.inner
        )


def _same(texts: str) -> dict[str, str]:
    return {text: text for text in texts.split()}


_STOPS = "... , . : ; ! ? %"
_PENN_CONTRACTION = r"(?i:n't|'(?:s|re|ve|ll|d|m))"
WIKITEXT = Detokenizer(
    "wikitext",
    openers=_same("( [ { $ £ € # \" '"),
    closers=_same(_STOPS + " ) ] } \" '"),
    contraction=r"'\w+",
    inner={"@-@": "-", "@,@": ",", "@.@": "."},
    inner_at=r"(?<=[\w>])-(?=[\w<])|(?<=\d)[.,](?=\d)",
)
PTB = Detokenizer(
    "ptb",
    openers=_same("$ #"),
    closers=_same("% '"),
    contraction=_PENN_CONTRACTION,
    within=(("\\/", "/"),),
)
ONE_BILLION_WORDS = Detokenizer(
    "1bw",
    openers=_same("( [ { $ £ € # \" '"),
    closers=_same(_STOPS + " ) ] } \" '"),
    contraction=_PENN_CONTRACTION,
    abbreviations=PENN,
)
PENN_TREEBANK = Detokenizer(
    "penn",
    openers={"(": "-LRB-", "[": "-LSB-", "{": "-LCB-", '"': "``", "'": "`"} | _same("$ £ € #"),
    closers=_same(_STOPS) | {")": "-RRB-", "]": "-RSB-", "}": "-RCB-", '"': "''", "'": "'"},
    contraction=_PENN_CONTRACTION,
    within=(("\\/", "/"),),
    abbreviations=PENN,
    not_initials="I",
)


def plain_text(text: str) -> str:
    r"""Return a text in the Penn Treebank's tokens, for example `-LRB-`, ``` `` ``` and ` n't`, as plain text."""
    return PENN_TREEBANK.plain(text)
