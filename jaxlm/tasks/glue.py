"""GLUE's tasks from the files of its benchmark (Wang et al. 2018): CoLA, SST-2, MRPC, STS-B and RTE.

All are TSVs without quoting: a `"` is a character like any other, and a reader that takes it for a quote loses rows
silently (MRPC's 3,668 training rows become 3,571). A test file that has an index in place of the label is unlabelled.
"""

from jaxlm.tasks.builtin import GPT1_PAPER, BuiltIn, Catalogue
from jaxlm.tasks.task import Columns, Task

_FILES = {"train": ("train.tsv",), "dev": ("dev.tsv",), "test": ("test.tsv",)}
_ZERO_ONE = ("0", "1")
_PAIR = (("sentence1",), ("sentence2",))

# Warstadt et al. 2018. Train and dev have no header: taking the first row for one leaves 8,550 of 8,551.
COLA = BuiltIn(
    Task(
        name="cola",
        kind="classification",
        form="single",
        metric="matthews",
        metrics=("matthews", "accuracy"),
        labels=_ZERO_ONE,
        spellings=(("unacceptable", "acceptable"),),
        columns=Columns(texts=(("sentence",),), label=("label",)),
        headerless=("source", "label", "mark", "sentence"),
        paper=GPT1_PAPER,
    ),
    _FILES,
    Catalogue("glue/cola", ("sentence",), label_names=("unacceptable", "acceptable")),
)

# Socher et al. 2013. Train is phrases, dev whole sentences.
SST2 = BuiltIn(
    Task(
        name="sst2",
        kind="classification",
        form="single",
        metric="accuracy",
        metrics=("accuracy",),
        labels=_ZERO_ONE,
        spellings=(("negative", "positive"),),
        columns=Columns(texts=(("sentence",),), label=("label",)),
        paper=GPT1_PAPER,
    ),
    _FILES,
    Catalogue("glue/sst2", ("sentence",), label_names=("negative", "positive")),
)

# Dolan and Brockett 2005. F1 is that of class 1, the paraphrases.
MRPC = BuiltIn(
    Task(
        name="mrpc",
        kind="classification",
        form="similarity",
        metric="f1",
        metrics=("f1", "accuracy"),
        labels=_ZERO_ONE,
        spellings=(("not_equivalent", "equivalent"),),
        columns=Columns(
            texts=(("#1 String", "sentence1"), ("#2 String", "sentence2")),
            label=("Quality", "label"),
        ),
        paper=GPT1_PAPER,
    ),
    _FILES,
    Catalogue("glue/mrpc", ("sentence1", "sentence2"), label_names=("not_equivalent", "equivalent")),
)

# Cer et al. 2017. Scores from 0 to 5; GPT-1 reports Pearson's correlation, BERT Spearman's.
STSB = BuiltIn(
    Task(
        name="stsb",
        kind="regression",
        form="similarity",
        metric="pearson",
        metrics=("pearson", "spearman"),
        columns=Columns(texts=_PAIR, label=("score", "label")),
        paper=GPT1_PAPER,
    ),
    _FILES,
    Catalogue("glue/stsb", ("sentence1", "sentence2")),
)

# Dagan et al. 2006 and the later rounds. The files spell the labels as words.
RTE = BuiltIn(
    Task(
        name="rte",
        kind="classification",
        form="entailment",
        metric="accuracy",
        metrics=("accuracy",),
        labels=("entailment", "not_entailment"),
        columns=Columns(
            texts=(("sentence1", "premise"), ("sentence2", "hypothesis")),
            label=("label",),
        ),
        paper=GPT1_PAPER,
    ),
    _FILES,
    Catalogue("glue/rte", ("sentence1", "sentence2"), label_names=("entailment", "not_entailment")),
)
