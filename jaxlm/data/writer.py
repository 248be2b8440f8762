"""Incremental writer of token stores: interruptible at any time, visible only when complete."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from jaxlm.data.arrays import CHECKSUMS, chunk_checksums, file_sha256
from jaxlm.data.shards import blocks, encode_documents
from jaxlm.data.sources import list_units, parse_source, read_unit
from jaxlm.data.store import (
    DESCRIPTION,
    FORMAT,
    TOKENIZER,
    VERSION,
    Section,
    Store,
    description_fingerprint,
    open_store,
    token_dtype,
)
from jaxlm.errors import InputError
from jaxlm.files import read_object, rename_synced, write_file
from jaxlm.text import Tokenizer

# Items copied at a time from a memory-mapped shard.
_CHUNK = 1 << 21


class StoreWriter:
    """Writer that builds a store in a directory part by part, then renames it to its output when complete.

    Each `commit` saves the state to disk. A new writer on the same directory continues from the last commit and
    truncates anything written after it. sentences: True if sentence boundaries are kept.
    """

    def __init__(self, directory: Path, tokenizer: Tokenizer, sentences: bool = False):
        self.directory = directory
        self.tokenizer = tokenizer
        self.dtype = token_dtype(tokenizer.size)
        self._store = directory / "store"
        self._store.mkdir(parents=True, exist_ok=True)
        self._state_file = directory / "writer.json"
        self._counts = np.zeros(tokenizer.size, np.int64)
        self.state: dict[str, Any] = {"parts": 0, "tokens": 0, "documents": 0, "characters": 0, "sections": []}
        if self._state_file.exists():
            try:
                self.state = read_object(self._state_file)
                self._counts[:] = np.fromfile(self._counts_file(), "<i8")
            except (OSError, ValueError, KeyError) as error:
                raise InputError(
                    f"{self._state_file} or a file it names cannot be read ({error}); delete {directory} and "
                    "prepare again"
                ) from error
        self._tokens = _open_at(self._store / "tokens.bin", self.state["tokens"] * self.dtype.itemsize)
        self._starts = _open_at(self._store / "document_starts.bin", self.state["documents"] * 8)
        self._sentences: IO[bytes] | None = None
        if sentences:
            self.state.setdefault("sentences", 0)
            self._sentences = _open_at(self._store / "sentence_starts.bin", self.state["sentences"] * 8)

    @property
    def parts(self) -> int:
        """Return the number of committed parts."""
        return self.state["parts"]

    def begin_section(self, source: str, weight: float | None) -> None:
        """Begin the section of `source`; later appends belong to it."""
        section = Section(source, weight, self.state["documents"], 0, self.state["tokens"], 0, 0, 0)
        self.state["sections"].append(asdict(section))

    def append(
        self,
        tokens: np.ndarray,
        lengths: np.ndarray,
        text_bytes: int,
        words: int,
        sentences: np.ndarray | None = None,
        characters: int | None = None,
    ) -> None:
        """Append whole documents: concatenated ids, number of ids per document, and number of ids per sentence.

        All three may be memory-mapped. sentences: required if the store keeps them, otherwise None. characters:
        of the text; None if they were not counted, as the parts of an earlier version, and then not those of the store.
        """
        for begin in range(0, len(tokens), _CHUNK):
            chunk = np.ascontiguousarray(tokens[begin : begin + _CHUNK], self.dtype)
            self._tokens.write(chunk.data)
            self._counts += np.bincount(chunk, minlength=len(self._counts))
        first = self.state["tokens"]
        end = first + len(tokens)
        assert _write_starts(self._starts, first, lengths) == end, "lengths must sum to the number of tokens"
        assert (self._sentences is None) == (sentences is None), (
            "sentences must be given if and only if the store keeps them"
        )
        if self._sentences is not None and sentences is not None:
            assert _write_starts(self._sentences, first, sentences) == end, (
                "sentence lengths must sum to the number of tokens"
            )
            self.state["sentences"] += len(sentences)
        self.state["tokens"] = end
        self.state["documents"] += len(lengths)
        if characters is None:
            self.state.pop("characters", None)
        elif "characters" in self.state:
            self.state["characters"] += characters
        section = self.state["sections"][-1]
        section["tokens"] += len(tokens)
        section["documents"] += len(lengths)
        section["bytes"] += text_bytes
        section["words"] += words

    def commit(self) -> None:
        """Commit all appends since the last commit as one more part."""
        self.state["parts"] += 1
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
        # The counts of each part have their own file name, so that renaming the state file switches both.
        previous = self._counts_file(self.state["parts"] - 1)
        write_file(self._counts_file(), self._counts.astype("<i8").tobytes())
        write_file(self._state_file, json.dumps(self.state).encode())
        previous.unlink(missing_ok=True)

    def finish(self, output: Path, *, arguments: dict[str, Any], inputs: list[dict[str, Any]]) -> None:
        """Write the remaining files and the description, then rename the store to `output`, which must not exist."""
        state = self.state
        for file in self._files[1:]:
            file.write(np.array([state["tokens"]], "<i8").data)
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
            file.close()
        store = self._store
        self.tokenizer.save(store / TOKENIZER)
        write_file(store / "token_counts.bin", self._counts.astype("<i8").tobytes())
        shapes = {
            "tokens": (self.dtype, state["tokens"]),
            "document_starts": (np.dtype("<i8"), state["documents"] + 1),
            "token_counts": (np.dtype("<i8"), len(self._counts)),
        }
        if self._sentences is not None:
            shapes["sentence_starts"] = (np.dtype("<i8"), state["sentences"] + 1)
        description: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "documents": state["documents"],
            "tokens": state["tokens"],
            "bytes": sum(section["bytes"] for section in state["sections"]),
            "words": sum(section["words"] for section in state["sections"]),
            "sections": state["sections"],
            "tokenizer": {
                "kind": self.tokenizer.kind,
                "size": self.tokenizer.size,
                "fingerprint": self.tokenizer.fingerprint,
                "end": self.tokenizer.specials.get("end"),
            },
            "arguments": arguments,
            "inputs": inputs,
            "arrays": {
                name: {
                    "file": f"{name}.bin",
                    "dtype": dtype.str,
                    "shape": [length],
                    "bytes": length * dtype.itemsize,
                    "sha256": file_sha256(store / f"{name}.bin"),
                }
                for name, (dtype, length) in shapes.items()
            },
        }
        if self._sentences is not None:
            description["sentences"] = state["sentences"]
        if "characters" in state:
            description["characters"] = state["characters"]
        description["fingerprint"] = description_fingerprint(description)
        write_file(store / DESCRIPTION, (json.dumps(description, indent=1, ensure_ascii=False) + "\n").encode())
        write_file(store / CHECKSUMS, chunk_checksums(store, description))
        publish(self.directory, store, output)

    @property
    def _files(self) -> list[IO[bytes]]:
        """Return the files that grow: tokens first, then the offsets into them."""
        return [self._tokens, self._starts] + ([] if self._sentences is None else [self._sentences])

    def _counts_file(self, parts: int | None = None) -> Path:
        return self.directory / f"counts-{self.state['parts'] if parts is None else parts}.bin"


def publish(directory: Path, store: Path, output: Path) -> None:
    """Rename the finished `store` to `output`, then remove the directory it was built in."""
    rename_synced(store, output)
    shutil.rmtree(directory, ignore_errors=True)


def _write_starts(file: IO[bytes], first: int, lengths: np.ndarray) -> int:
    """Write the start offsets of items of these lengths, from `first` on; return the end of the last item."""
    for begin in range(0, len(lengths), _CHUNK):
        ends = first + np.cumsum(lengths[begin : begin + _CHUNK], dtype=np.int64)
        file.write(np.concatenate([[first], ends[:-1]]).astype("<i8").data)
        first = int(ends[-1])
    return first


def _open_at(path: Path, length: int) -> IO[bytes]:
    if length > (path.stat().st_size if path.exists() else 0):
        raise InputError(f"{path} is shorter than recorded; delete {path.parent.parent} and prepare again")
    file = path.open("r+b" if path.exists() else "w+b")
    file.truncate(length)
    file.seek(length)
    return file


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
                writer.append(part.ids, part.lengths, part.bytes, part.words, None, part.characters)
        writer.finish(Path(directory) / "store", arguments={}, inputs=[])
        yield open_store(Path(directory) / "store")
