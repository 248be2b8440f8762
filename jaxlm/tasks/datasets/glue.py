"""The nine GLUE tasks from the benchmark's files (Wang et al. 2018), and the diagnostic set for MNLI models.

All files are TSVs without quoting: a `"` is a plain character, and a reader that treats it as a quote loses rows
silently (MRPC's 3,668 training rows become 3,571). A test file with an index in place of the label is unlabelled. QNLI
was replaced in January 2019: results on its first version (108,000 training rows), which both papers report, are not
comparable with results on the second (104,743).
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from jaxlm.tasks.builtin import PAPERS, TABLES, BuiltIn, Catalogue, read_table
from jaxlm.tasks.examples import Split
from jaxlm.tasks.kinds.scores import Regression
from jaxlm.tasks.kinds.texts import Classification
from jaxlm.tasks.task import Columns, Form, Task

_SENTENCE = (("sentence",),)
_PAIR = (("sentence1", "premise"), ("sentence2", "hypothesis"))
_WORDS = ("entailment", "not_entailment")
_MNLI = ("dev_matched", "dev_mismatched", "test_matched", "test_mismatched")


def _glue(
    name: str,
    form: Form,
    texts: tuple[tuple[str, ...], ...],
    names: tuple[str, ...] = (),
    *,
    kind: type[Task] = Classification,
    label: tuple[str, ...] = ("label",),
    labels: tuple[str, ...] = ("0", "1"),
    metrics: tuple[str, ...] = ("accuracy",),
    tfds: tuple[str, ...] = (),
    files: Mapping[str, tuple[str, ...]] = TABLES,
    read: Callable[..., Split] = read_table,
    copy: Mapping[str, Any] | None = None,
    **fields: Any,
) -> BuiltIn:
    """Return a task of GLUE.

    names: of the labels in TFDS's order; another spelling of `labels` where these are numbers. tfds: the text features
    there, by default the first names of the columns. copy: further fields of the `Catalogue`; fields: of the task.
    """
    task = kind(
        name=name,
        form=form,
        metric=metrics[0],
        metrics=metrics,
        labels=labels,
        spellings=(names,) if names and labels[0] == "0" else (),
        columns=Columns(texts=texts, label=label),
        papers=PAPERS,
        **fields,
    )
    features = tfds or tuple(column[0] for column in texts)
    return BuiltIn(task, files, Catalogue(f"glue/{name}", features, label_names=names, **copy or {}), read)


GLUE = (
    # Warstadt et al. 2018. Train and dev have no header: reading the first row as one leaves 8,550 of 8,551 rows.
    _glue(
        "cola",
        "single",
        _SENTENCE,
        ("unacceptable", "acceptable"),
        metrics=("matthews", "accuracy"),
        headerless=("source", "label", "mark", "sentence"),
    ),
    # Socher et al. 2013. Train contains phrases, dev whole sentences.
    _glue("sst2", "single", _SENTENCE, ("negative", "positive")),
    # Dolan and Brockett 2005. F1 is that of class 1, the paraphrases.
    _glue(
        "mrpc",
        "similarity",
        (("#1 String", "sentence1"), ("#2 String", "sentence2")),
        ("not_equivalent", "equivalent"),
        label=("Quality", "label"),
        metrics=("f1", "accuracy"),
        tfds=("sentence1", "sentence2"),
    ),
    # Cer et al. 2017. Scores from 0 to 5; GPT-1 reports Pearson's correlation, BERT Spearman's.
    _glue(
        "stsb",
        "similarity",
        (("sentence1",), ("sentence2",)),
        kind=Regression,
        label=("score", "label"),
        labels=(),
        metrics=("pearson", "spearman"),
    ),
    # Iyer et al. 2017. Some training rows are truncated, with too few columns: they are dropped and counted.
    _glue(
        "qqp",
        "similarity",
        (("question1", "sentence1"), ("question2", "sentence2")),
        ("not_duplicate", "duplicate"),
        label=("is_duplicate", "label"),
        metrics=("f1", "accuracy"),
        read=partial(read_table, drop_short=True),
    ),
    # Williams et al. 2018. The label is found by column name: column 11 is gold in train and one annotator's in dev.
    _glue(
        "mnli",
        "entailment",
        _PAIR,
        ("entailment", "neutral", "contradiction"),
        label=("gold_label", "label"),
        labels=("contradiction", "entailment", "neutral"),
        metrics=("accuracy", "matthews"),
        tfds=("premise", "hypothesis"),
        files={part: (f"{part}.tsv",) for part in ("train", *_MNLI)}
        | {"ax": tuple(f"{place}diagnostic.tsv" for place in ("", "diagnostic/", "../diagnostic/", "../AX/"))},
        selects="dev_matched",
        copy={
            "splits": {"train": "train"}
            | {part: part.replace("dev", "validation") for part in _MNLI}
            | {"ax": "glue/ax@test"},
            "optional": ("ax",),
        },
    ),
    # Rajpurkar et al. 2016, as pairs of a question and a sentence of its paragraph.
    _glue("qnli", "entailment", (("question",), ("sentence",)), _WORDS, labels=_WORDS),
    # Dagan et al. 2006 and the later rounds. The files spell the labels as words.
    _glue("rte", "entailment", _PAIR, _WORDS, labels=_WORDS),
    # Levesque et al. 2011, recast. Dev repeats sentences of train with opposite labels: a model that fits train scores
    # below one half there, and always predicting 0 is the better submission (65.1 on the server; BERT's authors
    # submitted that).
    _glue("wnli", "entailment", _PAIR, ("not_entailment", "entailment")),
)
