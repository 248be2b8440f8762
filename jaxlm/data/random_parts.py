"""Random second segments of pairs: spans of whole sentences from other documents, as long as the text they replace.

If random segments were often shorter than true ones, lengths alone would reveal the random pairs. A span of whole
sentences seldom has a given length, so several candidates are sampled and the closest is taken. Boosted trees given the
lengths of both segments then detect the random pairs of unseen books with an AUC of at most 0.52 (0.58 to 0.66 with one
candidate if chunks are whole or documents short). A random segment ends inside a sentence where the true one would,
since the end of a sentence would reveal as much.
"""

import numpy as np

from jaxlm.data.draws import Draws
from jaxlm.data.store import Section, Store

# Random documents that the search for a single span tries before it accepts a short one or part of a sentence.
TRIES = 8

# Minimum sentences per candidate of a long document.
_LONG = 4

_BLOCK = 1 << 20  # documents processed at a time


class RandomParts:
    """Sampler of random second segments for the pairs of a section, from its other documents.

    A section of a single document uses those of the whole store. candidates: spans sampled per segment. A single
    candidate is resampled, up to `TRIES` in all, if its document is too short or no whole sentence of it fits.
    documents: number of documents to sample from; 0 if fewer than two have a token.
    """

    def __init__(self, store: Store, section: Section, candidates: int, sentences: np.ndarray):
        self.candidates = candidates
        self._documents, self._sentences = np.asarray(store.document_starts), sentences
        self._ending = 0 if store.end is None else 1
        self._first = section.first_document
        count = section.documents
        if count < 2:
            self._first, count = 0, store.documents
        filled = 0
        for begin in range(self._first, self._first + count, _BLOCK):
            sizes = np.diff(self._documents[begin : min(begin + _BLOCK, self._first + count) + 1])
            filled += int(np.count_nonzero(sizes > self._ending))
        self.documents = count if filled >= 2 else 0
        self._some_empty = filled < count

    def take(
        self, own: int, tokens: int, room: int, draws: Draws, *, begins_within: bool, ends_within: bool
    ) -> tuple[int, int]:
        """Return the start and end of a span of a random document other than that of token `own`.

        tokens: length of the text it replaces. room: tokens of it that fit in the row. If room < tokens, both segments
        are truncated later, and the span reaches `tokens` (with a single candidate, `room`); otherwise it has at most
        `tokens`. Both are whole sentences. begins_within, ends_within: whether the replaced text begins, or also ends,
        inside a sentence. The span then does too, with exactly `tokens` if its document has as many.
        """
        truncates = room < tokens
        if self.candidates == 1:
            wanted = tokens if begins_within else max(1, room)
            return self._first_found(own, wanted, draws, within=begins_within, truncates=truncates)
        starts, stops, where = self._other_documents(own, draws)
        if begins_within:
            begins, ends = self._within(starts, stops, where, tokens, ends_within=ends_within)
        else:
            begins, ends = self._whole_sentences(starts, stops, where, tokens, truncates=truncates)
        nearest = int(np.abs(ends - begins - tokens).argmin())
        if begins[nearest] == ends[nearest]:  # every first sentence is too long: truncate one
            return self._first_found(own, tokens, draws, within=begins_within, truncates=truncates)
        return int(begins[nearest]), int(ends[nearest])

    def _other_documents(self, own: int, draws: Draws) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the start and end of each candidate's document, and the candidate's relative position in it.

        A long document gives all candidates, so that all books are sampled equally often. Otherwise books with more
        varied sentence lengths would be preferred, which would reveal random pairs. Short documents give one each.
        """
        which, where = draws.fractions(2 * self.candidates).reshape(2, -1)
        mine = self._document_of(own)
        inside = self._first <= mine < self._first + self.documents
        chosen = self._first + (which * (self.documents - inside)).astype(np.int64)
        if inside:
            chosen += chosen >= mine
        one = slice(chosen[0], chosen[0] + 2)
        boundary, last = np.searchsorted(self._sentences, self._documents[one]).tolist()
        if last - boundary >= _LONG * self.candidates:
            chosen[:] = chosen[0]
        return self._documents[chosen], self._documents[chosen + 1] - self._ending, where

    def _within(
        self, starts: np.ndarray, stops: np.ndarray, where: np.ndarray, wanted: int, *, ends_within: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return spans that begin at any token, and end with a sentence or at any token."""
        if ends_within:
            begins = starts + (where * np.maximum(1, stops - starts - wanted + 1)).astype(np.int64)
            return begins, np.minimum(begins + wanted, stops)
        boundary = np.searchsorted(self._sentences, np.minimum(starts + wanted, stops))
        last = np.searchsorted(self._sentences, stops)
        ends = np.minimum(self._sentences[boundary + (where * (last - boundary + 1)).astype(np.int64)], stops)
        return np.maximum(starts, ends - wanted), ends

    def _whole_sentences(
        self, starts: np.ndarray, stops: np.ndarray, where: np.ndarray, wanted: int, *, truncates: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return spans of whole sentences that reach `wanted` (truncates) or fit in it; empty if no sentence fits."""
        sentences = self._sentences
        boundary = np.searchsorted(sentences, starts)
        last = np.searchsorted(sentences, np.maximum(starts, stops - wanted) + 1)  # beyond it, too few tokens are left
        begins = sentences[boundary + (where * (last - boundary)).astype(np.int64)]
        if truncates:
            ends = sentences[np.searchsorted(sentences, np.minimum(begins + wanted, stops))]
        else:
            ends = sentences[np.searchsorted(sentences, begins + wanted, side="right") - 1]
        return begins, np.minimum(ends, stops)

    def _first_found(self, own: int, wanted: int, draws: Draws, *, within: bool, truncates: bool) -> tuple[int, int]:
        """Return the first span found in at most `TRIES` documents.

        within: the span begins at any token, ends with a sentence and has exactly `wanted` tokens. truncates: the
        span is whole sentences from a random one up to the one that reaches `wanted`. Otherwise: whole sentences that
        fit.
        """
        sentences = self._sentences
        for attempt in range(1, TRIES + 1):
            start, end = self._other_document(own, draws)
            if end - start < wanted and attempt < TRIES:
                continue
            if within:
                boundary, last = np.searchsorted(sentences, (min(start + wanted, end), end)).tolist()
                stop = min(int(sentences[boundary + draws.below(last - boundary + 1)]), end)
                return max(start, stop - wanted), stop
            latest = max(start, end - wanted)  # beyond it, too few tokens are left
            boundary, last = np.searchsorted(sentences, (start, latest + 1)).tolist()
            begin = int(sentences[boundary + draws.below(last - boundary)])
            if begin == latest:
                return begin, end
            if truncates:
                return begin, min(int(sentences[np.searchsorted(sentences, begin + wanted)]), end)
            stop = int(sentences[np.searchsorted(sentences, begin + wanted, side="right") - 1])
            if stop > begin:
                return begin, stop
        return begin, begin + wanted  # no first sentence was short enough: truncate the last one

    def _other_document(self, own: int, draws: Draws) -> tuple[int, int]:
        """Return the start and end of a random non-empty document other than that of token `own`."""
        mine, first, count = self._document_of(own), self._first, self.documents
        document = first + draws.below(count - (first <= mine < first + count))
        document += first <= mine <= document
        while self._some_empty and (
            document == mine or self._documents[document + 1] - self._documents[document] <= self._ending
        ):
            document = first + (document + 1 - first) % count
        return int(self._documents[document]), int(self._documents[document + 1]) - self._ending

    def _document_of(self, token: int) -> int:
        return int(np.searchsorted(self._documents, token, side="right")) - 1
