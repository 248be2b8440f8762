"""Parquet files, and Arrow streams of Hugging Face's `datasets.save_to_disk`, read by column with pyarrow.

A file is a sequence of parts, the row groups of a Parquet file (https://parquet.apache.org/docs/file-format) or the
record batches of an Arrow stream (https://arrow.apache.org/docs/format/Columnar.html). Parts are read independently and
in bounded memory. `save_to_disk` writes a directory with `state.json`, which lists the files, and for several splits
`dataset_dict.json` with one such directory per split. The package `datasets` is not needed.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from jaxlm.errors import InputError
from jaxlm.files import read_object
from jaxlm.reading.lines import Errors, not_utf8
from jaxlm.storage import is_url, open_place
from jaxlm.wording import lacks_field

Kind = Literal["parquet", "arrow"]

EXTRA = "run launch/setup.sh cpu parquet, or pip install 'jaxlm[parquet]'"
_ROWS = 1024  # rows decoded at a time
_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"  # end of an Arrow stream, which its writer appends when it is closed


class ColumnFile:
    """An open Parquet file or Arrow stream.

    Attributes: schema, a pyarrow.Schema; path.

    Raises:
      InputError: pyarrow is not installed, or the file cannot be read.
    """

    def __init__(self, path: str, kind: Kind) -> None:
        self.path, self._kind = path, kind
        self._arrow = _pyarrow(path)
        with self._reading():
            file = open_place(path)
            if not is_url(path):
                file.close()  # it is no device or pipe, which may never end; pyarrow's own reader is faster
            if kind == "parquet":
                self._parquet = self._arrow.parquet.ParquetFile(
                    file if is_url(path) else path,
                    pre_buffer=False,
                    buffer_size=1 << 20,
                    page_checksum_verification=True,
                )
                self.schema = self._parquet.schema_arrow
            else:
                self._check_end()
                self.schema = self._stream().schema

    def sizes(self, field: str) -> list[int]:
        """Return the bytes of a field in each part, uncompressed. InputError if there is no such field."""
        names = self.column(field)
        with self._reading():
            if self._kind == "arrow":
                return [max(1, column.nbytes) for _, column in self._columns(names, 0, None)]
            path, sizes = ".".join(names), []
            for number in range(self._parquet.num_row_groups):
                group = self._parquet.metadata.row_group(number)
                columns = (group.column(index) for index in range(group.num_columns))
                sizes.append(max(1, sum(c.total_uncompressed_size for c in columns if c.path_in_schema == path)))
            return sizes

    def column(self, field: str) -> list[str]:
        """Return the names that lead to a field of text: the column, or for `a.b` field b of the structs in column a.

        InputError if the file has no such field, or if it is not text.
        """
        arrow, names = self._arrow, [field]
        if field not in self.schema.names:
            names = field.split(".")
        kind: Any = arrow.struct(list(self.schema))
        for name in names:
            if not arrow.types.is_struct(kind) or kind.get_field_index(name) < 0:
                raise InputError(lacks_field(self.path, field, self.schema.names, "name the field with #FIELD"))
            kind = kind.field(name).type
        held = kind.value_type if arrow.types.is_dictionary(kind) else kind
        if not any(getattr(arrow.types, f"is_{name}")(held) for name in _TEXT):
            raise InputError(f"{self.path}: field {field!r} must be text, got {kind}; name another field with #FIELD")
        return names

    def texts(self, field: str, begin: int, end: int | None, errors: Errors, remedy: str) -> Iterator[str]:
        """Yield field `field` of each row of parts [begin, end); null gives an empty text.

        InputError, which ends in `remedy`, for bytes that are not UTF-8 with errors="strict".
        """
        with self._reading():
            for row, column in self._columns(self.column(field), begin, end):
                for number, content in enumerate(self._bytes(column), row + 1):
                    try:
                        yield "" if content is None else content.decode("utf-8", errors)
                    except UnicodeDecodeError as error:
                        raise not_utf8(error, f"{self.path} row {number}: field {field!r}", remedy=remedy) from None

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield every row as Python values by column name: strings, numbers, lists, dictionaries and None."""
        with self._reading():
            for batch in self._batches(None, 0, None):
                try:
                    yield from batch[1].to_pylist()
                except UnicodeDecodeError as error:
                    raise InputError(
                        f"{self.path}: one of the rows from {batch[0] + 1} on is not UTF-8; convert the file"
                    ) from error

    def _columns(self, names: list[str], begin: int, end: int | None) -> Iterator[tuple[int, Any]]:
        """Yield (number of the first row, array of a field) for the batches of parts [begin, end)."""
        for row, batch in self._batches(".".join(names), begin, end):
            column = batch.column(batch.schema.get_field_index(names[0]))
            if names[1:]:
                column = self._arrow.compute.struct_field(column, names[1:])
            yield row, column

    def _batches(self, column: str | None, begin: int, end: int | None) -> Iterator[tuple[int, Any]]:
        """Yield (number of the first row, record batch) for parts [begin, end). column: None reads all of them."""
        row = 0
        if self._kind == "arrow":
            for number, batch in enumerate(self._stream()):
                if end is not None and number >= end:
                    return
                if number >= begin:
                    yield row, batch
                row += batch.num_rows
            return
        groups = range(begin, self._parquet.num_row_groups if end is None else end)
        row = sum(self._parquet.metadata.row_group(number).num_rows for number in range(begin))
        columns = None if column is None else [column]
        for batch in self._parquet.iter_batches(_ROWS, list(groups), columns=columns, use_threads=False):
            yield row, batch
            row += batch.num_rows

    def _bytes(self, column: Any) -> list[bytes | None]:
        """Return the values of an array of text, not decoded: pyarrow knows no replacement of bad bytes."""
        dictionary = self._arrow.types.is_dictionary(column.type)
        texts = (column.dictionary if dictionary else column).cast(self._arrow.large_binary())
        texts.validate(full=True)  # offsets of a damaged stream may point anywhere
        return (texts.take(column.indices) if dictionary else texts).to_pylist()

    def _stream(self) -> Any:
        return self._arrow.ipc.open_stream(self._arrow.memory_map(self.path))

    def _check_end(self) -> None:
        with open_place(self.path) as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - len(_END)))
            if file.read() != _END:
                raise InputError(f"{self.path} is damaged or truncated: it does not end as an Arrow stream; replace it")

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Convert errors of pyarrow and of the file into an InputError that names the file."""
        try:
            yield
        except (self._arrow.ArrowException, OSError, EOFError) as error:
            why = getattr(error, "strerror", None) or (str(error).splitlines() or [type(error).__name__])[0][:200]
            kind = "a Parquet file" if self._kind == "parquet" else "an Arrow stream"
            raise InputError(f"{self.path} cannot be read as {kind} ({why}); replace it") from error


_TEXT = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")


def saved_files(directory: str, split: str) -> list[str]:
    """Return the Arrow files of a split in a directory of `datasets.save_to_disk`, in the order of the rows.

    split: empty for the only one of the directory, or `train` if there are several.

    Raises:
      InputError: not such a directory, no such split, or a missing file.
    """
    place = Path(directory).expanduser()
    if not place.is_dir():
        raise InputError(f"hf-dataset: must name a directory of datasets.save_to_disk, got {directory}; fix the path")
    if (place / "dataset_dict.json").is_file():
        splits = _json(place / "dataset_dict.json").get("splits")
        if not isinstance(splits, list) or (split or "train") not in splits:
            raise InputError(
                f"{directory}: the split must be one of {', '.join(map(str, splits or []))}, got {split or 'train'!r}; "
                "name it with hf-dataset:DIR@SPLIT"
            )
        place, split = place / (split or "train"), ""
    if not (place / "state.json").is_file():
        raise InputError(
            f"hf-dataset:{directory} must be a directory of datasets.save_to_disk, got one without state.json; "
            "for Parquet files use parquet:GLOB"
        )
    state = _json(place / "state.json")
    if split and split != state.get("_split"):
        raise InputError(f"{directory}: the split must be {state.get('_split')!r}, got {split!r}; leave @{split} out")
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise InputError(f"{directory} holds a selection of rows; call flatten_indices() and save it again")
    try:
        names = [Path(entry["filename"]).name for entry in state["_data_files"]]
    except (KeyError, TypeError):
        raise InputError(f"{place / 'state.json'} must list _data_files; save the data set again") from None
    for name in names:
        if not (place / name).is_file():
            raise InputError(f"{place / name}: no such file, but state.json lists it; save the data set again")
    return [str(place / name) for name in names]


def _json(path: Path) -> dict[str, Any]:
    try:
        return read_object(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}; save the data set again") from None


def _pyarrow(path: str) -> Any:
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise InputError(f"{path}: reading it needs pyarrow, which is not installed; {EXTRA}") from error
    return pyarrow
