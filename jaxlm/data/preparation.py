"""Preparation of a token store from text.

Worker processes stream the documents in bounded memory, one shard at a time, into OUTPUT.partial, which is renamed to
OUTPUT when it is complete. Below a URL the shards are objects in OUTPUT/partial, which are composed into the store. A
process that is killed at any moment loses no finished shard, and the same command continues. The same input gives the
same bytes for any number of workers.
"""

import contextlib
import dataclasses
import functools
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jaxlm import storage
from jaxlm.config import of_call
from jaxlm.data.composition import Composition
from jaxlm.data.estimate import Estimate, estimated, in_words, nearest_directory, requests
from jaxlm.data.pieces import copies_of
from jaxlm.data.plan import (
    Part,
    begin_or_continue,
    digest_of,
    existing_store,
    is_new,
    locked,
    parse_part,
    partial_place,
    summary,
)
from jaxlm.data.prepare_config import PrepareConfig, check, recorded_arguments
from jaxlm.data.ray_engine import RayEngine, check_engine, ray_engine
from jaxlm.data.sentences import Sentences, resolved
from jaxlm.data.shards import Job, LocalEngine, Shard, find_shard, find_shards, read_shard, remove_shard
from jaxlm.data.sources import UNIT_BYTES, Source, Unit, files_of, list_units, parse_source, read_unit, sampled
from jaxlm.data.store import VERSION, Store, open_store
from jaxlm.data.trained_tokenizer import make_tokenizer, tokenizer_for_estimate
from jaxlm.data.writer import StoreWriter
from jaxlm.errors import InputError, RunError, names_arguments
from jaxlm.files import remove_left
from jaxlm.host import cpu_cores
from jaxlm.progress import LOGGED, STANDARD, Output
from jaxlm.ranges import checked
from jaxlm.text import Case, Tokenizer
from jaxlm.text.specs import music_of
from jaxlm.wording import byte_size, counted, plain_number

# Memory of one document above which the estimate mentions it.
LARGE_MEMORY = 1 << 30


@names_arguments
def prepare_store(
    source: str | Sequence[str],
    *,
    tokenizer: str,
    output: str | Path,
    weights: Sequence[float] = (),
    sample: int | None = None,
    workers: int = 1,
    errors: Literal["strict", "replace"] = "strict",
    sentencepiece_model: Literal["bpe", "unigram"] = "bpe",
    transpose: str = "",
    stretch: str = "",
    minimum_count: int = 1,
    wordpiece_case: Case = "auto",
    sentences: Sentences = "auto",
    language: str = "en",
    unit_bytes: int = UNIT_BYTES,
    engine: str = "local",
    part: str = "",
    estimate: bool = False,
    messages: Output = LOGGED,
) -> dict[str, Any]:
    """Make a token store from text, or continue making it with the same arguments.

    Args:
      source: One source or several: `text:GLOB`, `lines:GLOB`, `jsonl:GLOB#FIELD`, `midi:GLOB` and others, as --source.
      tokenizer: train-sentencepiece:SIZE, train-wordpiece:SIZE, words:SIZE, bytes, hf:DIR and others, as --tokenizer.
      output: Directory of the store, or its URL: gs://BUCKET/NAME, s3://BUCKET/NAME or file:///NAME.
      weights: Sampling weights of the sources in training. Default: proportional to their tokens.
      sample: Number of random documents of each source to keep. Default: all documents.
      workers: Number of encoding processes, 0: one per core. More than one needs a script that is protected by
        `if __name__ == "__main__":`, as for Python's multiprocessing. The result does not depend on it.
      errors: strict: bytes that are not UTF-8 are an error. replace: such bytes become U+FFFD.
      sentencepiece_model: Model type of train-sentencepiece.
      transpose: LOW:HIGH in semitones: copies of each piece of midi:GLOB at each of these pitches.
      stretch: LOW:HIGH, factors of the duration: copies of each piece of midi:GLOB in steps of 0.025.
      minimum_count: Occurrences below which words:SIZE and characters:SIZE give a word or character no id.
      wordpiece_case: Case of text for a WordPiece vocabulary.
      sentences: Sentence boundaries in the store, which sentence pairs need: split, lines, none or auto.
      language: Code of the language for sentence splitting.
      unit_bytes: Bytes of text per unit of work.
      engine: local, ray or ray:HOST:PORT: processes of this machine, or the workers of a Ray cluster, as --engine.
      part: I/N: encode this part of the units only. The call without it makes the store from the parts.
      estimate: Only estimate tokens, disk, time and requests to object storage; nothing is written.
      messages: Destination of the messages: the logger `jaxlm`, or the standard streams.

    Returns:
      A dictionary: `store`, its directory or URL; `documents`, `tokens`, `words` and `bytes`, its counts; `vocabulary`,
      the size of its tokenizer. The counts are those of the part, if one was given and the store is not complete. With
      `estimate` it has, instead of the counts, `tokens`, `store_bytes`, `shard_bytes`, `core_hours`, `hosts`,
      `minutes`, `requests` and what they were computed from.

    Raises:
      InputError: An argument or a source is invalid, or another store is there. The message says how to fix it.
      RunError: A file could not be read or written, or a worker ended. The same call continues.

    Example:
      >>> store = jaxlm.prepare_store("text:books/*.txt", tokenizer="train-sentencepiece:300", output="stores/new")
      >>> store["documents"], store["vocabulary"]
      (2, 300)
    """
    config = of_call(PrepareConfig, locals(), output=str(output).rstrip("/"))
    try:
        if config.estimate:
            counts = estimate_only(config, messages)
        else:
            counts = encode_part(config, messages) if config.part else _counts_of(prepare(config, messages))
    except OSError as error:
        raise RunError(
            f"{error.filename or config.output}: {error.strerror or error}; rerun the same command to resume"
        ) from error
    return {"store": config.output} | counts


def prepare(config: PrepareConfig, messages: Output = STANDARD) -> Store:
    """Make the store, or continue making it, and open it. A complete store is only opened."""
    sources, arguments = _sources(config), recorded_arguments(config)
    if (store := _complete_store(config, sources, arguments, messages)) is not None:
        return store
    with _begun(config, sources, arguments, None, messages) as work:
        return _make(work)


def encode_part(config: PrepareConfig, messages: Output = STANDARD) -> dict[str, int]:
    """Make the shards of `config.part`, or continue making them. Returns their counts, those of a complete store."""
    part, sources, arguments = parse_part(config.part), _sources(config), recorded_arguments(config)
    if (store := _complete_store(config, sources, arguments, messages)) is not None:
        return _counts_of(store)
    with _begun(config, sources, arguments, part, messages) as work:
        job, tokenizer = work.job()
        own = [(k, unit) for k, unit in enumerate(work.units) if part.has(k)]
        shards = work.encode(job, tokenizer, own, own).values()
    messages.say(
        f"part {part} is done: {counted(len(own), 'unit')} of {len(work.units):,}; when all parts are, run the command "
        "without --part, which makes the store"
    )
    names = ("documents", "tokens", "words", "bytes")
    counts = {name: sum(getattr(shard, name) for shard in shards) for name in names}
    return counts | {"vocabulary": tokenizer.size}


def estimate_only(config: PrepareConfig, messages: Output = STANDARD) -> dict[str, Any]:
    """Print and return what the whole preparation takes with `config.workers`; nothing is written.

    The keys of the dictionary are the fields of `Estimate`, and `core_hours`, `hosts`, `minutes` and `requests`.
    """
    sources, arguments = _sources(config), recorded_arguments(config)
    units, inputs = _listed(config, sources, config.unit_bytes, messages)
    work = _Work(config, sources, arguments, units, inputs, partial_place(config.output), False, messages)
    work.describe()
    tokenizer, training = tokenizer_for_estimate(config, sources, work.training_units, messages)
    job, workers = work.job_with(tokenizer), config.workers or cpu_cores()
    found = estimated(job, units, tokenizer, workers, training)
    _say(found, config.output, messages)
    trained = len(units) if training else 0
    files = [one.get("files", 0) for one in inputs]
    asked = requests(files, units, len(job.files), workers, trained, found.store_bytes)
    for line in in_words(found, asked):
        messages.say(line)
    own = {"core_hours": found.core_hours, "hosts": found.hosts, "minutes": found.minutes}
    return dataclasses.asdict(found) | own | {"requests": asked}


def _counts_of(store: Store) -> dict[str, int]:
    counts = {"documents": store.documents, "tokens": store.num_tokens, "words": store.words, "bytes": store.bytes}
    return counts | {"vocabulary": store.vocab_size}


def _complete_store(
    config: PrepareConfig, sources: tuple[Source, ...], arguments: dict[str, Any], messages: Output
) -> Store | None:
    """Return the store at --output if it is complete, None if nothing is there. InputError for anything else."""
    if is_new(config.output):
        return None
    return existing_store(config.output, arguments, sources, config.wordpiece_case, messages)


@dataclass(frozen=True)
class _Work:
    """A preparation that is under way in the directory or below the URL `partial`.

    inputs: what the store records of each source. continues: True if it was begun before. check_lock: raises RunError
    if another process works there instead of this one.
    """

    config: PrepareConfig
    sources: tuple[Source, ...]
    arguments: dict[str, Any]
    units: list[Unit]
    inputs: list[dict[str, Any]]
    partial: str
    continues: bool
    messages: Output
    check_lock: Callable[[], None] = lambda: None

    def job(self) -> tuple[Job, Tokenizer]:
        """Return the settings of the workers, and the tokenizer, which is trained or read the first time."""
        self.describe()
        tokenizer = make_tokenizer(self.config, self.sources, self.training_units, self.partial, self.messages)
        job = self.job_with(tokenizer)
        if (shards := storage.local_path(job.shards)) is not None:
            shards.mkdir(exist_ok=True)
        return job, tokenizer

    def check_complete(self, counts: dict[str, Any]) -> None:
        """Raise InputError if a source has no document, or a file or an object was replaced since it was listed."""
        for section in counts["sections"]:
            if not section["documents"]:
                raise _no_documents(section["source"])
        listed = {part.file for unit in self.units for part in unit.slices if part.file}
        if gone := listed.difference(*map(files_of, self.sources)):
            place = min(file.place for file in gone)
            raise InputError(f"{place} has changed while it was read; delete {self.partial} to start over")

    def describe(self) -> None:
        """Print the sizes of the sources. InputError for one without a document."""
        for described in self.inputs:
            is_files = "files" in described
            size = counted(described["files"], "file") if is_files else counted(described["records"], "record")
            self.messages.say(f"source {described['source']}: {size}, {byte_size(described['bytes'])}")
        if self.continues:
            return
        for k, source in enumerate(self.sources):
            own = (unit for unit in self.units if unit.source == k)
            if not any(True for unit in own for _ in read_unit(source, unit, self.config.errors)):
                raise _no_documents(source.spec)

    def job_with(self, tokenizer: Tokenizer) -> Job:
        """Return the settings of the workers with this tokenizer; nothing is written."""
        config, directories = self.config, (f"{self.partial}/tokenizer", f"{self.partial}/shards")
        sentences, keeps = resolved(config.sentences, tokenizer), tokenizer.unknown_word is not None
        return Job(*directories, self.sources, config.errors, sentences, config.language, keeps)

    def training_units(self) -> list[Unit]:
        """Return the units that a tokenizer is trained on; they do not depend on --unit-bytes."""
        if self.config.unit_bytes == UNIT_BYTES:
            return self.units
        return _listed(self.config, self.sources, UNIT_BYTES, LOGGED)[0]

    def encode(
        self,
        job: Job,
        tokenizer: Tokenizer,
        own: list[tuple[int, Unit]],
        missing: list[tuple[int, Unit]],
        join: Callable[[], None] = lambda: None,
    ) -> dict[int, Shard]:
        """Make the shards that are missing of the process's own units. join: called at first and after each shard.

        Returns the shards of `missing` by their numbers.
        """
        shards = find_shards(job, [k for k, _ in missing])
        todo = [(k, unit) for k, unit in missing if k not in shards]
        messages = self.messages
        total, left = (sum(unit.size for _, unit in units) for units in (own, todo))
        if self.continues and len(todo) < len(own):
            messages.say(f"continuing: {len(own) - len(todo):,} of {len(own):,} units are done")
        done = total - left
        scale, name = (1e6, "MB") if total >= 1e7 else (1e3, "kB")
        with _engine(self.config) if todo else contextlib.nullcontext(LocalEngine(1)) as engine:
            if todo:
                found = estimated(job, [unit for _, unit in todo], tokenizer, engine.workers)
                free = _say(found, self.config.output, messages)
                if free is not None and found.store_bytes > free:
                    raise InputError(
                        f"{self.config.output} needs about {byte_size(found.store_bytes)}, but only {byte_size(free)} "
                        "are free; make room, or name another --output"
                    )
            with messages.progress(name, total / scale, done / scale) as progress:
                join()
                for shard in engine.shards(job, todo, tokenizer):
                    self.check_lock()
                    shards[shard.number] = shard
                    done += self.units[shard.number].size
                    progress.update(done / scale)
                    join()
        return shards


@contextlib.contextmanager
def _engine(config: PrepareConfig) -> Iterator[LocalEngine | RayEngine]:
    """Start or connect what makes the shards, and end it after the block."""
    workers = config.workers or cpu_cores()
    if (address := check_engine(config.engine)) is None:
        yield LocalEngine(workers)
        return
    with ray_engine(address, workers) as engine:
        yield engine


def _listed(
    config: PrepareConfig, sources: tuple[Source, ...], unit_bytes: int, messages: Output
) -> tuple[list[Unit], list[dict[str, Any]]]:
    """Return the units of all sources, or of a sample of their documents, and what describes each source."""
    units: list[Unit] = []
    inputs = []
    for number, source in enumerate(sources):
        more, described = list_units(source, number, unit_bytes)
        if config.sample is not None:
            more, total = sampled(source, more, config.sample, config.errors)
            messages.say(f"sample: {min(config.sample, total):,} of {total:,} documents of {source.spec}")
        units += more
        inputs.append(described)
    return units, inputs


@contextlib.contextmanager
def _begun(
    config: PrepareConfig,
    sources: tuple[Source, ...],
    arguments: dict[str, Any],
    part: Part | None,
    messages: Output,
) -> Iterator[_Work]:
    """Begin or continue a preparation and hold its lock within the context. InputError if another one was begun."""
    units, inputs = _listed(config, sources, config.unit_bytes, messages)
    partial = partial_place(config.output)
    if (directory := storage.local_path(partial)) is not None:
        directory.mkdir(parents=True, exist_ok=True)
    plan = {"version": VERSION, "arguments": arguments, "units": digest_of(units), "unit_bytes": config.unit_bytes}
    with locked(partial, part) as check_lock:
        continues = begin_or_continue(partial, plan)
        try:
            yield _Work(config, sources, arguments, units, inputs, partial, continues, messages, check_lock)
            return
        except InputError as error:
            refused = error
    # If nothing of value was made, the corrected command must not find these files.
    with contextlib.suppress(InputError), locked(partial, None):
        is_made = "writer.json" in storage.names(partial)
        if not is_made and not any(name.endswith(".json") for name in storage.names(f"{partial}/shards")):
            storage.remove_tree(partial)
    raise refused


def _make(work: _Work) -> Store:
    """Encode what is missing, join all shards, and return the complete store."""
    began, output = time.monotonic(), work.config.output
    (_composed if storage.is_url(output) else _appended)(work, *work.job())
    store = open_store(output)
    work.messages.say(f"{summary(store)}; {time.monotonic() - began:.0f} s")
    return store


def _appended(work: _Work, job: Job, tokenizer: Tokenizer) -> None:
    """Make the store in a directory: shards are appended as soon as those before are there, and then removed."""
    remove_left(Path(job.shards), ".*", 0.0)
    writer = StoreWriter(Path(work.partial), tokenizer, sentences=job.sentences != "none")
    numbered = list(enumerate(work.units))
    join = functools.partial(join_shards, job, work.units, writer, work.config.weights)
    work.encode(job, tokenizer, numbered, numbered[writer.parts :], join)
    work.check_complete(writer.state)
    writer.finish(Path(work.config.output), arguments=work.arguments, inputs=work.inputs)


def _composed(work: _Work, job: Job, tokenizer: Tokenizer) -> None:
    """Make the store at a URL: its objects are composed when all shards are there."""
    numbered, url = list(enumerate(work.units)), work.config.output
    shards = work.encode(job, tokenizer, numbered, numbered)
    work.messages.say(f"joining {counted(len(shards), 'shard')} at {url}")
    sections = [unit.source for unit in work.units]
    composition = Composition(url, work.partial, job, tokenizer, sections, work.config.weights)
    counts, parts = composition.join([shards[k] for k, _ in numbered])
    work.check_complete(counts)
    composition.finish(counts, parts, work.arguments, work.inputs, work.check_lock)


def _sources(config: PrepareConfig) -> tuple[Source, ...]:
    """Check the arguments and return the sources; pieces of music have the words of the tokenizer."""
    check(checked(config))
    check_engine(config.engine)
    sources = tuple(parse_source(spec) for spec in config.source)
    if any(source.is_music for source in sources):
        copies = copies_of(music_of(config.tokenizer), config.transpose, config.stretch)
        return tuple(dataclasses.replace(source, copies=copies) for source in sources)
    for name in ("transpose", "stretch"):
        if value := getattr(config, name):
            raise InputError(f"--{name} must be given with a source midi:GLOB, got {value} without one; leave it out")
    return sources


def join_shards(job: Job, units: list[Unit], writer: StoreWriter, weights: Sequence[float]) -> None:
    """Append the next consecutive finished shards to the store."""
    while writer.parts < len(units) and (shard := find_shard(job, writer.parts)) is not None:
        number = units[shard.number].source
        if len(writer.state["sections"]) <= number:
            writer.begin_section(job.sources[number].spec, weights[number] if weights else None)
        ids, lengths, sentences, unknown = read_shard(job, shard, writer.dtype)
        writer.append(ids, lengths, shard.bytes, shard.words, sentences, shard.characters, unknown)
        writer.commit()
        remove_shard(job, shard)


def _say(found: Estimate, output: str, messages: Output) -> int | None:
    """Print an estimate of time and disk; return the free bytes of the disk, None for object storage."""
    path = storage.local_path(output)
    free = None if path is None else shutil.disk_usage(nearest_directory(path)).free
    place = "in the bucket" if free is None else f"on disk ({byte_size(free)} free)"
    messages.say(
        f"estimate: {byte_size(found.text_bytes)} of text, about {plain_number(found.tokens)} tokens, "
        f"{byte_size(found.store_bytes)} {place}, {_duration(60 * found.minutes)} with "
        f"{counted(found.workers, 'worker')}"
    )
    if found.memory_bytes >= LARGE_MEMORY:
        messages.say(
            "memory: this vocabulary encodes a document whole; the largest found, "
            f"{byte_size(found.largest_bytes)} of text, takes about {found.memory_bytes / 1e9:,.1f} GB in one worker; "
            "if that is too much, make documents smaller or give fewer --workers"
        )
    return free


def _no_documents(spec: str) -> InputError:
    return InputError(f"source {spec!r} must have a document, got only blanks; correct it or leave it out")


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"about {max(1, round(seconds))} s"
    return f"about {seconds / 60:.0f} min" if seconds < 5400 else f"about {seconds / 3600:.1f} h"
