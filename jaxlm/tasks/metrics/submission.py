"""GLUE's submission files: one TSV for each test split, in the format of gluebenchmark.com.

A header `index<TAB>prediction`, the index counting from 0 in each file, no quoting; words for MNLI, AX, QNLI and RTE,
integers for the rest, three decimals between 0 and 5 for STS-B. The server requires all eleven files in one archive.
"""

from collections.abc import Sequence
from typing import Any

from jaxlm.tasks.task import Task

NAMES = {
    ("cola", "test"): "CoLA",
    ("sst2", "test"): "SST-2",
    ("mrpc", "test"): "MRPC",
    ("stsb", "test"): "STS-B",
    ("qqp", "test"): "QQP",
    ("mnli", "test_matched"): "MNLI-m",
    ("mnli", "test_mismatched"): "MNLI-mm",
    ("mnli", "ax"): "AX",
    ("qnli", "test"): "QNLI",
    ("rte", "test"): "RTE",
    ("wnli", "test"): "WNLI",
}


def submission(task: Task, part: str, predictions: Sequence[Any]) -> dict[str, str]:
    """Return `glue/NAME.tsv` -> its text, for a split that GLUE's server scores; empty for another.

    predictions: as `Task.prediction` gives them, in the order of the split.
    """
    name = NAMES.get((task.name, part))
    if name is None:
        return {}
    if task.kind == "regression":
        predictions = [f"{min(max(float(score), 0.0), 5.0):.3f}" for score in predictions]
    rows = "".join(f"{index}\t{prediction}\n" for index, prediction in enumerate(predictions))
    return {f"glue/{name}.tsv": "index\tprediction\n" + rows}
