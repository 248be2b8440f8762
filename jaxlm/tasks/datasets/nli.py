"""Inference data sets outside GLUE: SNLI (Bowman et al. 2015) and SciTail (Khot et al. 2018).

SNLI's rows without agreement among the annotators have the gold label `-` and are dropped from every split, as is
usual; TFDS keeps them, without a label. SciTail has two formats: `tsv_format`, without a header, and `snli_format`,
whose `.txt` files are JSON lines that say `entailment` where the TSVs say `entails`.
"""

from functools import partial
from pathlib import Path

from jaxlm.tasks.builtin import PAPERS, BuiltIn, Catalogue, read_table
from jaxlm.tasks.examples import Split
from jaxlm.tasks.row_reader import RowReader, collect
from jaxlm.tasks.task import Columns, Task

_PAIR = (("sentence1", "premise"), ("sentence2", "hypothesis"))


def read_scitail(path: Path, task: Task, *, labelled: bool) -> Split:
    """Read a file of either format."""
    if path.suffix != ".txt":
        return read_table(path, task, labelled=labelled)
    reader = RowReader(path, task.columns, label="required" if labelled else "optional", form="jsonl")
    return collect(list(reader), reader, task)


SNLI = BuiltIn(
    Task(
        name="snli",
        kind="classification",
        form="entailment",
        metric="accuracy",
        metrics=("accuracy",),
        labels=("contradiction", "entailment", "neutral"),
        columns=Columns(texts=_PAIR, label=("gold_label", "label")),
        papers=PAPERS,
    ),
    {
        part: (f"snli_1.0_{part}.jsonl", f"snli_1.0_{part}.txt", f"snli_1.0/snli_1.0_{part}.jsonl", f"{part}.tsv")
        for part in ("train", "dev", "test")
    },
    Catalogue(
        "snli",
        ("premise", "hypothesis"),
        label_names=("entailment", "neutral", "contradiction"),
        drops_unlabelled=True,
    ),
    read=partial(read_table, dropped_labels=("-",)),
)

SCITAIL = BuiltIn(
    Task(
        name="scitail",
        kind="classification",
        form="entailment",
        metric="accuracy",
        metrics=("accuracy",),
        labels=("entails", "neutral"),
        spellings=(("entailment", "neutral"),),
        columns=Columns(texts=_PAIR, label=("gold_label", "label")),
        headerless=("sentence1", "sentence2", "label"),
        papers=PAPERS,
    ),
    {
        part: (
            f"tsv_format/scitail_1.0_{part}.tsv",
            f"scitail_1.0_{part}.tsv",
            f"snli_format/scitail_1.0_{part}.txt",
            f"scitail_1.0_{part}.txt",
        )
        for part in ("train", "dev", "test")
    },
    Catalogue("sci_tail", ("premise", "hypothesis"), label_names=("entails", "neutral")),
    read=read_scitail,
)
