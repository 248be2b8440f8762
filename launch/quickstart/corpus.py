"""The demonstration's text: the English documentation on every machine with Python and a few packages.

    python launch/quickstart/corpus.py --output runs/quickstart/corpus

The text is docstrings, comments, package descriptions and pydoc's topics of the standard library and of the packages
installed for the running interpreter. Sources are parsed, never imported. Files are read in sorted order and assigned
to a split by the md5 of their path relative to their library, so the text depends on what is installed and not on
where.

The output directory is written completely or not at all:
    pretrain.txt labelled.txt dev.txt test.txt    one paragraph per line, a blank line between documents (files)
    labelled.sentences.txt dev.… test.…           one sentence per line, for the task
    corpus.json                                   counts and the fingerprint

A sentence that occurred before, exactly or nearly, is removed; a dev or test sentence that shares more than 30 % of its
word 4-grams with any other split is removed too.
"""

import argparse
import hashlib
import json
import multiprocessing
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from parts import PARTS, Corpus, Document, divide
from prose import paragraphs_of
from sources import descriptions, installed_roots, python_files, texts_of_source

from jaxlm.errors import InputError, RunError, run_command
from jaxlm.progress import Progress

FORMAT = 1  # version of the output and of the rules that decide it; a directory of another version is not reused
LONGEST_FILE = 2_000_000  # bytes; longer files were generated


def read_document(root: str, name: str) -> tuple[Document, int]:
    """Return the prose of one source file and its size in bytes; none for unreadable or generated files."""
    path = Path(root) / name
    try:
        if path.stat().st_size > LONGEST_FILE:
            return Document(name, ()), 0
        source = path.read_bytes()
    except OSError:
        return Document(name, ()), 0
    paragraphs = [paragraph for text in texts_of_source(source) for paragraph in paragraphs_of(text)]
    return Document(name, tuple(paragraphs)), len(source)


def _read_chunk(chunk: tuple[str, list[str]]) -> list[tuple[Document, int]]:
    root, names = chunk
    return [read_document(root, name) for name in names]


def collect(roots: Sequence[Path], *, workers: int, progress: bool = False) -> tuple[list[Document], int, int]:
    """Return (documents with any prose, files read, bytes read): the same for any number of workers."""
    work: list[tuple[str, list[str]]] = []
    for root in roots:
        names = python_files(root)
        work += [(str(root), names[i : i + 64]) for i in range(0, len(names), 64)]
    total = sum(len(names) for _, names in work)
    documents: list[Document] = []
    files = size = 0

    def take(results: Iterable[list[tuple[Document, int]]]) -> None:
        nonlocal files, size
        with Progress("files", total, stream=sys.stderr, active=progress) as line:
            for result in results:
                files += len(result)
                size += sum(read for _, read in result)
                documents.extend(document for document, _ in result if document.paragraphs)
                line.update(files)

    if workers <= 1:
        take(map(_read_chunk, work))
    else:
        with multiprocessing.get_context("spawn").Pool(workers) as pool:
            take(pool.imap(_read_chunk, work))
    for root in roots:
        for name, text in descriptions(root):
            size += len(text.encode())
            paragraphs = tuple(paragraphs_of(text))
            if paragraphs:
                documents.append(Document(name, paragraphs))
    return documents, files, size


def write(corpus: Corpus, directory: Path, about: dict[str, object]) -> dict[str, object]:
    """Write the files and corpus.json into `directory`, which must be new; return the content of corpus.json."""
    directory.mkdir(parents=True)
    counts: dict[str, dict[str, int]] = {}
    digest = hashlib.md5(usedforsecurity=False)
    for part in PARTS:
        documents = corpus.parts[part]
        sentences = [s for document in documents for paragraph in document.paragraphs for s in paragraph]
        text = "\n".join("".join(" ".join(p) + "\n" for p in document.paragraphs) for document in documents)
        (directory / f"{part}.txt").write_text(text, encoding="utf-8", newline="\n")
        if part != "pretrain":
            lines = "".join(sentence + "\n" for sentence in sentences)
            (directory / f"{part}.sentences.txt").write_text(lines, encoding="utf-8", newline="\n")
        digest.update(part.encode() + b"\0" + text.encode() + b"\0")
        counts[part] = {
            "documents": len(documents),
            "sentences": len(sentences),
            "words": sum(len(sentence.split()) for sentence in sentences),
            "bytes": len(text.encode()),
        }
    summary = {"format": FORMAT, "fingerprint": digest.hexdigest(), "parts": counts, "removed": corpus.removed, **about}
    (directory / "corpus.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return summary


def report(summary: dict, directory: Path) -> None:
    """Print the counts."""
    for part, count in summary["parts"].items():
        print(
            f"  {part:<9} {count['documents']:>6,} files {count['sentences']:>8,} sentences {count['words']:>10,} words"
            f" {count['bytes'] / 1e6:7.2f} MB"
        )
    removed = ", ".join(f"{number:,} {reason}" for reason, number in summary["removed"].items())
    print(f"  removed: {removed}")
    print(f"  fingerprint {summary['fingerprint']} in {directory}")


def build(output: Path, roots: Sequence[Path], *, workers: int, progress: bool = False) -> dict:
    """Make the corpus at `output`, or read an existing complete one."""
    try:
        summary = json.loads((output / "corpus.json").read_text(encoding="utf-8"))
        if summary.get("format") == FORMAT:
            print(f"corpus: {output} is complete (delete it to collect again)")
            return summary
    except (OSError, ValueError, AttributeError):
        pass  # missing or not a corpus: the checks below distinguish these
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InputError(f"{output} must be new or a corpus of this version; delete it or name another --output")
    for root in roots:
        if not root.is_dir():
            raise InputError(f"--root must be a directory of Python sources, got {root}")
    started = time.monotonic()
    documents, files, size = collect(roots, workers=workers, progress=progress)
    corpus = divide(documents)
    if not all(corpus.parts[part] for part in PARTS):
        empty = ", ".join(part for part in PARTS if not corpus.parts[part])
        raise InputError(f"{', '.join(map(str, roots))}: too little documentation, none for {empty}; give more --root")
    python = ".".join(map(str, sys.version_info[:3]))
    about = {"files": files, "bytes_read": size, "python": python, "seconds": round(time.monotonic() - started, 1)}
    partial = output.with_name(output.name + ".partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)  # from an attempt that was stopped
        summary = write(corpus, partial, about)
        if output.exists():
            output.rmdir()  # empty, as checked above
        partial.rename(output)
    except OSError as error:
        raise RunError(f"{output}: not writable ({error.strerror}); make room or name another --output") from error
    print(f"corpus: {files:,} files, {size / 1e6:.0f} MB of sources in {about['seconds']} s")
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description="Collect the English documentation on this machine.")
    parser.add_argument("--output", type=Path, required=True, help="new directory to write")
    parser.add_argument(
        "--root",
        type=Path,
        action="append",
        help="directory of Python sources (repeatable; default: those of this interpreter)",
    )
    parser.add_argument("--workers", type=int, default=2, help="number of reading processes (default 2)")
    arguments = parser.parse_args()
    roots = arguments.root or installed_roots()
    report(build(arguments.output, roots, workers=arguments.workers, progress=True), arguments.output)


if __name__ == "__main__":
    run_command(main)
