"""Inference data sets outside GLUE: SNLI (Bowman et al. 2015), SciTail (Khot et al. 2018), counterfactual SNLI.

SNLI's rows without agreement among the annotators have the gold label `-` and are dropped from every split, as is
usual; TFDS keeps them, without a label. SciTail has two formats: `tsv_format`, without a header, and `snli_format`,
whose `.txt` files are JSON lines that say `entailment` where the TSVs say `entails`. The rows of counterfactually
revised SNLI (Kaushik et al. 2020) are edits of one another, in TSVs with CSV quoting (43 training fields are enclosed
in `"`). The published splits are used: a new split by row would place near copies on both sides.
"""

from functools import partial
from pathlib import Path

from jaxlm.tasks.builtin import PAPERS, TABLES, BuiltIn, Catalogue, read_table
from jaxlm.tasks.examples import Split
from jaxlm.tasks.kinds.texts import Classification
from jaxlm.tasks.row_reader import RowReader, collect
from jaxlm.tasks.task import Columns, Task

_COLUMNS = Columns(texts=(("sentence1", "premise"), ("sentence2", "hypothesis")), label=("gold_label", "label"))
_CLASSES = ("contradiction", "entailment", "neutral")


def read_scitail(path: Path, task: Task, *, labelled: bool) -> Split:
    """Read a file of either format."""
    if path.suffix != ".txt":
        return read_table(path, task, labelled=labelled)
    reader = RowReader(path, task.columns, label="required" if labelled else "optional", form="jsonl")
    return collect(list(reader), reader, task)


SNLI = BuiltIn(
    Classification(name="snli", form="entailment", labels=_CLASSES, columns=_COLUMNS, papers=PAPERS),
    {
        part: (f"snli_1.0_{part}.jsonl", f"snli_1.0_{part}.txt", f"snli_1.0/snli_1.0_{part}.jsonl", f"{part}.tsv")
        for part in ("train", "dev", "test")
    },
    Catalogue(
        "snli", ("premise", "hypothesis"), label_names=("entailment", "neutral", "contradiction"), drops_unlabelled=True
    ),
    read=partial(read_table, dropped_labels=("-",)),
)

SCITAIL = BuiltIn(
    Classification(
        name="scitail",
        form="entailment",
        labels=("entails", "neutral"),
        spellings=(("entailment", "neutral"),),
        columns=_COLUMNS,
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

SNLI_COUNTERFACTUAL = BuiltIn(
    Classification(
        name="snli_counterfactual", form="entailment", labels=_CLASSES, columns=_COLUMNS, quoting="csv", papers=PAPERS
    ),
    TABLES,
)

INFERENCE = (SNLI, SCITAIL, SNLI_COUNTERFACTUAL)
