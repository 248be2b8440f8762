"""Preparation of a token store from text.

Worker processes stream the documents in bounded memory, one shard at a time, into OUTPUT.partial, which is renamed to
OUTPUT when it is complete. A process that is killed at any moment loses no finished shard, and the same command
continues. The same input gives the same bytes for any number of workers.
"""

import dataclasses
import functools
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from jaxlm.config import of_call
from jaxlm.data.pieces import copies_of
from jaxlm.data.plan import begin_or_continue, digest_of, existing_store, locked, summary
from jaxlm.data.sentences import Sentences, resolved
from jaxlm.data.shards import Job, find_shard, make_shards, read_shard, remove_shard
from jaxlm.data.sources import UNIT_BYTES, Source, Unit, largest_file, list_units, parse_source, read_unit, sampled
from jaxlm.data.store import VERSION, Store, is_url, open_store, partial_path
from jaxlm.data.writer import StoreWriter
from jaxlm.errors import InputError, RunError, names_arguments
from jaxlm.files import rename_synced
from jaxlm.host import cpu_cores
from jaxlm.progress import LOGGED, STANDARD, Output
from jaxlm.ranges import Count, Positive, Range, checked
from jaxlm.text import (
    Case,
    Tokenizer,
    load_tokenizer,
    tokenizer_from_spec,
    train_characters,
    train_sentencepiece,
    train_wordpiece,
    train_words,
)
from jaxlm.text.specs import COUNTED, TRAINED, check_form, music_of
from jaxlm.text.units import whole_words
from jaxlm.wording import byte_size, counted, plain_number

# Maximum amount of text that a tokenizer is trained on, sampled evenly from the whole.
TRAINING_BYTES = 64 << 20
TRAINING_UNITS = 1024

# Size of the sample for the estimate of time and disk.
SAMPLE_UNITS = 8
SAMPLE_CHARACTERS = 1 << 16

# Memory of one document above which the estimate mentions it.
LARGE_MEMORY = 1 << 30


@dataclass(frozen=True)
class PrepareConfig:
    """Sources, tokenizer and output of a token store."""

    source: tyro.conf.UseAppendAction[tuple[str, ...]]
    """text:GLOB (one document per file), lines:GLOB (blank lines separate documents), jsonl:GLOB[#FIELD],
    parquet:GLOB[#FIELD], hf-dataset:DIR[@SPLIT][#FIELD] (a directory of datasets.save_to_disk),
    tfds:NAME[@SPLIT][#FIELD], tfds-dir:PATH[@SPLIT][#FIELD], or midi:GLOB (one piece of music per file). .gz, .xz and
    .zst files are read directly.
    """

    tokenizer: str
    """train-sentencepiece:SIZE, train-wordpiece:SIZE, words:SIZE (white-space words and line ends), characters:SIZE,
    bytes, sentencepiece:FILE, wordpiece:VOCAB.txt, gpt1:DIR, gpt2:DIR, hf:DIR (a tokenizer.json), store:DIR (the
    tokenizer of a store or of a run), vectors:FILE (the words of word vectors in GloVe's text format),
    events:performance or events:multitrack (the events of midi:GLOB), or backward:TOKENIZER (the ids of another of
    these in reverse order)."""

    output: Path
    """Directory of the store. It must not exist yet."""

    weights: tuple[Positive, ...] = ()
    """Sampling weights of the sources in training, one per source. Default: proportional to their tokens."""

    sample: Count | None = None
    """Keep this number of random documents of each source, to try things on a part. Default: all documents."""

    workers: Annotated[int, Range(0, fix="give 0 for one per core")] = 0
    """Number of encoding processes. 0: one per core. The result does not depend on it."""

    errors: Literal["strict", "replace"] = "strict"
    """strict: bytes that are not UTF-8 are an error. replace: such bytes become U+FFFD."""

    sentencepiece_model: Literal["bpe", "unigram"] = "bpe"
    """Model type of train-sentencepiece."""

    transpose: str = ""
    """LOW:HIGH in semitones, for example -3:3: copies of each piece of midi:GLOB at each of these pitches. Default: the
    piece alone."""

    stretch: str = ""
    """LOW:HIGH, factors of the duration, for example 0.95:1.05: copies of each piece of midi:GLOB in steps of 0.025,
    with each transposition. Default: the piece alone."""

    minimum_count: Annotated[int, Range(1, fix="1 keeps every word")] = 1
    """Occurrences below which words:SIZE and characters:SIZE give a word or character no id."""

    wordpiece_case: Case = "auto"
    """Case of text for a WordPiece vocabulary. cased: upper case and accents are kept. uncased: neither is kept.
    auto: uncased for train-wordpiece; for a published vocabulary from its tokenizer_config.json, else guessed."""

    sentences: Sentences = "auto"
    """Sentence boundaries in the store, which sentence pairs need. split: found by sentencex. lines: each line of the
    input is a sentence. none: not stored. auto: split for a WordPiece vocabulary, none for the others."""

    language: str = "en"
    """Code of the language for sentence splitting."""

    unit_bytes: Count = UNIT_BYTES
    """Bytes of text per unit of work. A killed worker loses at most one unit."""


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
    messages: Output = LOGGED,
) -> dict[str, Any]:
    """Make a token store from text, or continue making it with the same arguments.

    Args:
      source: One source or several: `text:GLOB`, `lines:GLOB`, `jsonl:GLOB#FIELD`, `midi:GLOB` and others, as --source.
      tokenizer: train-sentencepiece:SIZE, train-wordpiece:SIZE, words:SIZE, bytes, hf:DIR and others, as --tokenizer.
      output: Directory of the store.
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
      messages: Destination of the messages: the logger `jaxlm`, or the standard streams.

    Returns:
      A dictionary: `store`, its directory; `documents`, `tokens`, `words` and `bytes`, its counts; `vocabulary`, the
      size of its tokenizer.

    Raises:
      InputError: An argument or a source is invalid, or another store is there. The message says how to fix it.
      RunError: A file could not be read or written, or a worker ended. The same call continues.

    Example:
      >>> store = jaxlm.prepare_store("text:books/*.txt", tokenizer="train-sentencepiece:300", output="stores/new")
      >>> store["documents"], store["vocabulary"]
      (2, 300)
    """
    config = of_call(PrepareConfig, locals())
    try:
        store = prepare(config, messages)
    except OSError as error:
        raise RunError(
            f"{error.filename or config.output}: {error.strerror or error}; rerun the same command to resume"
        ) from error
    counts = {"documents": store.documents, "tokens": store.num_tokens, "words": store.words, "bytes": store.bytes}
    return {"store": str(store.path)} | counts | {"vocabulary": store.vocab_size}


def prepare(config: PrepareConfig, messages: Output = STANDARD) -> Store:
    """Make the store, or continue making it, and open it. A complete store is only opened."""
    _check(checked(config))
    output = Path(config.output)
    arguments: dict[str, Any] = {
        "source": list(config.source),
        "tokenizer": config.tokenizer,
        "weights": list(config.weights),
        "errors": config.errors,
        "sentencepiece_model": config.sentencepiece_model,
        # A published vocabulary's case is part of its fingerprint; "uncased" is the value that preceded auto.
        "wordpiece_case": "uncased" if config.wordpiece_case == "auto" else config.wordpiece_case,
        "sentences": config.sentences,
        "language": config.language,
    }
    arguments |= {} if config.sample is None else {"sample": config.sample}
    arguments |= {} if config.minimum_count == 1 else {"minimum_count": config.minimum_count}
    arguments |= {name: value for name in ("transpose", "stretch") if (value := getattr(config, name))}
    sources = _sources(config)
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        return existing_store(output, arguments, sources, config.wordpiece_case, messages)

    units: list[Unit] = []
    inputs = []
    for number, source in enumerate(sources):
        more, described = list_units(source, number, config.unit_bytes)
        if config.sample is not None:
            more, total = sampled(source, more, config.sample, config.errors)
            messages.say(f"sample: {min(config.sample, total):,} of {total:,} documents of {source.spec}")
        units += more
        inputs.append(described)

    partial = partial_path(output)
    partial.mkdir(parents=True, exist_ok=True)
    with locked(partial):
        plan = {"version": VERSION, "arguments": arguments, "units": digest_of(units), "unit_bytes": config.unit_bytes}
        continues = begin_or_continue(partial, plan)
        try:
            return _make(config, sources, units, inputs, arguments, partial, continues, messages)
        except InputError:
            # Nothing of value was made: the corrected command must not find these files.
            if not (partial / "writer.json").exists() and not any((partial / "shards").glob("*.json")):
                shutil.rmtree(partial, ignore_errors=True)
            raise


def _make(
    config: PrepareConfig,
    sources: tuple[Source, ...],
    units: list[Unit],
    inputs: list[dict[str, Any]],
    arguments: dict[str, Any],
    partial: Path,
    continues: bool,
    messages: Output,
) -> Store:
    began = time.monotonic()
    for described in inputs:
        is_files = "files" in described
        size = counted(described["files"], "file") if is_files else counted(described["records"], "record")
        messages.say(f"source {described['source']}: {size}, {byte_size(described['bytes'])}")
    for k, source in enumerate(sources):
        own = (unit for unit in units if unit.source == k)
        if not continues and not any(True for unit in own for _ in read_unit(source, unit, config.errors)):
            raise _no_documents(source.spec)
    tokenizer = _tokenizer(config, sources, units, partial, messages)
    workers = config.workers or cpu_cores()
    sentences = resolved(config.sentences, tokenizer)
    keeps = tokenizer.unknown_word is not None
    job = Job(partial / "tokenizer", partial / "shards", sources, config.errors, sentences, config.language, keeps)
    job.shards.mkdir(exist_ok=True)
    for left_over in job.shards.glob(".*"):  # files of processes that were killed
        left_over.unlink()

    writer = StoreWriter(partial, tokenizer, sentences=sentences != "none")
    todo = [(k, unit) for k, unit in enumerate(units) if k >= writer.parts and find_shard(job, k) is None]
    total = sum(unit.size for unit in units)
    left = sum(unit.size for _, unit in todo)
    if continues and len(todo) < len(units):
        messages.say(f"continuing: {len(units) - len(todo):,} of {len(units):,} units are done")
    if todo:
        _estimate(job, [unit for _, unit in todo], tokenizer, left, workers, config.output, messages)

    done = total - left
    scale, name = (1e6, "MB") if total >= 1e7 else (1e3, "kB")
    with messages.progress(name, total / scale, done / scale) as progress:
        _join(job, units, writer, config.weights)
        for shard in make_shards(job, todo, workers, tokenizer):
            done += units[shard.number].size
            progress.update(done / scale)
            _join(job, units, writer, config.weights)
    for section in writer.state["sections"]:
        if not section["documents"]:
            raise _no_documents(section["source"])
    writer.finish(config.output, arguments=arguments, inputs=inputs)
    store = open_store(config.output)
    messages.say(f"{summary(store)}; {time.monotonic() - began:.0f} s")
    return store


def _sources(config: PrepareConfig) -> tuple[Source, ...]:
    """Return the sources; pieces of music have the words of the tokenizer."""
    sources = tuple(parse_source(spec) for spec in config.source)
    if any(source.is_music for source in sources):
        copies = copies_of(music_of(config.tokenizer), config.transpose, config.stretch)
        return tuple(dataclasses.replace(source, copies=copies) for source in sources)
    for name in ("transpose", "stretch"):
        if value := getattr(config, name):
            raise InputError(f"--{name} must be given with a source midi:GLOB, got {value} without; leave it out")
    return sources


def _join(job: Job, units: list[Unit], writer: StoreWriter, weights: Sequence[float]) -> None:
    """Append the next consecutive finished shards to the store."""
    while writer.parts < len(units) and (shard := find_shard(job, writer.parts)) is not None:
        number = units[shard.number].source
        if len(writer.state["sections"]) <= number:
            writer.begin_section(job.sources[number].spec, weights[number] if weights else None)
        ids, lengths, sentences, unknown = read_shard(job, shard, writer.dtype)
        writer.append(ids, lengths, shard.bytes, shard.words, sentences, shard.characters, unknown)
        writer.commit()
        remove_shard(job, shard)


def _tokenizer(
    config: PrepareConfig, sources: tuple[Source, ...], units: list[Unit], partial: Path, messages: Output
) -> Tokenizer:
    """Return the tokenizer, trained once or read, and keep a copy in the partial store for the workers."""
    directory = partial / "tokenizer"
    kind, _, size = config.tokenizer.partition(":")
    trains = kind in TRAINED
    read = functools.partial(tokenizer_from_spec, config.tokenizer, config.wordpiece_case, trains=True)
    if directory.exists():
        tokenizer = load_tokenizer(directory)
        if not trains and read().fingerprint != tokenizer.fingerprint:
            raise InputError(f"tokenizer {config.tokenizer!r} has changed since {partial} was begun; delete {partial}")
        return tokenizer
    if trains:
        tokenizer = _train(config, int(size), sources, units, messages)
    else:
        tokenizer = read()
        for note in tokenizer.notes:
            messages.say(f"tokenizer {config.tokenizer}: {note}")
    fresh = partial / "tokenizer.new"
    shutil.rmtree(fresh, ignore_errors=True)
    tokenizer.save(fresh)
    rename_synced(fresh, directory)
    return tokenizer


def _train(
    config: PrepareConfig, size: int, sources: tuple[Source, ...], units: list[Unit], messages: Output
) -> Tokenizer:
    total, chosen = sum(unit.size for unit in units), units
    kind = config.tokenizer.partition(":")[0]
    if kind not in COUNTED and len(units) > TRAINING_UNITS:
        chosen = [units[k * len(units) // TRAINING_UNITS] for k in range(TRAINING_UNITS)]
    each = None if kind in COUNTED or total <= TRAINING_BYTES else TRAINING_BYTES // len(chosen)
    read = 0

    def sentences() -> Iterator[str]:
        nonlocal read
        for unit in chosen:
            left = each
            fragments = read_unit(sources[unit.source], unit, config.errors)
            for text in whole_words(fragments) if kind in COUNTED else (text for text, _ in fragments):
                text = text if left is None else text[:left]
                read += len(text.encode())
                yield text
                if left is not None and (left := left - len(text.encode())) <= 0:
                    break

    how = "all of the text" if each is None else f"the first {each:,} bytes of {len(chosen):,} of {len(units):,} units"
    case: Literal["uncased", "cased"] = "cased" if config.wordpiece_case == "cased" else "uncased"
    trainers: dict[str, tuple[str, Callable[[], Tokenizer]]] = {
        "train-sentencepiece": (
            f"a SentencePiece {config.sentencepiece_model} vocabulary",
            lambda: train_sentencepiece(sentences(), size, config.sentencepiece_model),
        ),
        "train-wordpiece": (f"a WordPiece {case} vocabulary", lambda: train_wordpiece(sentences(), size, case)),
        "words": ("a vocabulary of words", lambda: train_words(sentences(), size, config.minimum_count)),
        "characters": ("a vocabulary of characters", lambda: train_characters(sentences(), size, config.minimum_count)),
    }
    name, train = trainers[kind]
    messages.say(f"training {name} of {size:,} on {how}")
    began = time.monotonic()
    tokenizer = train()
    messages.say(f"trained on {byte_size(read)} of about {byte_size(total)} in {time.monotonic() - began:.0f} s")
    return tokenizer


def _estimate(
    job: Job, units: list[Unit], tokenizer: Tokenizer, left: int, workers: int, output: Path, messages: Output
) -> None:
    """Print an estimate of time and disk from a sample; InputError if the disk is too small."""
    texts, sentences = [], 0
    largest = max(largest_file(s, [unit for unit in units if job.sources[unit.source] == s]) for s in job.sources)
    for k in range(min(SAMPLE_UNITS, len(units))):
        unit = units[k * len(units) // min(SAMPLE_UNITS, len(units))]
        characters = 0
        for block in job.blocks(unit, tokenizer):
            texts.append(block.text[:SAMPLE_CHARACTERS])
            characters += len(block.text)
            largest = max(largest, len(block.text))
            sentences += job.sentences != "none" and block.ends_sentence
            if characters >= SAMPLE_CHARACTERS:
                break
    tokenizer.encode_batch(texts[:1])  # the first call loads the library
    began = time.monotonic()
    encoded = tokenizer.encode_batch(texts)
    seconds = time.monotonic() - began
    count = sum(map(len, encoded))
    sample = sum(len(text.encode()) for text in texts) or 1
    tokens = left * count / sample
    unknown = sum(ids.count(tokenizer.unknown_word) for ids in encoded) if tokenizer.unknown_word is not None else 0
    disk = tokens * (2 if tokenizer.size <= 1 << 16 else 4) + left * (8 * sentences + 12 * unknown) / sample
    free = shutil.disk_usage(output.absolute().parent).free
    takes = _duration(left / sample * seconds / min(workers, len(units)))
    messages.say(
        f"estimate: {byte_size(left)} of text, about {plain_number(tokens)} tokens, {byte_size(disk)} on disk "
        f"({byte_size(free)} free), {takes} with {counted(workers, 'worker')}"
    )
    memory = largest * tokenizer.bytes_per_character  # of a document that is encoded whole
    if not tokenizer.can_split and job.sentences == "none" and memory >= LARGE_MEMORY:
        messages.say(
            f"memory: this vocabulary encodes a document whole; the largest found, {byte_size(largest)} of text, "
            f"takes about {memory / 1e9:,.1f} GB in one worker; if that is too much, make documents smaller or give "
            "fewer --workers"
        )
    if disk > free:
        raise InputError(
            f"{output} needs about {byte_size(disk)}, but only {byte_size(free)} are free; make room, or name "
            "another --output"
        )


def _check(config: PrepareConfig) -> None:
    """Raise InputError for arguments that are invalid by themselves, before anything is read."""
    if is_url(config.output):
        raise InputError(
            f"--output must be a local directory, got {config.output}; name one, and copy the store afterwards"
        )
    if not Path(config.output).name:
        raise InputError(f"--output must be a directory that does not exist yet, got {config.output}")
    if not config.source:
        raise InputError("--source must be given at least once, for example --source 'text:books/*.txt'")
    if config.weights and len(config.weights) != len(config.source):
        raise InputError(
            f"--weights must be one per source ({len(config.source)}), got {len(config.weights)}; give one each"
        )
    kind, _, size = config.tokenizer.partition(":")
    if kind in TRAINED and not (size.isascii() and size.isdigit() and int(size) > 0):
        raise InputError(f"tokenizer must have an integer SIZE, for example {kind}:16000, got {config.tokenizer!r}")
    check_form(config.tokenizer, trains=True)  # before a store that is there is compared with it
    if config.minimum_count > 1 and kind not in COUNTED:
        raise InputError(
            f"--minimum-count must be 1 for tokenizer {config.tokenizer!r}, got {config.minimum_count}; leave it out, "
            "or use words:SIZE"
        )
    if kind == TRAINED[0] and config.wordpiece_case != "auto":
        raise InputError(
            f"wordpiece_case must be auto for {kind}, got {config.wordpiece_case}; leave --wordpiece-case out"
        )


def _no_documents(spec: str) -> InputError:
    return InputError(f"source {spec!r} must have a document, got only blanks; correct it or leave it out")


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"about {max(1, round(seconds))} s"
    return f"about {seconds / 60:.0f} min" if seconds < 5400 else f"about {seconds / 3600:.1f} h"
