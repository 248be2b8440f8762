"""A store at a URL, joined from its shards there without a copy on this machine.

The number of tokens, documents and sentences of each shard gives by prefix sums where its items begin in the store. A
second map then writes the offsets of each shard as objects of their own, in threads. The objects of each array are
composed where the storage can, and otherwise copied in blocks. Each array is read once, for its SHA-256 and its chunk
checksums, and the tokens for their counts. The description is written last: it alone makes a store. Everything before
is a function of the shards, so that a join that was killed starts over.

In memory are a few blocks, the lengths of the shards in flight, and the different words without an id, if their
spelling is kept.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np

from jaxlm import storage
from jaxlm.data.arrays import CHECKSUMS, checksums_content, digested
from jaxlm.data.description import (
    INT64,
    all_arrays,
    begin_section,
    count,
    described,
    description_text,
    fresh_counts,
    last_starts,
)
from jaxlm.data.saved_tokenizer import upload_tokenizer
from jaxlm.data.shards import Job, Shard, array_of, spellings_of
from jaxlm.data.spellings import numbered, sizes_in_bytes
from jaxlm.data.store import ARRAYS, DESCRIPTION, TOKENIZER, token_dtype
from jaxlm.errors import InputError
from jaxlm.text import Tokenizer

Parts = dict[str, list[tuple[str, int]]]  # of each array, the URL and the bytes of its objects


@dataclass(frozen=True)
class _Place:
    """Place of a shard in the store: the shard, its first token, and, if spellings are kept, its words without an id.

    numbers: (different words,) int32, their numbers in the store. new: those that no earlier shard has. first_byte: of
    their spelling.
    """

    shard: Shard
    first: int
    numbers: np.ndarray | None = None
    new: Sequence[str] = ()
    first_byte: int = 0


@dataclass(frozen=True)
class Composition:
    """The store at `url` that is made of the shards of a job, in `partial`, a URL below.

    sections: the number of the source of each shard. weights: of the sources, or none.
    """

    url: str
    partial: str
    job: Job
    tokenizer: Tokenizer
    sections: Sequence[int]
    weights: Sequence[float]

    def join(self, shards: Sequence[Shard]) -> tuple[dict[str, Any], Parts]:
        """Write the offsets of all shards. Returns the counts of the store and the objects of each array."""
        counts = fresh_counts()
        counts |= {} if self.job.sentences == "none" else {"sentences": 0}
        counts |= {"unknown": {"tokens": 0, "words": 0, "bytes": 0}} if self.job.spellings else {}
        parts: Parts = {}
        for found in storage.in_order(self._write, self._places(counts, shards)):
            for name, place, size in found:
                parts.setdefault(name, []).append((place, size))
        for name, end in last_starts(counts).items():
            place = f"{self.partial}/joined/end.{name}"
            storage.write(place, np.array([end], INT64).tobytes())
            parts[name].append((place, INT64.itemsize))
        return counts, parts

    def finish(
        self,
        counts: dict[str, Any],
        parts: Parts,
        arguments: dict[str, Any],
        inputs: list[dict[str, Any]],
        check: Callable[[], None],
    ) -> None:
        """Compose the arrays, and write the description; then the store is complete. check: called between objects."""
        dtype = token_dtype(self.tokenizer.size)
        occurrences = np.zeros(self.tokenizer.size, INT64)
        hashes, checksums = dict[str, str](), dict[str, list[int]]()
        arrays = all_arrays(counts, self.tokenizer, dtype)
        # The tokens come first: the second pass over them counts the ids, which are an array of their own.
        for name, kind, length in arrays:
            check()
            place, size = f"{self.url}/{name}.bin", length * kind.itemsize
            if name == "token_counts":
                storage.write(place, occurrences.tobytes())
            else:
                storage.concatenate(place, parts[name], f"{self.partial}/composed/{name}")
            content = storage.blocks([(place, size)])
            if name == "tokens":
                content = _counting(content, dtype, occurrences)
            hashes[name], checksums[name] = digested(content)
        upload_tokenizer(self.tokenizer, f"{self.url}/{TOKENIZER}")
        description = described(counts, self.tokenizer, dtype, hashes, arguments, inputs)
        storage.write(f"{self.url}/{CHECKSUMS}", checksums_content(description, checksums))
        for name in set(ARRAYS) - {name for name, _, _ in arrays}:  # of an unfinished store of other arguments
            storage.remove(f"{self.url}/{name}.bin")
        check()
        if not storage.create(f"{self.url}/{DESCRIPTION}", description_text(description)):
            raise InputError(f"{self.url} holds a store that another process made meanwhile; name another --output")
        storage.remove_tree(self.partial)

    def _places(self, counts: dict[str, Any], shards: Sequence[Shard]) -> Iterator[_Place]:
        """Yield the place of each shard, in their order, and count it."""
        numbers: dict[str, int] = {}
        is_spelt = self.job.spellings
        words = storage.in_order(lambda shard: spellings_of(self.job, shard), shards) if is_spelt else repeat([])
        for shard, section, spellings in zip(shards, self.sections, words, strict=False):
            if len(counts["sections"]) <= section:
                weight = self.weights[section] if self.weights else None
                begin_section(counts, self.job.sources[section].spec, weight)
            place = _Place(shard, counts["tokens"])
            if is_spelt:
                unknown, new = counts["unknown"], [word for word in spellings if word not in numbers]
                place = _Place(shard, counts["tokens"], numbered(spellings, numbers), new, unknown["bytes"])
                unknown["tokens"] += shard.unknown
                unknown["words"] += len(new)
                unknown["bytes"] += int(sizes_in_bytes(new).sum())
            if "sentences" in counts:
                counts["sentences"] += shard.sentences
            sizes = {"tokens": shard.tokens, "documents": shard.documents, "text_bytes": shard.bytes}
            count(counts, **sizes, words=shard.words, characters=shard.characters)
            yield place

    def _write(self, place: _Place) -> list[tuple[str, str, int]]:
        """Write what a shard adds to each array except the tokens; return (array, URL, bytes) of all."""
        shard, dtype = place.shard, token_dtype(self.tokenizer.size)

        def read(name: str) -> np.ndarray:
            return array_of(self.job, shard, name, dtype)

        arrays = {"document_starts": _starts(place.first, read("lengths"), shard.tokens)}
        if self.job.sentences != "none":
            arrays["sentence_starts"] = _starts(place.first, read("sentences"), shard.tokens)
        if place.numbers is not None:
            arrays["unknown_places"] = place.first + read("places")
            arrays["unknown_words"] = place.numbers[read("words")]
            arrays["spellings"] = np.frombuffer("".join(place.new).encode(), "u1")
            sizes = sizes_in_bytes(place.new)
            arrays["spelling_starts"] = _starts(place.first_byte, sizes, int(sizes.sum()))
        found = [("tokens", self.job.place(shard.number, "tokens"), shard.tokens * dtype.itemsize)]
        for name, array in arrays.items():
            url = f"{self.partial}/joined/{shard.number}.{name}"
            if len(array):
                storage.write(url, array.tobytes())
            found.append((name, url, array.nbytes))
        return found


def _starts(first: int, lengths: np.ndarray, total: int) -> np.ndarray:
    """Return the offsets of items of these lengths, from `first` on, int64. total: the sum of the lengths."""
    ends = first + np.cumsum(lengths, dtype=INT64)
    assert total == 0 or ends[-1] == first + total, "lengths must sum to the number of tokens"
    return ends - lengths


def _counting(blocks: Iterator[bytes], dtype: np.dtype, occurrences: np.ndarray) -> Iterator[bytes]:
    """Yield blocks of ids, and add the occurrences of each id to `occurrences`, int64 (ids,)."""
    for block in blocks:
        occurrences += np.bincount(np.frombuffer(block, dtype), minlength=len(occurrences))
        yield block
