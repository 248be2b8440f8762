"""View of a token store: its counts and some of its documents, decoded."""

from collections.abc import Iterator

import numpy as np

from jaxlm.data.store import Store
from jaxlm.text import Tokenizer
from jaxlm.views.text import HEAD, TEXT, indented, ratio, truncated
from jaxlm.wording import counted

SENTENCES = 8  # sentences of a document that are shown


def store_lines(store: Store, count: int) -> Iterator[str]:
    """Yield counts per section, the tokenizer, and `count` documents spread over the store."""
    tokenizer = store.tokenizer()
    yield f"token store {store.path}"
    documents = counted(store.documents, "document")
    yield f"  {documents}, {store.num_tokens:,} tokens, {store.words:,} words, {store.bytes:,} bytes"
    yield (
        f"  {ratio(store.bytes, store.num_tokens)} bytes per token, {ratio(store.num_tokens, store.words)} tokens per "
        f"word, unigram entropy {store.unigram_entropy():.4f} nats per token"
    )
    if store.sentences is not None:
        yield f"  {store.sentences:,} sentences, {ratio(store.num_tokens, store.sentences)} tokens per sentence"
    yield f"  fingerprint {store.fingerprint[:16]}"
    for section in store.sections:
        weight = "" if section.weight is None else f", weight {section.weight:g}"
        yield f"  {section.source}: {counted(section.documents, 'document')}, {section.tokens:,} tokens{weight}"
    yield from tokenizer_lines(tokenizer)
    counts = np.asarray(store.token_counts)
    most = np.argsort(-counts, kind="stable")[:12]
    often = ", ".join(f"{tokenizer.pieces([i])[0]!r} {counts[i]:,}" for i in most if counts[i])
    yield f"  most frequent: {often}; {int((counts == 0).sum()):,} of {len(counts):,} ids never occur"
    for document in np.unique(np.linspace(0, store.documents - 1, min(count, store.documents)).astype(int)):
        first, end = (int(offset) for offset in store.document_starts[document : document + 2])
        ids = np.asarray(store.tokens[first : min(end, first + TEXT)]).tolist()
        yield ""
        yield f"document {document}: {end - first:,} tokens from {first:,}"
        if store.sentence_starts is None:
            yield from indented(truncated(tokenizer.decode(ids), end - first > len(ids)))
        else:
            yield from _sentence_lines(store, tokenizer, first, end)
        yield f"    tokens: {' '.join(map(repr, tokenizer.pieces(ids[:HEAD])))}{' …' if end - first > HEAD else ''}"


def _sentence_lines(store: Store, tokenizer: Tokenizer, first: int, end: int) -> Iterator[str]:
    """Yield the first sentences of the document in tokens first … end, one line each."""
    starts = np.asarray(store.sentence_starts)
    begin, stop = np.searchsorted(starts, (first, end)).tolist()
    yield f"    {counted(stop - begin, 'sentence')}"
    for k in range(begin, min(stop, begin + SENTENCES)):
        ids = np.asarray(store.tokens[starts[k] : min(starts[k + 1], starts[k] + TEXT)]).tolist()
        yield from indented(f"{k - begin}: {truncated(tokenizer.decode(ids).strip())}")
    if stop - begin > SENTENCES:
        yield "    | …"


def tokenizer_lines(tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the kind, size and special tokens of a tokenizer."""
    specials = ", ".join(f"{role} {i}" for role, i in sorted(tokenizer.specials.items(), key=lambda item: item[1]))
    yield f"  tokenizer {tokenizer.kind}, {tokenizer.size:,} ids, fingerprint {tokenizer.fingerprint[:16]}"
    yield f"  special tokens: {specials or 'none'}"
