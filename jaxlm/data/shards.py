"""A shard: the tokens of one unit of input, made by one process, a pure function of the unit and the tokenizer.

Three files: `N.tokens` (ids), `N.lengths` (int64, ids in each document) and, written last, `N.json` with the counts.
A shard whose JSON is there is whole. Shards are made by worker processes and read by whoever joins them to a store.
"""

import json
import multiprocessing
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from jaxlm.data.files import Errors, Fragments
from jaxlm.data.sources import Source, Unit, read_unit
from jaxlm.data.store import token_dtype, write_atomic
from jaxlm.errors import InputError, RunError
from jaxlm.text import Tokenizer, load_tokenizer

# Texts are encoded in blocks of about this many characters where the tokenizer allows it: libraries slow down on longer
# ones (SentencePiece from 5.7 to 2.1 MB/s on whole books).
BLOCK = 500

# Characters encoded in one call, which bounds memory.
BATCH = 1 << 18


@dataclass(frozen=True)
class Shard:
    """Counts of one shard. bytes, words: of its text."""

    number: int
    tokens: int
    documents: int
    bytes: int
    words: int


@dataclass(frozen=True)
class Job:
    """What every worker knows: where tokenizer and shards lie, the sources, what to do with bytes not UTF-8."""

    tokenizer: Path
    shards: Path
    sources: tuple[Source, ...]
    errors: Errors


def make_shard(job: Job, tokenizer: Tokenizer, number: int, unit: Unit) -> Shard:
    """Encode a unit and write its shard; a shard that is there already is taken as it is."""
    if (shard := find_shard(job, number)) is not None:
        return shard
    prefix = job.shards / str(number)
    temporary = {name: job.shards / f".{number}.{name}.{os.getpid()}" for name in ("tokens", "lengths")}
    dtype = token_dtype(tokenizer.size)
    tokens = documents = text_bytes = words = 0
    with temporary["tokens"].open("wb") as token_file, temporary["lengths"].open("wb") as length_file:
        fragments = read_unit(job.sources[unit.source], unit, job.errors)
        for ids, lengths, more_bytes, more_words in encode_documents(fragments, tokenizer):
            token_file.write(ids.astype(dtype, copy=False).data)
            length_file.write(lengths.data)
            tokens += len(ids)
            documents += len(lengths)
            text_bytes += more_bytes
            words += more_words
    for name, path in temporary.items():
        os.replace(path, f"{prefix}.{name}")
    shard = Shard(number, tokens, documents, text_bytes, words)
    write_atomic(prefix.with_name(f"{number}.json"), json.dumps(vars(shard)).encode())
    return shard


def find_shard(job: Job, number: int) -> Shard | None:
    """The shard of that number where it is whole, else None."""
    try:
        return Shard(**json.loads((job.shards / f"{number}.json").read_bytes()))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def read_shard(job: Job, shard: Shard, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Ids (tokens,) and lengths (documents,) of a shard, mapped."""
    arrays = []
    for name, kind, count in (("tokens", dtype, shard.tokens), ("lengths", np.dtype("<i8"), shard.documents)):
        path = job.shards / f"{shard.number}.{name}"
        size = path.stat().st_size if path.exists() else -1
        if size != count * kind.itemsize:
            raise RunError(f"{path} has {size} bytes instead of {count * kind.itemsize}: delete {job.shards.parent}")
        arrays.append(np.memmap(path, kind, "r") if count else np.zeros(0, kind))
    return arrays[0], arrays[1]


def remove_shard(job: Job, shard: Shard) -> None:
    for name in ("json", "tokens", "lengths"):
        (job.shards / f"{shard.number}.{name}").unlink(missing_ok=True)


def encode_documents(fragments: Fragments, tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, np.ndarray, int, int]]:
    """Encode documents as (ids, lengths of the documents that end here, bytes, words), a batch at a time.

    Each document is followed by the tokenizer's `end` where it has one. Ids of a long document may come in several
    batches; its length comes with the last.
    """
    end = [tokenizer.specials["end"]] if "end" in tokenizer.specials else []
    texts: list[str] = []
    ends: list[bool] = []
    characters = open_length = 0

    def encoded() -> tuple[np.ndarray, np.ndarray, int, int]:
        nonlocal characters, open_length
        ids = tokenizer.encode_batch(texts)
        lengths = []
        for k, last in enumerate(ends):
            if last:
                ids[k] += end
            open_length += len(ids[k])
            if last:
                if open_length:  # a text may have no id at all, in a vocabulary without an end
                    lengths.append(open_length)
                open_length = 0
        count = sum(map(len, ids))
        flat = np.fromiter(chain.from_iterable(ids), token_dtype(tokenizer.size), count)
        text_bytes = sum(len(text) if text.isascii() else len(text.encode()) for text in texts)
        words = sum(len(text.split()) for text in texts)
        texts.clear()
        ends.clear()
        characters = 0
        return flat, np.array(lengths, "<i8"), text_bytes, words

    for text, last in blocks(fragments, tokenizer):
        texts.append(text)
        ends.append(last)
        characters += len(text)
        if characters >= BATCH:
            yield encoded()
    if texts:
        yield encoded()


def blocks(fragments: Fragments, tokenizer: Tokenizer) -> Fragments:
    """The same documents in blocks of about BLOCK characters, cut where it does not change ids; whole otherwise."""
    waiting: list[str] = []
    for text, last in fragments:
        if waiting and not last and (not tokenizer.cuts or not (" " in text or "\n" in text)):
            waiting.append(text)  # no place to cut: what waits is not looked through again
            continue
        text = "".join([*waiting, text])
        waiting.clear()
        begin = 0
        while tokenizer.cuts and len(text) - begin > BLOCK:
            place = reach = 0
            while not place and begin + reach < len(text):
                reach = max(BLOCK, 2 * reach)
                place = tokenizer.cut(text[begin : begin + reach + 1], reach)
            if not place:
                break
            yield text[begin : begin + place], False
            begin += place
        if last:
            yield text[begin:], True
        else:
            waiting.append(text[begin:])


def make_shards(job: Job, units: Sequence[tuple[int, Unit]], workers: int, tokenizer: Tokenizer) -> Iterator[Shard]:
    """Make the shards of numbered units with `workers` processes; each is given out when it is done, in any order.

    One worker is this process itself. Raises InputError and RunError of a worker here; the others are stopped.
    """
    if min(workers, len(units)) <= 1:
        for number, unit in units:
            yield make_shard(job, tokenizer, number, unit)
        return
    context = multiprocessing.get_context("spawn")
    processes: dict[Any, BaseProcess] = {}
    try:
        todo = iter(units)
        asked: dict[Any, int] = {}
        for _ in range(min(workers, len(units))):
            connection: Any
            connection, other = context.Pipe()
            process: BaseProcess = context.Process(target=_work, args=(other, job), daemon=True)
            process.start()
            other.close()
            processes[connection] = process
            asked[connection] = 0

        def ask(connection: Any) -> None:
            if (task := next(todo, None)) is not None:
                connection.send(task)
                asked[connection] += 1

        # Each has one more unit waiting than it works on, so that none is idle while this process joins shards.
        for connection in [*asked, *asked]:
            with _alive(processes[connection]):
                ask(connection)
        while busy := [connection for connection in asked if asked[connection]]:
            for connection in wait(busy):
                with _alive(processes[connection]):
                    kind, answer = connection.recv()
                    asked[connection] -= 1
                    if kind == "shard":
                        ask(connection)
                if kind == "input":
                    raise InputError(answer)
                if kind == "failed":
                    raise RunError(answer)
                yield answer
    finally:
        for connection, process in processes.items():
            connection.close()
            process.terminate()
        for process in processes.values():
            process.join()


@contextmanager
def _alive(process: BaseProcess) -> Iterator[None]:
    """RunError where the process at the other end of a connection has died."""
    try:
        yield
    except (EOFError, OSError) as error:
        process.join()
        raise RunError(
            f"a worker process died (exit {process.exitcode}), perhaps for want of memory: try fewer --workers; "
            "the same command continues"
        ) from error


def _work(connection: Connection, job: Job) -> None:
    """A worker process: answers numbered units with shards until the connection closes."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()
    tokenizer = load_tokenizer(job.tokenizer)
    while True:
        try:
            number, unit = connection.recv()
        except EOFError:
            return
        answer: tuple[str, Shard | str]
        try:
            answer = ("shard", make_shard(job, tokenizer, number, unit))
        except InputError as error:
            answer = ("input", str(error))
        except RunError as error:
            answer = ("failed", str(error))
        except OSError as error:
            answer = (
                "failed",
                f"{error.filename or job.shards}: {error.strerror or error}; the same command continues",
            )
        except MemoryError:
            answer = ("failed", "a worker process ran out of memory: try fewer --workers; the same command continues")
        connection.send(answer)


def _end_with_parent() -> None:
    # A worker whose parent was killed must not go on writing beside the next start's workers.
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
