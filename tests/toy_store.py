"""Small token stores written at once from texts in memory."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from jaxlm.data.sentences import Sentences, borders_by, resolved
from jaxlm.data.shards import blocks, encode_documents
from jaxlm.data.store import Store, open_store, partial_path
from jaxlm.data.writer import StoreWriter
from jaxlm.text import Tokenizer


def write_store(
    path: str | Path,
    texts: Iterable[str] | dict[str, Iterable[str]],
    tokenizer: Tokenizer,
    weights: Sequence[float] | None = None,
    sentences: Sentences = "none",
    language: str = "en",
) -> Store:
    """Write a store of `texts`, or of source -> texts for several sections.

    sentences, language: how sentences are split, as in `jaxlm.prepare`.
    """
    parts = texts if isinstance(texts, dict) else {"memory": texts}
    path = Path(path)
    sentences = resolved(sentences, tokenizer)
    borders = None if sentences == "none" else borders_by(sentences, language)
    writer = StoreWriter(partial_path(path), tokenizer, sentences=borders is not None)
    for k, (source, documents) in enumerate(parts.items()):
        writer.begin_section(source, weights[k] if weights else None)
        fragments = ((text, True) for text in documents)
        encoded = list(encode_documents(blocks(fragments, tokenizer, borders), tokenizer))
        ids, lengths, starts = (
            np.concatenate([np.zeros(0, dtype), *(getattr(part, name) for part in encoded)])
            for name, dtype in (("ids", writer.dtype), ("lengths", "<i8"), ("sentences", "<i8"))
        )
        text_bytes, words = sum(part.bytes for part in encoded), sum(part.words for part in encoded)
        writer.append(ids, lengths, text_bytes, words, None if borders is None else starts)
    writer.finish(path, arguments={}, inputs=[])
    return open_store(path)
