"""The description of a store under construction: its counts, which grow by whole documents, and the final JSON object.

The counts are a dictionary that a writer saves: `tokens`, `documents`, `sections`, and, if they are kept, `characters`,
`sentences` and `unknown`, the words without an id.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from jaxlm.data.store import FORMAT, VERSION, Section, description_fingerprint
from jaxlm.text import Tokenizer

INT64 = np.dtype("<i8")


def fresh_counts() -> dict[str, Any]:
    """Return the counts of a store without a document."""
    return {"parts": 0, "tokens": 0, "documents": 0, "characters": 0, "sections": []}


def begin_section(counts: dict[str, Any], source: str, weight: float | None) -> None:
    """Begin the section of `source`; what is counted later belongs to it."""
    section = Section(source, weight, counts["documents"], 0, counts["tokens"], 0, 0, 0)
    counts["sections"].append(asdict(section))


def count(
    counts: dict[str, Any], *, tokens: int, documents: int, text_bytes: int, words: int, characters: int | None
) -> None:
    """Count whole documents. characters: None if they were not counted, and then not those of the store."""
    counts["tokens"] += tokens
    counts["documents"] += documents
    if characters is None:
        counts.pop("characters", None)
    elif "characters" in counts:
        counts["characters"] += characters
    section = counts["sections"][-1]
    section["tokens"] += tokens
    section["documents"] += documents
    section["bytes"] += text_bytes
    section["words"] += words


def growing_arrays(counts: dict[str, Any], tokens: np.dtype) -> list[tuple[str, np.dtype, int]]:
    """Return name and type of each array that grows, and the items that it has. tokens: the type of the ids."""
    found = [("tokens", tokens, counts["tokens"]), ("document_starts", INT64, counts["documents"])]
    if "sentences" in counts:
        found.append(("sentence_starts", INT64, counts["sentences"]))
    if (unknown := counts.get("unknown")) is not None:
        found.append(("unknown_places", INT64, unknown["tokens"]))
        found.append(("unknown_words", np.dtype("<i4"), unknown["tokens"]))
        found.append(("spellings", np.dtype("u1"), unknown["bytes"]))
        found.append(("spelling_starts", INT64, unknown["words"]))
    return found


def last_starts(counts: dict[str, Any]) -> dict[str, int]:
    """Return the last item of each array of offsets, the end of what it points to, which follows those that grow."""
    ends = {"document_starts": counts["tokens"]}
    ends |= {"sentence_starts": counts["tokens"]} if "sentences" in counts else {}
    return ends | ({"spelling_starts": counts["unknown"]["bytes"]} if "unknown" in counts else {})


def all_arrays(counts: dict[str, Any], tokenizer: Tokenizer, tokens: np.dtype) -> list[tuple[str, np.dtype, int]]:
    """Return name, type and items of each array of the complete store."""
    ends = last_starts(counts)
    first, starts, *others = ((name, dtype, n + (name in ends)) for name, dtype, n in growing_arrays(counts, tokens))
    return [first, starts, ("token_counts", INT64, tokenizer.size), *others]


def described(
    counts: dict[str, Any],
    tokenizer: Tokenizer,
    tokens: np.dtype,
    digests: Mapping[str, str],
    arguments: dict[str, Any],
    inputs: list[dict[str, Any]],
) -> dict[str, Any]:
    """Return the description. digests: the SHA-256 of each array. arguments, inputs: recorded as they are."""
    description: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "documents": counts["documents"],
        "tokens": counts["tokens"],
        "bytes": sum(section["bytes"] for section in counts["sections"]),
        "words": sum(section["words"] for section in counts["sections"]),
        "sections": counts["sections"],
        "tokenizer": {
            "kind": tokenizer.kind,
            "size": tokenizer.size,
            "fingerprint": tokenizer.fingerprint,
            "end": tokenizer.specials.get("end"),
        },
        "arguments": arguments,
        "inputs": inputs,
        "arrays": {
            name: {
                "file": f"{name}.bin",
                "dtype": dtype.str,
                "shape": [length],
                "bytes": length * dtype.itemsize,
                "sha256": digests[name],
            }
            for name, dtype, length in all_arrays(counts, tokenizer, tokens)
        },
    }
    description |= {name: counts[name] for name in ("sentences", "unknown", "characters") if name in counts}
    description["fingerprint"] = description_fingerprint(description)
    return description


def description_text(description: dict[str, Any]) -> bytes:
    """Return the content of the description's file."""
    return (json.dumps(description, indent=1, ensure_ascii=False) + "\n").encode()
