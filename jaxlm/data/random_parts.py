"""Random second parts of pairs: stretches of whole sentences of other documents, as long as what they stand in for.

Were a random part often shorter than a true one, lengths alone would tell which pairs are random. A stretch of whole
sentences seldom has a given length, so several are drawn and the nearest one is taken: boosted trees that see the
lengths of both parts then find the random pairs of unseen books with an AUC of 0.52 at most (0.58 to 0.66 with one
stretch where chunks are whole or documents short). A part ends within a sentence where a true one would: the end of
the sentence would tell as much.
"""

import numpy as np

from jaxlm.data.draws import Draws
from jaxlm.data.store import Section, Store

# Random documents that the search for a single stretch looks at before it takes one that is too short, or a part of a
# sentence.
TRIES = 8

# A long document has so many sentences for each candidate.
_LONG = 4

_BLOCK = 1 << 20  # documents looked at in one go


class RandomParts:
    """The stretches that stand in for the second parts of pairs of a section, from the section's other documents.

    A section of a single document takes those of the whole store. candidates: how many stretches are drawn for each;
    of a single one there are `TRIES` more where its document is too short or it has no whole sentence that fits.
    documents: how many it chooses from; 0 where fewer than two have a token.
    """

    def __init__(self, store: Store, section: Section, candidates: int):
        self.candidates = candidates
        self._documents, self._sentences = np.asarray(store.document_starts), np.asarray(store.sentence_starts)
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
        """Return where a stretch of a random document other than that of token `own` begins and ends.

        tokens: of the part it stands in for. room: how many of these the row takes; where they are fewer, both parts
        of the pair will be cut, so that the stretch reaches `tokens` (of a single candidate `room`), and otherwise it
        has `tokens` at most, whole sentences in both cases. begins_within, ends_within: the part begins or also ends in
        the middle of a sentence, and so does the stretch, which has exactly `tokens` where its document has as many.
        """
        cut = room < tokens
        if self.candidates == 1:
            wanted = tokens if begins_within else max(1, room)
            return self._first_found(own, wanted, draws, within=begins_within, cut=cut)
        starts, stops, where = self._other_documents(own, draws)
        if begins_within:
            begins, ends = self._within(starts, stops, where, tokens, ends_within=ends_within)
        else:
            begins, ends = self._whole_sentences(starts, stops, where, tokens, cut=cut)
        nearest = int(np.abs(ends - begins - tokens).argmin())
        if begins[nearest] == ends[nearest]:  # every first sentence is longer than what is wanted: one is cut
            return self._first_found(own, tokens, draws, within=begins_within, cut=cut)
        return int(begins[nearest]), int(ends[nearest])

    def _other_documents(self, own: int, draws: Draws) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Where the tokens of each candidate's document begin and end, and a fraction that says where in it it is.

        A long document gives all candidates, so that each book is drawn as often: else those whose sentences are such
        that more lengths are at hand would be, and tell random pairs. Short documents give one each.
        """
        which, where = draws.fractions(2 * self.candidates).reshape(2, -1)
        mine = self._document_of(own)
        inside = self._first <= mine < self._first + self.documents
        chosen = self._first + (which * (self.documents - inside)).astype(np.int64)
        if inside:
            chosen += chosen >= mine
        one = slice(chosen[0], chosen[0] + 2)
        border, last = np.searchsorted(self._sentences, self._documents[one]).tolist()
        if last - border >= _LONG * self.candidates:
            chosen[:] = chosen[0]
        return self._documents[chosen], self._documents[chosen + 1] - self._ending, where

    def _within(
        self, starts: np.ndarray, stops: np.ndarray, where: np.ndarray, wanted: int, *, ends_within: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Stretches that begin at any token, and end with a sentence or at any token."""
        if ends_within:
            begins = starts + (where * np.maximum(1, stops - starts - wanted + 1)).astype(np.int64)
            return begins, np.minimum(begins + wanted, stops)
        border = np.searchsorted(self._sentences, np.minimum(starts + wanted, stops))
        last = np.searchsorted(self._sentences, stops)
        ends = np.minimum(self._sentences[border + (where * (last - border + 1)).astype(np.int64)], stops)
        return np.maximum(starts, ends - wanted), ends

    def _whole_sentences(
        self, starts: np.ndarray, stops: np.ndarray, where: np.ndarray, wanted: int, *, cut: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Stretches of whole sentences, that reach `wanted` (cut) or fit in it; empty where not even one does."""
        sentences = self._sentences
        border = np.searchsorted(sentences, starts)
        last = np.searchsorted(sentences, np.maximum(starts, stops - wanted) + 1)  # further on, there is not enough
        begins = sentences[border + (where * (last - border)).astype(np.int64)]
        if cut:
            ends = sentences[np.searchsorted(sentences, np.minimum(begins + wanted, stops))]
        else:
            ends = sentences[np.searchsorted(sentences, begins + wanted, side="right") - 1]
        return begins, np.minimum(ends, stops)

    def _first_found(self, own: int, wanted: int, draws: Draws, *, within: bool, cut: bool) -> tuple[int, int]:
        """A single stretch: the first that is found in one of `TRIES` documents, the rule of version 1 of the pairs.

        within: it begins at any token and ends with a sentence, exactly `wanted` long. cut: whole sentences from a
        random one on, the last of them the one that reaches `wanted`. Otherwise whole sentences that fit in `wanted`.
        """
        sentences = self._sentences
        for attempt in range(1, TRIES + 1):
            start, end = self._other_document(own, draws)
            if end - start < wanted and attempt < TRIES:
                continue
            if within:
                border, last = np.searchsorted(sentences, (min(start + wanted, end), end)).tolist()
                stop = min(int(sentences[border + draws.below(last - border + 1)]), end)
                return max(start, stop - wanted), stop
            latest = max(start, end - wanted)  # further on, there is not as much as is wanted
            border, last = np.searchsorted(sentences, (start, latest + 1)).tolist()
            begin = int(sentences[border + draws.below(last - border)])
            if begin == latest:
                return begin, end
            if cut:
                return begin, min(int(sentences[np.searchsorted(sentences, begin + wanted)]), end)
            stop = int(sentences[np.searchsorted(sentences, begin + wanted, side="right") - 1])
            if stop > begin:
                return begin, stop
        return begin, begin + wanted  # no first sentence was short enough: the last one is cut

    def _other_document(self, own: int, draws: Draws) -> tuple[int, int]:
        """Where the tokens of a random document begin and end, of all with a token but that of token `own`."""
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
