"""Lines of a text file or of standard input, with their numbers, in bounded memory.

Encoding is UTF-8, and a byte order mark at the very start is dropped. Lines break at `\\n` only and lose one trailing
`\\r` (never `str.splitlines`, which also breaks at U+0085, U+2028 and form feeds inside sentences).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from jaxlm.errors import InputError
from jaxlm.reading.files import input_name, open_input

Errors = Literal["strict", "replace"]

BYTE_ORDER_MARK = "\ufeff"
# The beginnings of files that are not text.
BINARY = {b"PK\x03\x04": "an Excel file or an archive", b"PAR1": "a Parquet file", b"\x1f\x8b": "a gzip file"}
CONVERT = "convert the file to UTF-8"
_CHUNK = 1 << 20


class Lines:
    """Iterates over (number from 1, text without its line end) of the lines of a file, or of standard input for `-`.

    Args:
      errors: bytes that are not UTF-8 raise an error (strict), or become U+FFFD (replace).
      begin, end: only lines that start at bytes [begin, end) are read, and numbers count from the first of them.
      decompress: whether .gz, .xz and .zst are decompressed.
      remedy: the end of the error for bytes that are not UTF-8.

    Attributes: start, the offset of the current line in the file.

    Raises:
      InputError: a file that cannot be read, or bytes that are not UTF-8, with the line and the offset in the file.
    """

    def __init__(
        self,
        path: Path | str,
        errors: Errors = "strict",
        *,
        begin: int = 0,
        end: int | None = None,
        decompress: bool = False,
        encoding: str = "utf-8",
        remedy: str = CONVERT,
    ) -> None:
        self.path, self.errors, self.begin, self.end, self.decompress = path, errors, begin, end, decompress
        self.encoding, self.remedy = encoding, remedy
        self.start = begin

    def __iter__(self) -> Iterator[tuple[int, str]]:
        encoding, errors, end = self.encoding, self.errors, self.end
        with open_input(self.path, decompress=self.decompress) as stream:
            offset = 0
            if self.begin > 0:
                stream.seek(self.begin - 1)
                offset = self.begin - 1 + len(stream.readline())
            for number, line in enumerate(stream, 1):
                if end is not None and offset >= end:
                    return
                self.start = offset
                offset += len(line)
                line = line.removesuffix(b"\n").removesuffix(b"\r")
                try:
                    text = line.decode(encoding, errors)
                except UnicodeDecodeError as error:
                    raise self._not_utf8(number, error) from None
                yield number, text if self.start else text.removeprefix(BYTE_ORDER_MARK)

    def text(self) -> str:
        """Return all lines, joined by line feeds."""
        return "\n".join(text for _, text in self)

    def where(self, number: int) -> str:
        """Return the place of a line, for messages. The lines before `begin` are counted here, where one is needed."""
        if self.begin > 0:
            with open_input(self.path, decompress=self.decompress) as stream:
                left, chunk = self.begin, b""
                while left > 0 and (chunk := stream.read(min(left, _CHUNK))):
                    number += chunk.count(b"\n")
                    left -= len(chunk)
            number += not chunk.endswith(b"\n")  # a line that begins before `begin` and ends after it
        return f"{input_name(self.path)} line {number}"

    def _not_utf8(self, number: int, error: UnicodeDecodeError) -> InputError:
        kind = next((kind for magic, kind in BINARY.items() if not self.start and error.object.startswith(magic)), None)
        if kind is not None:
            return InputError(
                f"{input_name(self.path)} must be text, got {kind}; save it as CSV, or give it its own suffix"
            )
        return not_utf8(error, self.where(number), self.start, self.remedy)


def not_utf8(error: UnicodeDecodeError, where: str, offset: int = 0, remedy: str = CONVERT) -> InputError:
    """Return the error for bytes that begin at `offset` of a file or a value and are not UTF-8."""
    byte = error.object[error.start]
    return InputError(f"{where}: byte 0x{byte:02x} at offset {offset + error.start} is not UTF-8; {remedy}")
