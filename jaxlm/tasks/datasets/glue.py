"""The nine GLUE tasks from the benchmark's files (Wang et al. 2018), and the diagnostic set for MNLI models.

All files are TSVs without quoting: a `"` is a plain character, and a reader that treats it as a quote loses rows
silently (MRPC's 3,668 training rows become 3,571). A test file with an index in place of the label is unlabelled. QNLI
was replaced in January 2019: results on its first version (108,000 training rows), which both papers report, are not
comparable with results on the second (104,743).
"""

from functools import partial

from jaxlm.tasks.builtin import PAPERS, BuiltIn, Catalogue, read_table
from jaxlm.tasks.task import Columns, Task

_FILES = {"train": ("train.tsv",), "dev": ("dev.tsv",), "test": ("test.tsv",)}
_ZERO_ONE = ("0", "1")
_PAIR = (("sentence1",), ("sentence2",))

# Warstadt et al. 2018. Train and dev have no header: reading the first row as one leaves 8,550 of 8,551 rows.
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
        papers=PAPERS,
    ),
    _FILES,
    Catalogue("glue/cola", ("sentence",), label_names=("unacceptable", "acceptable")),
)

# Socher et al. 2013. Train contains phrases, dev whole sentences.
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
        papers=PAPERS,
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
        papers=PAPERS,
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
        papers=PAPERS,
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
        papers=PAPERS,
    ),
    _FILES,
    Catalogue("glue/rte", ("sentence1", "sentence2"), label_names=("entailment", "not_entailment")),
)

# Iyer et al. 2017. Some training rows are truncated, with too few columns: they are dropped and counted.
QQP = BuiltIn(
    Task(
        name="qqp",
        kind="classification",
        form="similarity",
        metric="f1",
        metrics=("f1", "accuracy"),
        labels=_ZERO_ONE,
        spellings=(("not_duplicate", "duplicate"),),
        columns=Columns(
            texts=(("question1", "sentence1"), ("question2", "sentence2")),
            label=("is_duplicate", "label"),
        ),
        papers=PAPERS,
    ),
    _FILES,
    Catalogue("glue/qqp", ("question1", "question2"), label_names=("not_duplicate", "duplicate")),
    read=partial(read_table, drop_short=True),
)

# Williams et al. 2018. The label is found by column name: column 11 is gold in train and one annotator's in dev.
MNLI = BuiltIn(
    Task(
        name="mnli",
        kind="classification",
        form="entailment",
        metric="accuracy",
        metrics=("accuracy", "matthews"),
        labels=("contradiction", "entailment", "neutral"),
        columns=Columns(
            texts=(("sentence1", "premise"), ("sentence2", "hypothesis")),
            label=("gold_label", "label"),
        ),
        papers=PAPERS,
        selects="dev_matched",
    ),
    {
        "train": ("train.tsv",),
        "dev_matched": ("dev_matched.tsv",),
        "dev_mismatched": ("dev_mismatched.tsv",),
        "test_matched": ("test_matched.tsv",),
        "test_mismatched": ("test_mismatched.tsv",),
        "ax": ("diagnostic.tsv", "diagnostic/diagnostic.tsv", "../diagnostic/diagnostic.tsv", "../AX/diagnostic.tsv"),
    },
    Catalogue(
        "glue/mnli",
        ("premise", "hypothesis"),
        label_names=("entailment", "neutral", "contradiction"),
        splits={
            "train": "train",
            "dev_matched": "validation_matched",
            "dev_mismatched": "validation_mismatched",
            "test_matched": "test_matched",
            "test_mismatched": "test_mismatched",
            "ax": "glue/ax@test",
        },
        optional=("ax",),
    ),
)

# Rajpurkar et al. 2016, as pairs of a question and a sentence of its paragraph.
QNLI = BuiltIn(
    Task(
        name="qnli",
        kind="classification",
        form="entailment",
        metric="accuracy",
        metrics=("accuracy",),
        labels=("entailment", "not_entailment"),
        columns=Columns(texts=(("question",), ("sentence",)), label=("label",)),
        papers=PAPERS,
    ),
    _FILES,
    Catalogue("glue/qnli", ("question", "sentence"), label_names=("entailment", "not_entailment")),
)

# Levesque et al. 2011, recast. Dev repeats sentences of train with opposite labels: a model that fits train scores
# below one half there, and always predicting 0 is the better submission (65.1 on the server; BERT's authors submitted
# that).
WNLI = BuiltIn(
    Task(
        name="wnli",
        kind="classification",
        form="entailment",
        metric="accuracy",
        metrics=("accuracy",),
        labels=_ZERO_ONE,
        spellings=(("not_entailment", "entailment"),),
        columns=Columns(
            texts=(("sentence1", "premise"), ("sentence2", "hypothesis")),
            label=("label",),
        ),
        papers=PAPERS,
    ),
    _FILES,
    Catalogue("glue/wnli", ("sentence1", "sentence2"), label_names=("not_entailment", "entailment")),
)
