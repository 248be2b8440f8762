"""Tasks from `tensorflow_datasets`, read without TensorFlow where the data is prepared as ArrayRecord.

`tfds` means TFDS's own data directory, `tfds:DATA_DIR` another one. Preparing a data set for the first time downloads
it and needs TensorFlow, the extra `[tfds]`. Label ids are TFDS's: they are mapped to names by the data set's own list
and from there to the task's names, never used as they are; -1 (GLUE's test splits) means unlabelled.
"""

from collections.abc import Mapping
from typing import Any

from jaxlm.data.sources import open_split
from jaxlm.errors import InputError
from jaxlm.tasks.builtin import BuiltIn, Catalogue
from jaxlm.tasks.examples import Example, Split


def is_catalogue(task_dir: str) -> bool:
    """Return True if `--task-dir` names TFDS: `tfds` or `tfds:DATA_DIR`."""
    return task_dir == "tfds" or task_dir.startswith("tfds:")


def read_catalogue(built_in: BuiltIn, task_dir: str) -> dict[str, Split]:
    """Read every split of a task from TFDS's copy.

    Raises:
      InputError: TFDS or TensorFlow is missing (names the extra), the data set is unavailable, or TFDS does not have
        the task.
    """
    catalogue, task = built_in.catalogue, built_in.task
    if catalogue is None:
        raise InputError(f"task {task.name}: TFDS has no copy of it; give --task-dir the directory of its files")
    data_dir = task_dir.partition(":")[2] or None
    parts = {}
    for part, splits in catalogue.splits.items():
        try:
            read = [
                _read_rows(built_in, catalogue, part, split, data_dir)
                for split in ((splits,) if isinstance(splits, str) else splits)
            ]
        except InputError:
            if part in catalogue.optional:
                continue
            raise
        parts[part] = _collect(built_in, catalogue, part, read)
    return parts


def _read_rows(
    built_in: BuiltIn, catalogue: Catalogue, part: str, split: str, data_dir: str | None
) -> tuple[list[Any], int]:
    """Return the examples of one TFDS split, and its number of records."""
    name, _, split = split.rpartition("@")
    name = name or catalogue.name
    source = open_split(name, split, data_dir)
    names = _label_names(source, catalogue)
    examples: list[Any] = []
    for row in range(len(source)):
        values = source[row]
        if catalogue.read is not None:
            examples += catalogue.read(values, name)
            continue
        texts = tuple(tfds_text(values[field]).strip() for field in catalogue.texts)
        where = f"tfds {name} {split} row {row}"
        examples.append(Example(texts, (), _label(values, catalogue, names, built_in, where)))
    if not examples:
        raise InputError(f"tfds {name}: the split {split} has no rows")
    return examples, len(source)


def _collect(built_in: BuiltIn, catalogue: Catalogue, part: str, read: list[tuple[list[Any], int]]) -> Split:
    examples = [example for rows, _ in read for example in rows]
    rows, dropped = sum(count for _, count in read), []
    if catalogue.drops_unlabelled:
        dropped = [(row, "no label") for row, example in enumerate(examples) if not example.labelled]
        examples = [example for example in examples if example.labelled]
    missing = sum(not example.labelled for example in examples)
    if missing and (part == "train" or part.startswith("dev") or missing < len(examples)):
        raise InputError(f"tfds {catalogue.name}: {missing} of {len(examples)} rows of {part} have no label")
    empty = sum(not text for example in examples for text in example.parts)
    return Split(tuple(examples), rows, tuple(dropped), empty)


def _label_names(source: Any, catalogue: Catalogue) -> tuple[str, ...]:
    """Return the data set's own list of label names, else the known list for TFDS's copy."""
    features: Any = getattr(getattr(source, "dataset_info", None), "features", None)
    try:
        return tuple(features[catalogue.label].names)
    except (TypeError, KeyError, AttributeError):
        return catalogue.label_names


def _label(
    values: Mapping[str, Any], catalogue: Catalogue, names: tuple[str, ...], built_in: BuiltIn, where: str
) -> str | float | tuple[str, ...] | None:
    value = values.get(catalogue.label)
    if built_in.task.has_scores:
        score = float(value) if value is not None else -1.0
        return score if score >= 0 else None
    if value is None or int(value) < 0:
        return None
    if int(value) >= len(names):
        raise InputError(f"{where}: the label must be below {len(names)}, the number of labels, got {int(value)}")
    try:
        return built_in.task.parse_label(names[int(value)])
    except ValueError as error:
        raise InputError(f"{where}: {error}") from None


def tfds_text(value: Any) -> str:
    """Return the text of a TFDS feature, which TFDS stores as UTF-8 bytes."""
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)
