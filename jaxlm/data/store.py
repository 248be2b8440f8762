"""The token store: a text as one array of ids, memory-mapped, with checksums and the tokenizer that made it.

A directory:
    description.json       what follows, with counts, checksums, the sources and the tokenizer's fingerprint
    tokens.bin             ids of all documents, uint16 (uint32 for vocabularies over 65,536), each document followed
                           by the id that ends documents where the tokenizer has one
    document_starts.bin    int64, documents + 1 offsets into tokens.bin
    sentence_starts.bin    int64, sentences + 1 offsets into tokens.bin, where sentences were kept; a document begins
                           one, and the id that ends a document belongs to its last
    token_counts.bin       int64, how often each id occurs in tokens.bin
    checksums.bin          a checksum of each chunk of the arrays (jaxlm/data/arrays.py); older stores have none
    tokenizer/             what `load_tokenizer` reads
Integers are little-endian. The description's `arrays` lists every array; readers ignore those they do not know.
"""

import hashlib
import json
import re
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from jaxlm.bounded_read import parse_json
from jaxlm.data.arrays import CheckedArray, check_old, check_whole, read_checksums
from jaxlm.errors import InputError
from jaxlm.text import Tokenizer, load_tokenizer

FORMAT = "jaxlm token store"
VERSION = 1
DESCRIPTION = "description.json"
TOKENIZER = "tokenizer"


@dataclass(frozen=True)
class Section:
    """The part of a store that came from one source.

    weight: the share asked for in training, or None. bytes, words: of the text (UTF-8; words as white space parts
    them). first_document, first_token: where the section begins in the store.
    """

    source: str
    weight: float | None
    first_document: int
    documents: int
    first_token: int
    tokens: int
    bytes: int
    words: int


class Store:
    """An open store. Arrays are mapped, not read; what is read of them is checked first, and raises DamagedStore.

    tokens: (num_tokens,) uint16 or uint32. document_starts: (documents + 1,) int64. token_counts: (vocab_size,) int64.
    sentence_starts: (sentences + 1,) int64, and sentences, how many; both None where sentences were not kept.
    end: the id that ends documents, or None.
    fingerprint: SHA-256 of the description, which holds the arrays' own: what a run remembers of its data.
    """

    def __init__(self, path: Path, description: dict[str, Any]):
        self.path = path
        self.description = description
        self.fingerprint: str = description["fingerprint"]
        self.tokenizer_fingerprint: str = description["tokenizer"]["fingerprint"]
        self.vocab_size: int = description["tokenizer"]["size"]
        self.end: int | None = description["tokenizer"].get("end")
        self.documents: int = description["documents"]
        self.sentences: int | None = description.get("sentences")
        self.num_tokens: int = description["tokens"]
        self.bytes: int = description["bytes"]
        self.words: int = description["words"]
        self._verified: set[str] = set()  # names of arrays that were read as a whole
        names = [field.name for field in fields(Section)]
        self.sections = tuple(Section(**{name: s[name] for name in names}) for s in description["sections"])

    @cached_property
    def tokens(self) -> CheckedArray:
        return self._array("tokens")

    @cached_property
    def document_starts(self) -> CheckedArray:
        return self._array("document_starts")

    @cached_property
    def sentence_starts(self) -> CheckedArray | None:
        return None if self.sentences is None else self._array("sentence_starts")

    @cached_property
    def token_counts(self) -> CheckedArray:
        return self._array("token_counts")

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the store; InputError where its directory was damaged or exchanged."""
        tokenizer = load_tokenizer(self.path / TOKENIZER)
        if tokenizer.fingerprint != self.tokenizer_fingerprint:
            raise InputError(
                f"{self.path / TOKENIZER} is not the tokenizer that made this store; delete it and prepare it again"
            )
        return tokenizer

    def verify(self) -> None:
        """Read every array and compare its checksum; DamagedStore naming the first that does not match."""
        for name, array in self.description["arrays"].items():
            check_whole(self.path / array["file"], array)
            self._verified.add(name)
        self.tokenizer()

    def unigram_entropy(self) -> float:
        """Entropy of the distribution of ids, in nats: the loss of a model that knows frequencies and nothing else."""
        counts = np.asarray(self.token_counts, np.float64)
        counts = counts[counts > 0]
        shares = counts / counts.sum()
        return float(-(shares * np.log(shares)).sum())

    def _array(self, name: str) -> CheckedArray:
        array = self.description["arrays"][name]
        path, checksums = self.path / array["file"], None
        if name not in self._verified:
            if self._checksums is None:
                check_old(path, array)
            else:
                checksums = self._checksums[name]
        return CheckedArray(path, np.dtype(array["dtype"]), array["shape"][0], checksums)

    @cached_property
    def _checksums(self) -> dict[str, np.ndarray] | None:
        return read_checksums(self.path, self.description)


def open_store(path: str | Path) -> Store:
    """Open a store: its description and the sizes of its files are checked now, contents as they are read."""
    if lies_elsewhere(path):
        raise InputError(
            f"{path}: a store is read from a disk: copy it there first (gcloud storage rsync --recursive; on a pod "
            "launch/tpu_pod.sh does it)"
        )
    path = Path(path)
    if not (path / DESCRIPTION).is_file():
        if partial_path(path).is_dir():
            raise InputError(f"{path} is not finished: run the same jaxlm.prepare command again, it continues")
        raise InputError(f"{path} is not a token store: make one with python -m jaxlm.prepare --output {path}")
    try:
        description = parse_json((path / DESCRIPTION).read_bytes())
        if description["format"] != FORMAT:
            raise ValueError(f"format {description['format']!r}")
        version, fingerprint = description["version"], description["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path / DESCRIPTION} is damaged or not a token store's ({error}); delete it and prepare it again"
        ) from error
    if version != VERSION:
        raise InputError(
            f"{path} has store version {version}, this jaxlm reads {VERSION}; delete it and prepare it again"
        )
    if fingerprint != description_fingerprint(description):
        raise InputError(
            f"{path / DESCRIPTION} was altered: it does not match its fingerprint; delete it and prepare it again"
        )
    for array in description["arrays"].values():
        file = path / array["file"]
        size = file.stat().st_size if file.is_file() else -1
        if size != array["bytes"]:
            found = "is missing" if size < 0 else f"has {size} bytes"
            raise InputError(f"{file} {found}, {DESCRIPTION} says {array['bytes']}; delete it and prepare it again")
    return Store(path, description)


def lies_elsewhere(path: str | Path) -> bool:
    """Whether a store's name is a URL, gs://BUCKET/STORE say, or was one before it became a path."""
    return re.match(r"\w+:/", str(path)) is not None


def partial_path(output: Path) -> Path:
    """Where a store is made before it appears: beside it, so that the last step is a rename."""
    return output.with_name(output.name + ".partial")


def token_dtype(vocab_size: int) -> np.dtype:
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def description_fingerprint(description: dict[str, Any]) -> str:
    """SHA-256 over the description without its own `fingerprint`."""
    rest = {key: value for key, value in description.items() if key != "fingerprint"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
