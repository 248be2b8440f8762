"""GLUE's tasks and TREC from `tensorflow_datasets`, read without TensorFlow where the data is prepared as ArrayRecord.

`tfds` means TFDS's own data directory, `tfds:DATA_DIR` another one. Preparing a set for the first time downloads it
and needs TensorFlow, the extra `[tfds]`. Label ids are TFDS's: they are turned into names by the data set's own list
and the names into the task's, never taken as they are; -1 (GLUE's test parts) means unlabelled.
"""

from collections.abc import Mapping
from typing import Any

from jaxlm.data.sources import open_split
from jaxlm.errors import InputError
from jaxlm.tasks.builtin import BuiltIn, Catalogue
from jaxlm.tasks.task import Example, Split


def is_catalogue(task_dir: str) -> bool:
    """Whether `--task-dir` names TFDS: `tfds` or `tfds:DATA_DIR`."""
    return task_dir == "tfds" or task_dir.startswith("tfds:")


def read_catalogue(built_in: BuiltIn, task_dir: str) -> dict[str, Split]:
    """Every part of a task from TFDS's copy.

    Raises:
      InputError: TFDS or TensorFlow is missing (names the extra), the set cannot be had, or the task is not in TFDS.
    """
    catalogue, task = built_in.catalogue, built_in.task
    if catalogue is None:
        raise InputError(f"task {task.name}: TFDS has no copy of it; give --task-dir the directory of its files")
    data_dir = task_dir.partition(":")[2] or None
    return {part: _read_part(built_in, catalogue, part, split, data_dir) for part, split in catalogue.splits.items()}


def _read_part(built_in: BuiltIn, catalogue: Catalogue, part: str, split: str, data_dir: str | None) -> Split:
    source = open_split(catalogue.name, split, data_dir)
    names = _label_names(source, catalogue)
    examples, empty = [], 0
    for row in range(len(source)):
        values = source[row]
        texts = tuple(_text(values[field]) for field in catalogue.texts)
        empty += sum(not text for text in texts)
        where = f"tfds {catalogue.name} {split} row {row}"
        examples.append(Example(texts, (), _label(values, catalogue, names, built_in, where)))
    if not examples:
        raise InputError(f"tfds {catalogue.name}: the part {split} holds no rows")
    missing = sum(example.label is None for example in examples)
    if missing and (part != "test" or missing < len(examples)):
        raise InputError(f"tfds {catalogue.name}: {missing} of {len(examples)} rows of {split} have no label")
    return Split(tuple(examples), len(examples), (), empty)


def _label_names(source: Any, catalogue: Catalogue) -> tuple[str, ...]:
    """The data set's own list of label names, else the one that is known for TFDS's copy."""
    features: Any = getattr(getattr(source, "dataset_info", None), "features", None)
    try:
        return tuple(features[catalogue.label].names)
    except (TypeError, KeyError, AttributeError):
        return catalogue.label_names


def _label(
    values: Mapping[str, Any], catalogue: Catalogue, names: tuple[str, ...], built_in: BuiltIn, where: str
) -> str | float | None:
    value = values.get(catalogue.label)
    if built_in.task.kind == "regression":
        score = float(value) if value is not None else -1.0
        return score if score >= 0 else None
    if value is None or int(value) < 0:
        return None
    if int(value) >= len(names):
        raise InputError(f"{where}: label {int(value)}, where there are {len(names)} labels")
    try:
        return built_in.task.parse_label(names[int(value)])
    except ValueError as error:
        raise InputError(f"{where}: {error}") from None


def _text(value: Any) -> str:
    return (value.decode("utf-8") if isinstance(value, bytes) else str(value)).strip()
