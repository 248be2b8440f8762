"""Translation, from parallel files, and summarization, from JSON lines.

A directory of a translation has `train.SRC` and `train.TGT`, where `--options.languages SRC-TGT` names the suffixes,
and likewise `dev` (`val`, `valid`) and any number of files whose names begin with `test` or `newstest`: `test.en`,
`test_2016_flickr.en` (Multi30k), and WMT's `.sgm`, `newstest2014-fren-src.en.sgm` with `newstest2014-fren-ref.fr.sgm`.
A single test set is the split `test`, several go by the names of their files.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from jaxlm.errors import InputError
from jaxlm.reading.parallel import sentence_pairs, two_files
from jaxlm.tasks.builtin import PAPERS, BuiltIn
from jaxlm.tasks.examples import Split, TextPair
from jaxlm.tasks.kinds.generation import Generation
from jaxlm.tasks.kinds.texts import read_texts
from jaxlm.tasks.task import Columns, Task

_PARTS = {"train": "train", "dev": "dev", "val": "dev", "valid": "dev", "validation": "dev"}
_TEST = re.compile(r"(test|newstest).*")
_SOURCES = ("{}-src.{}.sgm", "{}.{}.sgm", "{}.{}")
_TARGETS = ("{}-ref.{}.sgm", "{}.{}.sgm", "{}.{}")


def find_parallel(entry: BuiltIn, directory: Path, task: Task) -> dict[str, Path]:
    """Return SOURCE,TARGET of each split. InputError without languages, a training file or the other side of a file."""
    source, _, target = task.options.languages.partition("-")
    if not source or not target:
        suffixes = sorted({file.suffix[1:] for file in directory.glob("train.*")})
        raise InputError(
            f"options.languages must be SOURCE-TARGET, the suffixes of the files in {directory} "
            f"({', '.join(suffixes) or 'none found'}), got {task.options.languages!r}; give for example "
            "--options.languages en-de"
        )
    found: dict[str, Path] = {}
    for stem, file in _sources(directory, source):
        part = _PARTS.get(stem) or (stem if _TEST.fullmatch(stem) else None)
        if part is None or part in found:
            continue
        others = [directory / form.format(stem, target) for form in _TARGETS]
        other = next((path for path in others if path.exists()), None)
        if other is None:
            raise InputError(f"{file} must have a translation, got no {others[-1].name}; put it beside it")
        found[part] = Path(f"{file},{other}")
    if "train" not in found:
        raise InputError(
            f"task {task.name}: {directory} has no train.{source} and train.{target}; give --task-dir the "
            "task's directory"
        )
    tests = [part for part in found if _TEST.fullmatch(part)]
    order = [part for part in ("train", "dev") if part in found] + tests
    return {"test" if [part] == tests else part: found[part] for part in order}


def _sources(directory: Path, language: str) -> Iterator[tuple[str, Path]]:
    """Yield the stem and the file of each source, in the order of the names."""
    for file in sorted(directory.iterdir()):
        endings = [form.format("", language) for form in _SOURCES]
        if ending := next((one for one in endings if file.name.endswith(one)), None):
            yield file.name.removesuffix(ending), file


def read_parallel(path: Path, task: Task, *, labelled: bool) -> Split:
    """Read SOURCE,TARGET, two files with a sentence per line or segment; or a table."""
    files = two_files(path)
    if files is None:
        return read_texts(path, task, labelled=labelled)
    pairs = sentence_pairs(*files)
    return Split(tuple(TextPair((source,), (), target) for _, source, target in pairs), len(pairs))


TRANSLATION = BuiltIn(
    Generation(
        name="translation",
        metric="bleu",
        metrics=("bleu", "chrf", "exact_match"),
        columns=Columns(texts=(("source",),), label=("target",)),
        papers=PAPERS,
    ),
    {},
    read=read_parallel,
    find=find_parallel,
)
SUMMARIZATION = BuiltIn(
    Generation(
        name="summarization",
        metric="rouge_l",
        metrics=("rouge_l", "rouge_1", "rouge_2", "exact_match"),
        columns=Columns(texts=(("document", "article"),), label=("summary", "highlights")),
        papers=PAPERS,
    ),
    {
        "train": ("train.jsonl",),
        "dev": ("dev.jsonl", "val.jsonl", "validation.jsonl"),
        "test": ("test.jsonl",),
    },
    read=read_texts,
)
