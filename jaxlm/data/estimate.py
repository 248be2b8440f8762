"""Estimate of a preparation: tokens, disk, time and requests, from a sample of the text that is encoded.

The sample is the first SAMPLE_CHARACTERS of SAMPLE_UNITS units. Its tokens, sentences and words without an id per byte
are measured, and the CPU time of finding sentences and encoding, as the mean of two times. It is assumed that the rest
of the text is like the sample, that files have the bytes of their text, that reading is faster than encoding, that
every host has the cores of this one and their speed, and that one process joins JOIN_RATE after the last unit.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxlm.data.sentences import borders_by
from jaxlm.data.shards import Job, blocks, encode_documents
from jaxlm.data.sources import Unit, largest_file, read_unit
from jaxlm.data.store import token_dtype
from jaxlm.host import cpu_cores
from jaxlm.storage import COMPOSED, reads
from jaxlm.text import Tokenizer
from jaxlm.wording import byte_size, counted, plain_number

SAMPLE_UNITS = 8
SAMPLE_CHARACTERS = 1 << 16

JOIN_RATE = 100e6  # bytes of arrays per second that one process copies, counts and checks
PAGE = 1000  # objects in one answer to a list request, of S3 and of Google Cloud Storage
CHECKED = 8 << 20  # bytes of an array that one get request reads for its checksums


@dataclass(frozen=True)
class Sample:
    """Counts of the encoded sample, and the CPU seconds that it takes. largest: bytes of the largest document found."""

    bytes: int
    tokens: int
    documents: int
    sentences: int
    unknown: int
    seconds: float
    largest: int


@dataclass(frozen=True)
class Estimate:
    """Estimate for the units of text that are left.

    store_bytes: disk of the store. shard_bytes: disk of the shards beside it, if all are there before the join.
    encoding_seconds, join_seconds: CPU time. training_seconds: of one process. sample_bytes: of the encoded text.
    largest_bytes: of the largest document found. memory_bytes: what it takes if it is encoded whole, else 0.
    """

    text_bytes: int
    sample_bytes: int
    tokens: int
    store_bytes: int
    shard_bytes: int
    training_seconds: float
    encoding_seconds: float
    join_seconds: float
    units: int
    workers: int
    largest_bytes: int
    memory_bytes: int

    @property
    def core_hours(self) -> float:
        """Return the CPU time of all workers and of the join."""
        return (self.training_seconds + self.encoding_seconds + self.join_seconds) / 3600

    @property
    def hosts(self) -> int:
        """Return the number of hosts like this one that have a core for each worker."""
        return math.ceil(self.workers / cpu_cores())

    @property
    def minutes(self) -> float:
        """Return the wall time: training in one process, encoding in all workers that have a unit, and the join."""
        encoding = self.encoding_seconds / min(self.workers, self.units)
        return (self.training_seconds + encoding + self.join_seconds) / 60


def estimated(job: Job, units: Sequence[Unit], tokenizer: Tokenizer, workers: int, training: float = 0.0) -> Estimate:
    """Return the estimate of `units`, at least one. training: seconds that the tokenizer takes before.

    Raises InputError for bytes of the sample that are not UTF-8, and as the readers of sources do.
    """
    sample, total = _measured(job, units, tokenizer), sum(unit.size for unit in units)
    scale = total / max(1, sample.bytes)
    tokens = sample.tokens * scale
    item = token_dtype(tokenizer.size).itemsize
    arrays = tokens * item + scale * (8 * sample.documents + 8 * sample.sentences + 12 * sample.unknown)
    encodes_whole = not tokenizer.can_split and job.sentences == "none"
    return Estimate(
        text_bytes=total,
        sample_bytes=sample.bytes,
        tokens=round(tokens),
        store_bytes=round(arrays) + 8 * tokenizer.size + sum(map(len, tokenizer.files.values())),
        shard_bytes=round(arrays),
        training_seconds=training,
        encoding_seconds=sample.seconds * scale,
        join_seconds=arrays / JOIN_RATE,
        units=len(units),
        workers=workers,
        largest_bytes=sample.largest,
        memory_bytes=sample.largest * tokenizer.bytes_per_character if encodes_whole else 0,
    )


def _measured(job: Job, units: Sequence[Unit], tokenizer: Tokenizer) -> Sample:
    fragments: list[tuple[str, bool]] = []
    largest = max(largest_file(s, [unit for unit in units if job.sources[unit.source] == s]) for s in job.sources)
    count = min(SAMPLE_UNITS, len(units))
    for unit in (units[k * len(units) // count] for k in range(count)):
        left, document = SAMPLE_CHARACTERS, 0
        for text, last in read_unit(job.sources[unit.source], unit, job.errors):
            document += len(text)
            largest = max(largest, document)
            if left > 0:
                cut = text[:left]
                if len(text) > left:  # a vocabulary of musical events refuses a part of a word
                    cut = cut[: cut.rfind(" ") + 1] or cut
                fragments.append((cut, last and len(text) <= left))
                left -= len(text)
            if left <= 0 and (last or tokenizer.can_split):
                break
            document = 0 if last else document
        if fragments and not fragments[-1][1]:
            fragments.append(("", True))
    borders = borders_by(job.sentences, job.language)
    first = "".join(fragments[0][0].split(maxsplit=1)[:1]) if fragments else ""
    list(encode_documents(blocks(iter([(first, True)]), tokenizer, borders), tokenizer))  # loads the libraries
    # Most words of a large text have been met before; all of the sample are new the first time, and none the second.
    began = time.process_time()
    for _ in range(2):
        parts = list(encode_documents(blocks(iter(fragments), tokenizer, borders), tokenizer))
    seconds = (time.process_time() - began) / 2
    return Sample(
        bytes=sum(part.bytes for part in parts),
        tokens=sum(len(part.ids) for part in parts),
        documents=sum(len(part.lengths) for part in parts),
        sentences=sum(len(part.sentences) for part in parts) if borders else 0,
        unknown=sum(len(part.unknown) for part in parts),
        seconds=seconds,
        largest=largest,
    )


def requests(
    files: Sequence[int], units: Sequence[Unit], arrays: int, workers: int, training: int, store_bytes: int
) -> dict[str, int]:
    """Return the requests of a preparation whose sources, shards and store are objects, by their kind.

    files: number of each source. arrays: number of those of a shard. training: number of units that are read before, to
    train the tokenizer. list, put and compose are class A operations of Google Cloud Storage, and get is a class B
    operation. On S3 the first three are billed as PUT, COPY, POST and LIST requests. Requests to delete are free.

    list: every worker lists the sources, and the join lists the shards. get: the text, a check for each shard, and in
    the join all arrays of each shard except the tokens, and those of the store for their checksums. put: each shard's
    arrays and counts, the same arrays again with the store's offsets, and eight files of store and tokenizer. compose:
    a tree over the parts of each array. Repeated requests and locks are left out.
    """
    opened = [len(unit.slices) * reads(unit.size // max(1, len(unit.slices))) for unit in units]
    pages = sum(math.ceil(count / PAGE) for count in files)
    rewritten = len(units) * (arrays - 1)
    trained = math.ceil(sum(opened) * training / len(units))
    tokenizers = 4 * (workers + 1)  # of two files: their size and content
    return {
        "list": workers * pages + math.ceil(len(units) * (arrays + 1) / PAGE),
        "put": len(units) * (arrays + 1) + rewritten + 8,
        "compose": arrays * math.ceil((len(units) - 1) / (COMPOSED - 1)),
        "get": sum(opened) + trained + len(units) + rewritten + math.ceil(store_bytes / CHECKED) + tokenizers,
    }


def in_words(found: Estimate, asked: Mapping[str, int]) -> list[str]:
    """Return the lines of an estimate that say what was measured and assumed. asked: the requests by their kind."""
    rate = found.text_bytes / max(1e-9, found.encoding_seconds)
    class_a = {name: asked[name] for name in ("list", "put", "compose")}
    return [
        f"measured: {byte_size(found.sample_bytes)} of the text, encoded at {byte_size(rate)} per second of a core"
        + (f"; the tokenizer takes {found.training_seconds:,.0f} s in one process" if found.training_seconds else ""),
        f"disk: {byte_size(found.store_bytes)} for the store, and up to {byte_size(found.shard_bytes)} for its shards "
        "until they are joined",
        f"time: {plain_number(found.core_hours)} core-hours, {plain_number(found.minutes)} minutes with "
        f"{counted(found.workers, 'worker')} on {counted(found.hosts, 'host')} of {counted(cpu_cores(), 'core')}; the "
        f"join takes {plain_number(found.join_seconds / 60)} of the minutes",
        f"requests, if text and store are objects: {sum(class_a.values()):,} of class A "
        f"({', '.join(f'{name} {count:,}' for name, count in class_a.items())}), {asked['get']:,} of class B (get)",
        "assumed: the rest of the text is like the sample, reading is faster than encoding, all hosts are like this "
        f"one, and the join handles {byte_size(JOIN_RATE)} per second in one process",
    ]


def nearest_directory(path: Path) -> Path:
    """Return the path itself or the nearest directory above it that exists."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.is_dir())
