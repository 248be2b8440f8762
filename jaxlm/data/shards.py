"""Shards: the tokens of one unit of input each, a pure function of the unit and the tokenizer.

Files: `N.tokens` (ids), `N.lengths` (int64, ids per document), `N.sentences` (int64, ids per sentence, if kept), of
the words without an id, if their spelling is kept, `N.places` (int64, positions among the ids), `N.words` (int32,
number of each one's word), `N.spellings` (UTF-8 of these words) and `N.sizes` (int64, bytes of each); and, written
last, `N.json` with the counts and the checksums of the other files. A shard with a JSON file is complete. Worker
processes write shards, as files of a directory or as objects below a URL; the parent process joins them into a store.
"""

import json
import multiprocessing
import os
import threading
import traceback
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import numpy as np

from jaxlm import storage
from jaxlm.data.saved_tokenizer import saved_tokenizer
from jaxlm.data.sentences import Boundaries, Sentences, borders_by, sentences_of
from jaxlm.data.sources import Fragments, Source, Unit, read_unit
from jaxlm.data.spellings import Unknown, numbered, sizes_in_bytes, split
from jaxlm.data.store import token_dtype
from jaxlm.errors import InputError, RunError
from jaxlm.files import parse_signed, with_signature
from jaxlm.reading.lines import Errors
from jaxlm.text import Tokenizer

# Characters per encoded block if the tokenizer allows splitting: libraries are slower on longer texts (SentencePiece
# drops from 5.7 to 2.1 MB/s on whole books).
BLOCK = 500

# Characters encoded per call, which bounds memory.
BATCH = 1 << 18
RESUME = "rerun the same command to resume"  # the end of messages

Answer = tuple[str, Any]  # a worker's: ("shard", its Shard), or "input" or "failed" with the message of an error

_OF_SPELLINGS = ("places", "words", "spellings", "sizes")


@dataclass(frozen=True)
class Shard:
    """Counts of a shard. bytes, words, characters: of its text. sentences: None if they are not kept.

    characters: None in a shard of an earlier version. unknown, spellings, spelling_bytes: the words without an id, how
    many different ones they are, and the bytes of these; None if their spelling is not kept. checksums: the CRC-32 of
    each file, by the name of its array; None in a shard of an earlier version.
    """

    number: int
    tokens: int
    documents: int
    bytes: int
    words: int
    sentences: int | None = None
    characters: int | None = None
    unknown: int | None = None
    spellings: int | None = None
    spelling_bytes: int | None = None
    checksums: dict[str, int] | None = None


@dataclass(frozen=True)
class Job:
    """Settings shared by all workers. tokenizer, shards: directories or URLs. errors: handling of invalid UTF-8.

    sentences: method of finding boundaries (not auto), for text in `language`. spellings: True if the spelling of words
    without an id is kept.
    """

    tokenizer: str
    shards: str
    sources: tuple[Source, ...]
    errors: Errors
    sentences: Sentences = "none"
    language: str = "en"
    spellings: bool = False

    @property
    def files(self) -> tuple[str, ...]:
        """Return the names of the arrays of a shard."""
        sentences = () if self.sentences == "none" else ("sentences",)
        return ("tokens", "lengths", *sentences, *(_OF_SPELLINGS if self.spellings else ()))

    def place(self, number: int, name: str) -> str:
        """Return the path or the URL of a file of a shard."""
        return f"{self.shards}/{number}.{name}"

    def blocks(self, unit: Unit, tokenizer: Tokenizer) -> Iterator["Block"]:
        """Return the text of a unit in the blocks that are encoded."""
        fragments = read_unit(self.sources[unit.source], unit, self.errors)
        return blocks(fragments, tokenizer, borders_by(self.sentences, self.language))


class Block(NamedTuple):
    """Part of a document that is encoded by itself. last, ends_sentence: whether it ends a document, a sentence."""

    text: str
    last: bool
    ends_sentence: bool


@dataclass
class Encoded:
    """Ids of some documents or parts of documents.

    ids: (tokens,). lengths, sentences: int64, number of ids of each document and each sentence that ends here, those in
    earlier parts included. bytes, words, characters: of the text. places, unknown: positions among the ids, int64, and
    spelling of the words without an id; empty if the tokenizer's ids are no words.
    """

    ids: np.ndarray
    lengths: np.ndarray
    sentences: np.ndarray
    bytes: int
    words: int
    characters: int
    places: np.ndarray
    unknown: list[str]


class ShardArrays(NamedTuple):
    """Arrays of a shard, memory-mapped: ids (tokens,), lengths of documents and sentences, and words without an id.

    sentences, unknown: None if they are not kept.
    """

    ids: np.ndarray
    lengths: np.ndarray
    sentences: np.ndarray | None
    unknown: Unknown | None


def make_shard(job: Job, tokenizer: Tokenizer, number: int, unit: Unit) -> Shard:
    """Encode a unit and write its shard; an existing shard is returned unchanged."""
    if (shard := find_shard(job, number)) is not None:
        return shard
    dtype, counts, numbers = token_dtype(tokenizer.size), Counter[str](), dict[str, int]()
    checksums = dict.fromkeys(job.files, 0)
    with storage.new_files([job.place(number, name) for name in job.files]) as opened:
        files = dict(zip(job.files, opened, strict=True))

        def write(name: str, content: bytes | memoryview) -> None:
            files[name].write(content)
            checksums[name] = zlib.crc32(content, checksums[name])

        for part in encode_documents(job.blocks(unit, tokenizer), tokenizer):
            write("tokens", part.ids.astype(dtype, copy=False).data)
            write("lengths", part.lengths.data)
            if "sentences" in files:
                write("sentences", part.sentences.data)
            if job.spellings:
                write("places", (counts["tokens"] + part.places).data)
                write("words", numbered(part.unknown, numbers).data)
            counts.update(tokens=len(part.ids), documents=len(part.lengths), sentences=len(part.sentences))
            counts.update(bytes=part.bytes, words=part.words, characters=part.characters, unknown=len(part.unknown))
        if job.spellings:
            sizes = sizes_in_bytes(numbers)
            write("spellings", "".join(numbers).encode())
            write("sizes", sizes.data)
            counts.update(spellings=len(sizes), spelling_bytes=int(sizes.sum()))
    names = ["tokens", "documents", "bytes", "words", "characters"] + ["sentences"] * ("sentences" in job.files)
    names += ["unknown", "spellings", "spelling_bytes"] * job.spellings
    shard = Shard(number, **{name: counts[name] for name in names}, checksums=checksums)
    storage.write(job.place(number, "json"), json.dumps(with_signature(vars(shard))).encode())
    return shard


def find_shard(job: Job, number: int) -> Shard | None:
    """Return the shard with this number if it is complete and its counts are as they were written, else None."""
    try:
        shard = Shard(**parse_signed(storage.read(job.place(number, "json"))))
    except (OSError, ValueError, TypeError):
        return None
    return None if job.spellings and shard.unknown is None else shard  # an earlier version kept no spelling


def find_shards(job: Job, numbers: Iterable[int]) -> dict[int, Shard]:
    """Return those of the shards with these numbers that are complete, which are listed first."""
    names = storage.names(job.shards)
    there = [number for number in numbers if f"{number}.json" in names]
    found = storage.in_order(lambda number: find_shard(job, number), there)
    return {shard.number: shard for shard in found if shard is not None}


def array_of(job: Job, shard: Shard, name: str, dtype: np.dtype) -> np.ndarray:
    """Return an array of a shard: a file is memory-mapped, an object is read. RunError for another size or content.

    dtype: of the ids.
    """
    int64, unknown = np.dtype("<i8"), shard.unknown or 0
    kinds = {"tokens": (dtype, shard.tokens), "lengths": (int64, shard.documents)}
    kinds |= {"sentences": (int64, shard.sentences or 0), "places": (int64, unknown)}
    kinds |= {"words": (np.dtype("<i4"), unknown), "sizes": (int64, shard.spellings or 0)}
    kinds |= {"spellings": (np.dtype("u1"), shard.spelling_bytes or 0)}
    (kind, count), place = kinds[name], job.place(shard.number, name)
    if storage.is_url(place):
        found = np.frombuffer(storage.read(place, count * kind.itemsize), kind)
    else:
        size = os.path.getsize(place) if os.path.isfile(place) else -1
        if size != count * kind.itemsize:
            raise _damaged(job, f"{place} must have {count * kind.itemsize} bytes, got {size}")
        try:
            found = np.memmap(place, kind, "r") if count else np.zeros(0, kind)
        except OSError as error:
            raise _damaged(job, f"{place} cannot be read: {error.strerror}") from error
    if shard.checksums is not None and zlib.crc32(found.data) != shard.checksums[name]:
        raise _damaged(job, f"{place} is damaged (wrong checksum)")
    return found


def read_shard(job: Job, shard: Shard, dtype: np.dtype) -> ShardArrays:
    """Return the arrays of a shard. RunError for a file of another size or content."""
    arrays = {name: array_of(job, shard, name, dtype) for name in job.files if name not in ("spellings", "sizes")}
    unknown = Unknown(arrays["places"], arrays["words"], spellings_of(job, shard)) if job.spellings else None
    return ShardArrays(arrays["tokens"], arrays["lengths"], arrays.get("sentences"), unknown)


def spellings_of(job: Job, shard: Shard) -> list[str]:
    """Return the different words without an id of a shard. RunError if they are damaged."""
    content, sizes = (array_of(job, shard, name, np.dtype("u1")) for name in ("spellings", "sizes"))
    try:
        return split(content.tobytes(), np.cumsum(sizes) - sizes)
    except ValueError as error:
        raise _damaged(job, f"{job.place(shard.number, 'spellings')} is damaged ({error})") from error


def remove_shard(job: Job, shard: Shard) -> None:
    """Delete the files of a shard."""
    for name in ("json", *job.files):
        storage.remove(job.place(shard.number, name))


def _damaged(job: Job, what: str) -> RunError:
    return RunError(f"{what}; delete {job.shards.rpartition('/')[0]} and prepare again")


def encode_documents(blocks: Iterable[Block], tokenizer: Tokenizer) -> Iterator[Encoded]:
    """Encode documents in batches.

    Each document ends with the tokenizer's `end` id, if it has one, as part of its last sentence. The ids of a long
    document may be spread over several batches; its length comes with the last.
    """
    end = [tokenizer.specials["end"]] if "end" in tokenizer.specials else []
    waiting: list[Block] = []
    characters = open_length = open_sentence = 0
    within_word = False

    def encoded() -> Encoded:
        nonlocal characters, open_length, open_sentence, within_word
        ids, unknown = _encode([block.text for block in waiting], tokenizer)
        lengths, sentences = [], []
        text_bytes = words = text_characters = 0
        for own, block in zip(ids, waiting, strict=True):
            if block.last:
                own += end
            open_length += len(own)
            open_sentence += len(own)
            if block.ends_sentence and open_sentence:
                sentences.append(open_sentence)
                open_sentence = 0
            if block.last:
                if open_length:  # a text may have no ids if the vocabulary has no end
                    lengths.append(open_length)
                open_length = 0
            text = block.text
            text_bytes += len(text) if text.isascii() else len(text.encode())
            text_characters += len(text)
            # A word that is split between blocks counts once.
            words += len(text.split()) - (within_word and bool(text) and not text[0].isspace())
            within_word = not block.last and not text[-1:].isspace() and (bool(text) or within_word)
        count = sum(map(len, ids))
        flat = np.fromiter(chain.from_iterable(ids), token_dtype(tokenizer.size), count)
        places = np.flatnonzero(flat == tokenizer.unknown_word) if unknown else np.zeros(0, "<i8")
        assert len(places) == len(unknown), "the end of a document must not be an unknown word"
        waiting.clear()
        characters = 0
        arrays = flat, np.array(lengths, "<i8"), np.array(sentences, "<i8")
        return Encoded(*arrays, text_bytes, words, text_characters, places, unknown)

    for block in blocks:
        waiting.append(block)
        characters += len(block.text)
        if characters >= BATCH:
            yield encoded()
    if waiting:
        yield encoded()


def _encode(texts: list[str], tokenizer: Tokenizer) -> tuple[list[list[int]], list[str]]:
    """Return the ids of each text, and the words of all texts that have no id, if ids are words."""
    if tokenizer.unknown_word is None:
        return tokenizer.encode_batch(texts), []
    encoded, unknown = tokenizer.encode_batch_with_offsets(texts), []
    for text, (ids, offsets) in zip(texts, encoded, strict=True):
        missing = offsets[np.array(ids) == tokenizer.unknown_word].tolist()
        unknown += [text[first:end] for first, end in missing]
    return [ids for ids, _ in encoded], unknown


def blocks(fragments: Fragments, tokenizer: Tokenizer, boundaries: Boundaries | None = None) -> Iterator[Block]:
    """Yield the documents in blocks of about BLOCK characters, split only where this does not change their ids.

    With `boundaries`, documents are also split where sentences begin.
    """
    if boundaries is not None:
        # Each sentence is split into blocks like a document of its own.
        for sentence, last in sentences_of(fragments, tokenizer, boundaries):
            *firsts, (rest, _) = _blocks(iter([(sentence, True)]), tokenizer)
            for text, _ in firsts:
                yield Block(text, False, False)
            yield Block(rest, last, True)
        return
    for text, last in _blocks(fragments, tokenizer):
        yield Block(text, last, last)


def _blocks(fragments: Fragments, tokenizer: Tokenizer) -> Fragments:
    waiting: list[str] = []
    for text, last in fragments:
        if waiting and not last and (not tokenizer.can_split or not (" " in text or "\n" in text)):
            waiting.append(text)  # no place to split, so the waiting text is not searched again
            continue
        text = "".join([*waiting, text])
        waiting.clear()
        begin = 0
        while tokenizer.can_split and len(text) - begin > BLOCK:
            place = reach = 0
            while not place and begin + reach < len(text):
                reach = max(BLOCK, 2 * reach)
                place = tokenizer.split_point(text[begin : begin + reach + 1], reach)
            if not place:
                break
            yield text[begin : begin + place], False
            begin += place
        if last:
            yield text[begin:], True
        else:
            waiting.append(text[begin:])


def make_shards(job: Job, units: Sequence[tuple[int, Unit]], workers: int, tokenizer: Tokenizer) -> Iterator[Shard]:
    """Yield the shards of numbered units as `workers` processes complete them, in any order.

    A single worker is this process itself. Reraises InputError and RunError of a worker and stops the others.
    """
    if min(workers, len(units)) <= 1:
        for number, unit in units:
            yield make_shard(job, tokenizer, number, unit)
        return
    context = multiprocessing.get_context("spawn")
    processes: dict[Any, BaseProcess] = {}
    try:
        todo = iter(units)
        asked: dict[Any, int] = {}
        for _ in range(min(workers, len(units))):
            connection: Any
            connection, other = context.Pipe()
            process: BaseProcess = context.Process(target=_work, args=(other, job), daemon=True)
            process.start()
            other.close()
            processes[connection] = process
            asked[connection] = 0

        def ask(connection: Any) -> None:
            if (task := next(todo, None)) is not None:
                connection.send(task)
                asked[connection] += 1

        # Each worker has one unit queued, so that none is idle while this process joins shards.
        for connection in [*asked, *asked]:
            with _alive(processes[connection]):
                ask(connection)
        while busy := [connection for connection in asked if asked[connection]]:
            for connection in wait(busy):
                with _alive(processes[connection]):
                    kind, value = connection.recv()
                    asked[connection] -= 1
                    if kind == "shard":
                        ask(connection)
                if kind == "input":
                    raise InputError(value)
                if kind == "failed":
                    raise RunError(value)
                yield value
    finally:
        for connection, process in processes.items():
            connection.close()
            process.terminate()
        for process in processes.values():
            process.join()


@dataclass(frozen=True)
class LocalEngine:
    """Processes of this machine that make shards."""

    workers: int

    def shards(self, job: Job, units: Sequence[tuple[int, Unit]], tokenizer: Tokenizer) -> Iterator[Shard]:
        """Yield the shards of numbered units, in any order."""
        return make_shards(job, units, self.workers, tokenizer)


@contextmanager
def _alive(process: BaseProcess) -> Iterator[None]:
    """Raise RunError if the process at the other end of a connection has died."""
    try:
        yield
    except (EOFError, OSError) as error:
        process.join()
        # A pipe that breaks leaves the frames of `send` with a view of the pickled task's buffer. Where the buffer is
        # freed before the view, Python 3.13 reports "Existing exports of data: object cannot be re-sized".
        traceback.clear_frames(error.__traceback__)
        raise RunError(
            f"a worker process died (exit {process.exitcode}), perhaps out of memory; use fewer --workers, then "
            f"{RESUME}"
        ) from error


def _work(connection: Connection, job: Job) -> None:
    """Run a worker process: make the shards of received units until the connection closes."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent handles it
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=end_with_parent, daemon=True).start()
    tokenizer = saved_tokenizer(job.tokenizer)
    while True:
        try:
            number, unit = connection.recv()
        except EOFError:
            return
        connection.send(answer(job, tokenizer, number, unit))


def answer(job: Job, tokenizer: Tokenizer, number: int, unit: Unit) -> Answer:
    """Make a unit's shard in a worker, and return it or the message of an error with its kind: input or failed."""
    try:
        return "shard", make_shard(job, tokenizer, number, unit)
    except InputError as error:
        return "input", str(error)
    except RunError as error:
        return "failed", str(error)
    except OSError as error:
        return "failed", f"{error.filename or job.shards}: {error.strerror or error}; {RESUME}"
    except MemoryError:
        return "failed", f"a worker process ran out of memory; use fewer --workers, then {RESUME}"


def end_with_parent() -> None:
    """End this process when its parent ends: an orphan must not keep writing next to the workers of the next start."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
