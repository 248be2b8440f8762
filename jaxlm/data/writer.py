"""Makes token stores: part by part, killable at any moment, and visible only when whole."""

import json
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from jaxlm.data.store import (
    DESCRIPTION,
    FORMAT,
    TOKENIZER,
    VERSION,
    Section,
    Store,
    description_fingerprint,
    file_sha256,
    open_store,
    partial_path,
    token_dtype,
    write_atomic,
)
from jaxlm.errors import InputError
from jaxlm.text import Tokenizer

# Items copied at a time from a mapped shard.
_CHUNK = 1 << 21


def write_store(
    path: str | Path,
    texts: Iterable[str] | dict[str, Iterable[str]],
    tokenizer: Tokenizer,
    weights: Sequence[float] | None = None,
) -> Store:
    """Make a small store at once from texts in memory: `texts`, or source -> texts for several sections."""
    parts = texts if isinstance(texts, dict) else {"memory": texts}
    path = Path(path)
    writer = StoreWriter(partial_path(path), tokenizer)
    for k, (source, documents) in enumerate(parts.items()):
        writer.begin_section(source, weights[k] if weights else None)
        for text in documents:
            ids = tokenizer.encode(text) + ([tokenizer.specials["end"]] if "end" in tokenizer.specials else [])
            writer.append(np.array(ids, writer.dtype), np.array([len(ids)]), len(text.encode()), len(text.split()))
    writer.finish(path, arguments={}, inputs=[])
    return open_store(path)


class StoreWriter:
    """Makes a store in a directory, part by part, and moves it to its place when it is whole.

    After each `append` with `commit` its state is on disk, and a new writer on the same directory goes on from there;
    what was written after the last one is cut off.
    """

    def __init__(self, directory: Path, tokenizer: Tokenizer):
        self.directory = directory
        self.tokenizer = tokenizer
        self.dtype = token_dtype(tokenizer.size)
        self._store = directory / "store"
        self._store.mkdir(parents=True, exist_ok=True)
        self._state_file = directory / "writer.json"
        self._counts = np.zeros(tokenizer.size, np.int64)
        self.state: dict[str, Any] = {"parts": 0, "tokens": 0, "documents": 0, "sections": []}
        if self._state_file.exists():
            self.state = json.loads(self._state_file.read_bytes())
            self._counts[:] = np.fromfile(self._counts_file(), "<i8")
        self._tokens = _open_at(self._store / "tokens.bin", self.state["tokens"] * self.dtype.itemsize)
        self._starts = _open_at(self._store / "document_starts.bin", self.state["documents"] * 8)

    @property
    def parts(self) -> int:
        """How many committed parts the store holds."""
        return self.state["parts"]

    def begin_section(self, source: str, weight: float | None) -> None:
        """What is appended from here on belongs to `source`."""
        section = Section(source, weight, self.state["documents"], 0, self.state["tokens"], 0, 0, 0)
        self.state["sections"].append(asdict(section))

    def append(self, tokens: np.ndarray, lengths: np.ndarray, text_bytes: int, words: int) -> None:
        """Add whole documents: their ids one after the other, and the number of ids of each. Both may be mapped."""
        for begin in range(0, len(tokens), _CHUNK):
            chunk = np.ascontiguousarray(tokens[begin : begin + _CHUNK], self.dtype)
            self._tokens.write(chunk.data)
            self._counts += np.bincount(chunk, minlength=len(self._counts))
        token = self.state["tokens"]
        for begin in range(0, len(lengths), _CHUNK):
            ends = token + np.cumsum(lengths[begin : begin + _CHUNK], dtype=np.int64)
            starts = np.concatenate([[token], ends[:-1]]).astype("<i8")
            self._starts.write(starts.data)
            token = int(ends[-1])
        assert token == self.state["tokens"] + len(tokens), "lengths do not add up to the tokens"
        self.state["tokens"] = token
        self.state["documents"] += len(lengths)
        section = self.state["sections"][-1]
        section["tokens"] += len(tokens)
        section["documents"] += len(lengths)
        section["bytes"] += text_bytes
        section["words"] += words

    def commit(self) -> None:
        """Make what was appended last: one more part that a later writer need not make again."""
        self.state["parts"] += 1
        for file in (self._tokens, self._starts):
            file.flush()
            os.fsync(file.fileno())
        # The counts of this part have a name of their own, so that the state's rename switches both.
        previous = self._counts_file(self.state["parts"] - 1)
        write_atomic(self._counts_file(), self._counts.astype("<i8").tobytes())
        write_atomic(self._state_file, json.dumps(self.state).encode())
        previous.unlink(missing_ok=True)

    def finish(self, output: Path, *, arguments: dict[str, Any], inputs: list[dict[str, Any]]) -> None:
        """Write what is left, describe the store and rename it to `output`, which must not exist."""
        state = self.state
        self._starts.write(np.array([state["tokens"]], "<i8").data)
        for file in (self._tokens, self._starts):
            file.flush()
            os.fsync(file.fileno())
            file.close()
        store = self._store
        self.tokenizer.save(store / TOKENIZER)
        write_atomic(store / "token_counts.bin", self._counts.astype("<i8").tobytes())
        shapes = {
            "tokens": (self.dtype, state["tokens"]),
            "document_starts": (np.dtype("<i8"), state["documents"] + 1),
            "token_counts": (np.dtype("<i8"), len(self._counts)),
        }
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
        description["fingerprint"] = description_fingerprint(description)
        write_atomic(store / DESCRIPTION, (json.dumps(description, indent=1, ensure_ascii=False) + "\n").encode())
        publish(self.directory, store, output)

    def _counts_file(self, parts: int | None = None) -> Path:
        return self.directory / f"counts-{self.state['parts'] if parts is None else parts}.bin"


def publish(directory: Path, store: Path, output: Path) -> None:
    """Give the finished `store` its name, then remove the directory it was made in."""
    os.rename(store, output)
    shutil.rmtree(directory, ignore_errors=True)


def _open_at(path: Path, length: int):
    if length > (path.stat().st_size if path.exists() else 0):
        raise InputError(f"{path} is shorter than it was: delete {path.parent.parent} and prepare again")
    file = path.open("r+b" if path.exists() else "w+b")
    file.truncate(length)
    file.seek(length)
    return file
