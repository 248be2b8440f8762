"""A token store of a text file, for an evaluation of text that was not prepared."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from jaxlm.data.shards import blocks, encode_documents
from jaxlm.data.sources import list_units, parse_source, read_unit
from jaxlm.data.store import Store, open_store
from jaxlm.data.writer import StoreWriter
from jaxlm.errors import InputError
from jaxlm.text import Tokenizer


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
