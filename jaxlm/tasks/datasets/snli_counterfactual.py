"""Counterfactually revised SNLI (Kaushik et al. 2020): three-class inference whose rows are edits of one another.

The files are TSVs with CSV quoting (43 training fields are enclosed in `"`). The published splits are used: since rows
are edits of one another, a new split by row would place near copies on both sides.
"""

from jaxlm.tasks.builtin import PAPERS, BuiltIn
from jaxlm.tasks.task import Columns, Task

SNLI_COUNTERFACTUAL = BuiltIn(
    Task(
        name="snli_counterfactual",
        kind="classification",
        form="entailment",
        metric="accuracy",
        metrics=("accuracy",),
        labels=("contradiction", "entailment", "neutral"),
        columns=Columns(
            texts=(("sentence1", "premise"), ("sentence2", "hypothesis")),
            label=("gold_label", "label"),
        ),
        quoting="csv",
        papers=PAPERS,
    ),
    {"train": ("train.tsv",), "dev": ("dev.tsv",), "test": ("test.tsv",)},
)
