"""Incremental writer of token stores: interruptible at any time, visible only when complete."""

import contextlib
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from jaxlm.data.arrays import CHECKSUMS, chunk_checksums, file_sha256
from jaxlm.data.description import (
    INT64,
    all_arrays,
    begin_section,
    count,
    described,
    description_text,
    fresh_counts,
    growing_arrays,
    last_starts,
)
from jaxlm.data.shards import blocks, encode_documents
from jaxlm.data.sources import list_units, parse_source, read_unit
from jaxlm.data.spellings import Unknown, numbered, sizes_in_bytes, split, unknown_of
from jaxlm.data.store import DESCRIPTION, TOKENIZER, Store, open_store, token_dtype
from jaxlm.errors import InputError
from jaxlm.files import read_regular, read_signed, rename_synced, write_file, write_json
from jaxlm.text import Tokenizer

# Items copied at a time from a memory-mapped shard.
_CHUNK = 1 << 21


class StoreWriter:
    """Writer that builds a store in a directory part by part, then renames it to its output when complete.

    Each `commit` saves the state to disk. A new writer on the same directory continues from the last commit and
    truncates anything written after it. sentences: True if sentence boundaries are kept. The spelling of words without
    an id is kept if the tokenizer's ids are words; the different ones of the whole text are in memory.
    """

    def __init__(self, directory: Path, tokenizer: Tokenizer, sentences: bool = False):
        self.directory = directory
        self.tokenizer = tokenizer
        self.dtype = token_dtype(tokenizer.size)
        self._store = directory / "store"
        self._store.mkdir(parents=True, exist_ok=True)
        self._state_file = directory / "writer.json"
        self._counts = np.zeros(tokenizer.size, np.int64)
        self.state: dict[str, Any] = fresh_counts()
        if self._state_file.exists():
            try:
                self.state = read_signed(self._state_file)
                counts = read_regular(self._counts_file())
                _check(self._counts_file(), zlib.crc32(counts), self.state.get("checksums", {}).get("counts"))
                self._counts[:] = np.frombuffer(counts, "<i8")
            except (OSError, ValueError, KeyError) as error:
                raise InputError(
                    f"{self._state_file} or a file it names cannot be read ({error}); delete {directory} and "
                    "prepare again"
                ) from error
        if sentences:
            self.state.setdefault("sentences", 0)
        if tokenizer.unknown_word is not None:
            if self.parts and "unknown" not in self.state:
                raise InputError(
                    f"{directory} was begun by another version of jaxlm, without spellings; delete it and prepare again"
                )
            self.state.setdefault("unknown", {"tokens": 0, "words": 0, "bytes": 0})
        checksums = self.state.pop("checksums", {})
        self._files = {
            name: _open_at(self._store / f"{name}.bin", items * dtype.itemsize, checksums.get(name))
            for name, dtype, items in growing_arrays(self.state, self.dtype)
        }
        self._numbers: dict[str, int] = self._read_numbers() if "unknown" in self.state else {}

    @property
    def parts(self) -> int:
        """Return the number of committed parts."""
        return self.state["parts"]

    def begin_section(self, source: str, weight: float | None) -> None:
        """Begin the section of `source`; later appends belong to it."""
        begin_section(self.state, source, weight)

    def append(
        self,
        tokens: np.ndarray,
        lengths: np.ndarray,
        text_bytes: int,
        words: int,
        sentences: np.ndarray | None = None,
        characters: int | None = None,
        unknown: Unknown | None = None,
    ) -> None:
        """Append whole documents: concatenated ids, number of ids per document, and number of ids per sentence.

        All arrays may be memory-mapped. sentences, unknown: required if the store keeps them, otherwise None.
        characters: of the text; None if they were not counted, as the parts of an earlier version, and then not those
        of the store.
        """
        for begin in range(0, len(tokens), _CHUNK):
            chunk = np.ascontiguousarray(tokens[begin : begin + _CHUNK], self.dtype)
            self._files["tokens"].write(chunk.data)
            self._counts += np.bincount(chunk, minlength=len(self._counts))
        first = self.state["tokens"]
        end = first + len(tokens)
        starts = self._files["document_starts"]
        assert _write_starts(starts, first, lengths) == end, "lengths must sum to the number of tokens"
        for name, given in (("sentences", sentences), ("unknown", unknown)):
            assert (name in self.state) == (given is not None), f"{name} must be given if and only if they are kept"
        if sentences is not None:
            starts = self._files["sentence_starts"]
            assert _write_starts(starts, first, sentences) == end, "sentence lengths must sum to the number of tokens"
            self.state["sentences"] += len(sentences)
        if unknown is not None:
            self._append_unknown(unknown, first)
        sizes = {"tokens": len(tokens), "documents": len(lengths), "text_bytes": text_bytes, "words": words}
        count(self.state, **sizes, characters=characters)

    def commit(self) -> None:
        """Commit all appends since the last commit as one more part."""
        self.state["parts"] += 1
        for file in self._files.values():
            file.sync()
        # The counts of each part have their own file name, so that renaming the state file switches both.
        previous = self._counts_file(self.state["parts"] - 1)
        counts = self._counts.astype("<i8").tobytes()
        write_file(self._counts_file(), counts)
        checksums = {name: file.checksum for name, file in self._files.items()} | {"counts": zlib.crc32(counts)}
        write_json(self._state_file, self.state | {"checksums": checksums}, signed=True)
        previous.unlink(missing_ok=True)

    def finish(self, output: Path, *, arguments: dict[str, Any], inputs: list[dict[str, Any]]) -> None:
        """Write the remaining files and the description, then rename the store to `output`, which must not exist."""
        for name, end in last_starts(self.state).items():
            self._files[name].write(np.array([end], INT64).data)
        for file in self._files.values():
            file.sync()
            file.file.close()
        store = self._store
        self.tokenizer.save(store / TOKENIZER)
        write_file(store / "token_counts.bin", self._counts.astype("<i8").tobytes())
        names = [name for name, _, _ in all_arrays(self.state, self.tokenizer, self.dtype)]
        digests = {name: file_sha256(store / f"{name}.bin") for name in names}
        description = described(self.state, self.tokenizer, self.dtype, digests, arguments, inputs)
        write_file(store / DESCRIPTION, description_text(description))
        write_file(store / CHECKSUMS, chunk_checksums(store, description))
        publish(self.directory, store, output)

    def _append_unknown(self, unknown: Unknown, first: int) -> None:
        """Append the words without an id of tokens from `first` on, which get their numbers in the store."""
        counts = self.state["unknown"]
        new = [word for word in unknown.spellings if word not in self._numbers]
        numbers = numbered(unknown.spellings, self._numbers)
        for begin in range(0, len(unknown.places), _CHUNK):
            part = slice(begin, begin + _CHUNK)
            self._files["unknown_places"].write((first + unknown.places[part]).astype(INT64, copy=False).data)
            self._files["unknown_words"].write(numbers[unknown.words[part]].data)
        counts["bytes"] = _write_starts(self._files["spelling_starts"], counts["bytes"], sizes_in_bytes(new))
        self._files["spellings"].write("".join(new).encode())
        counts["tokens"] += len(unknown.places)
        counts["words"] += len(new)

    def _read_numbers(self) -> dict[str, int]:
        """Return the number of each word that is kept so far."""
        path, starts = self._store / "spellings.bin", np.fromfile(self._store / "spelling_starts.bin", INT64)
        try:
            return {word: number for number, word in enumerate(split(path.read_bytes(), starts))}
        except ValueError as error:
            raise InputError(f"{path} is damaged ({error}); delete {self.directory} and prepare again") from error

    def _counts_file(self, parts: int | None = None) -> Path:
        return self.directory / f"counts-{self.state['parts'] if parts is None else parts}.bin"


def publish(directory: Path, store: Path, output: Path) -> None:
    """Rename the finished `store` to `output`, then remove the directory it was built in."""
    rename_synced(store, output)
    shutil.rmtree(directory, ignore_errors=True)


def _write_starts(file: "_Summed", first: int, lengths: np.ndarray) -> int:
    """Write the start offsets of items of these lengths, from `first` on; return the end of the last item."""
    for begin in range(0, len(lengths), _CHUNK):
        ends = first + np.cumsum(lengths[begin : begin + _CHUNK], dtype=np.int64)
        file.write(np.concatenate([[first], ends[:-1]]).astype("<i8").data)
        first = int(ends[-1])
    return first


class _Summed:
    """File that is appended to. checksum: the CRC-32 of its content."""

    def __init__(self, file: IO[bytes], checksum: int) -> None:
        self.file, self.checksum = file, checksum

    def write(self, content: bytes | memoryview) -> None:
        """Append to the file."""
        self.file.write(content)
        self.checksum = zlib.crc32(content, self.checksum)

    def sync(self) -> None:
        """Flush what was written to disk."""
        self.file.flush()
        os.fsync(self.file.fileno())


def _open_at(path: Path, length: int, checksum: int | None) -> _Summed:
    """Open a file after its first `length` bytes, and remove the others.

    checksum: of these bytes; None: as an earlier version wrote them, without one. InputError for other bytes.
    """
    remedy = f"delete {path.parent.parent} and prepare again"
    if length > (path.stat().st_size if path.is_file() else 0):
        raise InputError(f"{path} is shorter than recorded; {remedy}")
    try:
        file = path.open("r+b" if path.exists() else "w+b")
        file.truncate(length)
        found = 0
        while chunk := file.read(_CHUNK):
            found = zlib.crc32(chunk, found)
        _check(path, found, checksum)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be continued ({error}); {remedy}") from error
    return _Summed(file, found)


def _check(path: Path, found: int, expected: int | None) -> None:
    """Raise ValueError for another checksum than was recorded."""
    if expected is not None and found != expected:
        raise ValueError(f"{path.name} has a wrong checksum")


@contextlib.contextmanager
def store_of_text(file: Path, tokenizer: Tokenizer, errors: Literal["strict", "replace"] = "strict") -> Iterator[Store]:
    """Open the store that `jaxlm.prepare --source text:FILE` makes with a tokenizer; it is removed after the block.

    InputError if the file cannot be read, or is not UTF-8 with errors="strict".
    """
    if not file.is_file():
        raise InputError(f"input must be a text file, got {file}; give the path of a readable one")
    source = parse_source(f"text:{file}")
    units, _ = list_units(source, 0)
    with tempfile.TemporaryDirectory(prefix="jaxlm-text-") as directory:
        writer = StoreWriter(Path(directory) / "partial", tokenizer)
        writer.begin_section(source.spec, None)
        for unit in units:
            for part in encode_documents(blocks(read_unit(source, unit, errors), tokenizer), tokenizer):
                sizes = part.bytes, part.words, None, part.characters
                writer.append(part.ids, part.lengths, *sizes, unknown_of(part.places, part.unknown, tokenizer))
        writer.finish(Path(directory) / "store", arguments={}, inputs=[])
        yield open_store(Path(directory) / "store")
