"""Checks that decide whether a preparation begins, continues or is complete, by its arguments and inputs."""

import contextlib
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxlm.data.sources import Source, Unit, list_units
from jaxlm.data.store import DESCRIPTION, Store, open_store, partial_path
from jaxlm.errors import InputError
from jaxlm.files import parse_json, write_file
from jaxlm.host import LockHeld, lock_file
from jaxlm.progress import Output
from jaxlm.text import Case, tokenizer_from_spec
from jaxlm.wording import counted

log = logging.getLogger(__name__)

# Defaults of arguments that a store does not record: it is older than they, or a sample was not asked for.
EARLIER: dict[str, Any] = {"sentences": "auto", "language": "en", "wordpiece_case": "uncased", "sample": None}
EARLIER |= {"transpose": "", "stretch": ""}


def existing_store(
    output: Path, arguments: dict[str, Any], sources: tuple[Source, ...], case: Case, messages: Output
) -> Store:
    """Return the complete store at `output` if these arguments made it; raise InputError otherwise.

    case: of the tokenizer, if its vocabulary is a published one.
    """
    if not (output / DESCRIPTION).is_file():
        kind = "file" if output.is_file() else "directory with other content"
        raise InputError(f"--output must be new or a token store, got {output}, a {kind}; name another --output")
    store = open_store(output)
    made = store.description["arguments"]
    for field, value in (EARLIER | arguments).items():
        if (old := made.get(field, EARLIER.get(field))) != value:
            flag = field.replace("_", "-")
            raise InputError(
                f"{output} was made with --{flag} {shown(old)}, not {shown(value)}; name another --output, or delete it"
            )
    try:
        inputs = [list_units(source, number)[1] for number, source in enumerate(sources)]
    except InputError as error:
        messages.say(f"note: the sources can no longer be read ({error})")
        inputs = store.description["inputs"]
    if inputs != store.description["inputs"]:
        pairs = zip(store.description["inputs"], inputs, strict=True)
        changed = next(old["source"] for old, new in pairs if old != new)
        raise InputError(
            f"{output} is complete, but source {changed!r} has changed since; name another --output, or delete it"
        )
    _check_tokenizer(store, arguments["tokenizer"], case)
    shutil.rmtree(partial_path(output), ignore_errors=True)
    messages.say(f"complete already: {summary(store)}")
    return store


def _check_tokenizer(store: Store, spec: str, case: Case) -> None:
    if spec.startswith("train-"):
        return
    try:
        tokenizer = tokenizer_from_spec(spec, case)
    except InputError:
        return  # its files are gone, but the store has its own copy
    if tokenizer.fingerprint != store.tokenizer_fingerprint:
        raise InputError(f"{store.path} was made with another tokenizer than {spec!r} is now; name another --output")


def begin_or_continue(partial: Path, plan: dict[str, Any]) -> bool:
    """Return True if the same plan was begun before; raise InputError if another plan was."""
    file = partial / "plan.json"
    try:
        begun = parse_json(file.read_bytes())
    except (FileNotFoundError, ValueError):
        write_file(file, json.dumps(plan).encode())
        return False
    remedy = f"name another --output, or delete {partial} to start over"
    for field, value in (EARLIER | plan["arguments"]).items():
        old = begun["arguments"].get(field, EARLIER.get(field))
        if old == value or (field == "errors" and value == "replace"):
            continue  # text that was read strictly has nothing to replace
        raise InputError(
            f"{partial} was begun with --{field.replace('_', '-')} {shown(old)}, not {shown(value)}; {remedy}"
        )
    if begun.get("version") != plan["version"]:
        raise InputError(f"{partial} was begun by another version of jaxlm; {remedy}")
    if begun["unit_bytes"] != plan["unit_bytes"]:
        raise InputError(f"{partial} was begun with --unit-bytes {begun['unit_bytes']}; {remedy}")
    if begun["units"] != plan["units"]:
        raise InputError(f"the sources have changed since {partial} was begun; {remedy}")
    write_file(file, json.dumps(plan).encode())
    return True


@contextlib.contextmanager
def locked(partial: Path) -> Iterator[None]:
    """Lock the partial store within the context. Raises InputError if another process holds the lock."""
    try:
        file = lock_file(partial / "lock")
    except LockHeld as holder:
        raise InputError(f"{partial} is in use by {holder}; wait for it or stop it") from None
    if file is None:
        log.warning("%s is on a file system without locks: make sure that only one jaxlm.prepare writes to it", partial)
    with file or contextlib.nullcontext():
        yield


def digest_of(units: list[Unit]) -> str:
    """Return a digest of all units with the sizes and modification times of their files."""
    digest = hashlib.sha256()
    for unit in units:
        for part in unit.slices:
            status = os.stat(part.path) if part.path else None
            state = [status.st_size, int(status.st_mtime)] if status else []
            digest.update(json.dumps([unit.source, part.path, part.begin, part.end, *state]).encode())
        if unit.documents is not None:
            digest.update(json.dumps(unit.documents).encode())
    return digest.hexdigest()


def summary(store: Store) -> str:
    """Return one line with the counts of a store."""
    sentences = "" if store.sentences is None else f"{counted(store.sentences, 'sentence')}, "
    named = [f"{s.source}: {counted(s.documents, 'document')}, {counted(s.tokens, 'token')}" for s in store.sections]
    parts = f" ({', '.join(named)})" if len(named) > 1 else ""
    return (
        f"{store.path}: {counted(store.documents, 'document')}, {sentences}{store.num_tokens:,} tokens, "
        f"{store.bytes:,} bytes, {store.words:,} words{parts}; vocabulary {store.vocab_size:,}, "
        f"{store.bytes / store.num_tokens:.2f} bytes per token"
    )


def shown(value: Any) -> str:
    """Return an argument's value as it is written on the command line."""
    return " ".join(map(str, value if isinstance(value, list) else [] if value is None else [value])) or "nothing"
