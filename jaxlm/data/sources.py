"""Where documents come from: files and TensorFlow Datasets, cut into slices that are read independently.

A source is named by one string: text:GLOB (a file is a document), lines:GLOB (blank lines part documents),
jsonl:GLOB[#FIELD], tfds:NAME[@SPLIT][#FIELD], tfds-dir:PATH[@SPLIT][#FIELD]. A unit is some slices of one source: the
work that makes one shard. Units depend on the inputs alone, so any number of processes makes the same store.
"""

import functools
import glob
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxlm.data.files import COMPRESSED, Errors, Fragments, is_compressed, read_jsonl, read_lines, read_text
from jaxlm.errors import InputError

TFDS_EXTRA = "install the extra [tfds]: pip install 'jaxlm[tfds]'"
KINDS = "text:GLOB, lines:GLOB, jsonl:GLOB[#FIELD], tfds:NAME[@SPLIT][#FIELD], tfds-dir:PATH[@SPLIT][#FIELD]"
FIELD = "text"
SPLIT = "train"

# Text for one unit of work. Enough that starting one costs nothing, little enough that few seconds are lost by a kill.
UNIT_BYTES = 2 << 20


@dataclass(frozen=True)
class Slice:
    """Part of a source: bytes [begin, end) of the file `path`, or records [begin, end) where path is empty."""

    path: str
    begin: int
    end: int | None


@dataclass(frozen=True)
class Unit:
    """The work that makes one shard. source: which of the sources; size: its text in bytes, estimated."""

    source: int
    slices: tuple[Slice, ...]
    size: int


@dataclass(frozen=True)
class Source:
    """A source as its string names it. place: a glob, a data set's name or a directory."""

    spec: str
    kind: str
    place: str
    field: str
    split: str


def parse_source(spec: str) -> Source:
    """Read a source's string. InputError where it is none; nothing is opened yet."""
    kind, colon, place = spec.partition(":")
    if not colon or not place or kind not in ("text", "lines", "jsonl", "tfds", "tfds-dir"):
        raise InputError(f"source {spec!r}: expected one of {KINDS}")
    field, split = FIELD, ""
    if kind in ("jsonl", "tfds", "tfds-dir") and "#" in place:
        place, _, field = place.rpartition("#")
    if kind in ("tfds", "tfds-dir"):
        split = SPLIT
        if "@" in place:
            place, _, split = place.rpartition("@")
    if not place or not field or (kind.startswith("tfds") and not split):
        raise InputError(f"source {spec!r}: a part of it is empty; expected one of {KINDS}")
    return Source(spec, kind, place, field, split)


def list_units(source: Source, number: int, unit_bytes: int = UNIT_BYTES) -> tuple[list[Unit], dict[str, Any]]:
    """The units of a source, in order, and what it consists of: {"source", "files", "bytes"} or {…, "records"}.

    `number` is the source's place among the sources. Raises InputError where there is nothing to read.
    """
    if source.kind.startswith("tfds"):
        data = _data_source(source)
        records = len(data)
        if not records:
            raise InputError(f"source {source.spec!r}: the split {source.split!r} has no records")
        each = max(1, _record_bytes(source))
        step = max(1, unit_bytes // each)
        parts = [Slice("", k, min(k + step, records)) for k in range(0, records, step)]
        sized = [Unit(number, (part,), each * min(step, records - part.begin)) for part in parts]
        return sized, {"source": source.spec, "records": records, "bytes": each * records}

    sizes = _file_sizes(source)
    units: list[Unit] = []
    slices: list[Slice] = []
    filled = 0.0

    def close() -> None:
        nonlocal slices, filled
        if slices:
            units.append(Unit(number, tuple(slices), int(filled)))
        slices, filled = [], 0.0

    for path, size in sizes:
        if source.kind == "text" or is_compressed(path):
            slices.append(Slice(path, 0, None))
            filled += size * COMPRESSED.get(Path(path).suffix, 1)
            if filled >= unit_bytes:
                close()
            continue
        if filled + size > unit_bytes:
            close()
        begin = 0
        while begin < size:
            end = min(size, begin + unit_bytes)
            slices.append(Slice(path, begin, None if end == size else end))
            filled += end - begin
            begin = end
            if filled >= unit_bytes:
                close()
    close()
    if not units:
        raise InputError(f"source {source.spec!r}: its {len(sizes)} files are empty")
    return units, {"source": source.spec, "files": len(sizes), "bytes": sum(size for _, size in sizes)}


def largest_file(source: Source, units: list[Unit]) -> int:
    """Bytes of text, estimated, in the largest file of a `text:` source, where a file is a document; 0 for others."""
    if source.kind != "text":
        return 0
    paths = {part.path for unit in units for part in unit.slices}
    return max((int(os.stat(path).st_size * COMPRESSED.get(Path(path).suffix, 1)) for path in paths), default=0)


def read_slice(source: Source, part: Slice, errors: Errors = "strict") -> Fragments:
    """The documents of a slice as fragments (text, last)."""
    if source.kind == "text":
        return read_text(part.path, errors)
    if source.kind == "lines":
        return read_lines(part.path, part.begin, part.end, errors)
    if source.kind == "jsonl":
        return read_jsonl(part.path, source.field, part.begin, part.end, errors)
    return _read_records(source, part, errors)


def read_unit(source: Source, unit: Unit, errors: Errors = "strict") -> Fragments:
    """The documents of a unit, in order, as fragments (text, last)."""
    for part in unit.slices:
        yield from read_slice(source, part, errors)


def _file_sizes(source: Source) -> list[tuple[str, int]]:
    """The files of a source in sorted order, with their sizes in bytes."""
    place = os.path.expanduser(source.place)
    if os.path.isdir(place):
        raise InputError(f"source {source.spec!r}: {place} is a directory; name its files: {source.kind}:{place}/*")
    found = [place] if os.path.isfile(place) else sorted(glob.glob(place, recursive=True))
    files = [path for path in found if os.path.isfile(path)]
    if not files:
        what = "only directories match" if found else "no file matches"
        raise InputError(
            f"source {source.spec!r}: {what} {place!r} (seen from {os.getcwd()}); mend the pattern, in quotes"
        )
    try:
        return [(path, os.stat(path).st_size) for path in files]
    except OSError as error:
        raise InputError(f"source {source.spec!r}: {error.filename}: {error.strerror}") from error


def _read_records(source: Source, part: Slice, errors: Errors) -> Iterator[tuple[str, bool]]:
    data = _data_source(source)
    for number in range(part.begin, part.end if part.end is not None else len(data)):
        record = data[number]
        if source.field not in record:
            raise InputError(
                f"source {source.spec!r}: a record has no field {source.field!r}, only {', '.join(record)}; "
                f"name the field: {source.kind}:{source.place}@{source.split}#FIELD"
            )
        value = record[source.field]
        if isinstance(value, bytes):
            try:
                value = value.decode("utf-8", errors)
            except UnicodeDecodeError as error:
                raise InputError(
                    f"source {source.spec!r}: record {number}, byte {error.start} is not UTF-8; pass --errors replace"
                ) from error
        if not isinstance(value, str):
            raise InputError(f"source {source.spec!r}: field {source.field!r} is not text but {type(value).__name__}")
        if value and not value.isspace():
            yield value, True


@functools.lru_cache(maxsize=8)
def _builder(source: Source):
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise InputError(
            f"source {source.spec!r} needs tensorflow_datasets, which is not installed: pip install 'jaxlm[tfds]'"
        ) from error
    if source.kind == "tfds-dir":
        path = Path(source.place).expanduser()
        if not path.is_dir():
            raise InputError(f"source {source.spec!r}: no directory {path}")
        try:
            return tfds.builder_from_directory(str(path))
        except Exception as error:  # TFDS raises many kinds
            raise InputError(f"source {source.spec!r}: {path} is not a prepared TFDS directory ({error})") from error
    try:
        builder = tfds.builder(source.place, file_format="array_record")
        builder.download_and_prepare()
    except Exception as error:  # TFDS raises many kinds: an unknown name, no network, no disk
        first = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        # Without TensorFlow most of the catalogue does not load, and TFDS says that there is no such data set.
        extra = "" if _has_tensorflow() else "; it may need TensorFlow: pip install 'jaxlm[tfds]'"
        raise InputError(f"source {source.spec!r}: TFDS cannot give it ({first}){extra}") from error
    return builder


@functools.lru_cache(maxsize=8)
def _data_source(source: Source):
    builder = _builder(source)
    if (splits := list(builder.info.splits)) and source.split.split("[")[0] not in splits:
        raise InputError(f"source {source.spec!r}: no split {source.split!r}; it has {', '.join(splits)}")
    try:
        return builder.as_data_source(split=source.split)
    except Exception as error:  # TFDS raises many kinds, for TFRecord files among others
        raise InputError(f"source {source.spec!r}: its records cannot be read by index ({error})") from error


def _record_bytes(source: Source) -> int:
    """Bytes of a record on average, or a guess where the data set does not say."""
    info = _builder(source).info
    split = info.splits[source.split] if len(info.splits) else None
    return int(split.num_bytes or 0) // split.num_examples if split and split.num_bytes and split.num_examples else 256


def open_split(name: str, split: str, data_dir: str | None) -> Any:
    """The rows of one split of a data set of TFDS's catalogue, by index, from `data_dir` or TFDS's own directory.

    InputError, one line, where a package is missing or the set cannot be had.
    """
    where = f"task-dir tfds:{data_dir}" if data_dir else "task-dir tfds"
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise InputError(f"{where}: {error}; {TFDS_EXTRA}") from None
    try:
        return tfds.data_source(name, split=split, data_dir=data_dir)
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        # Without TensorFlow, GLUE's code does not load and TFDS says that there is no such data set.
        if not _has_tensorflow():
            raise InputError(
                f"{where}: {name} is not prepared there as ArrayRecord, and preparing it needs TensorFlow; "
                f"{TFDS_EXTRA} ({first})"
            ) from None
        raise InputError(
            f"{where}: {name} {split}: {first}; see that it can be downloaded or is prepared there"
        ) from None


def _has_tensorflow() -> bool:
    return importlib.util.find_spec("tensorflow") is not None
