"""Labelled texts and pairs: the nine tasks of GLUE, data sets of inference, and TREC's question types.

GLUE (Wang et al. 2018), and the diagnostic set for MNLI models: all files are TSVs without quoting: a `"` is a plain
character, and a reader that treats it as a quote loses rows silently (MRPC's 3,668 training rows become 3,571). A test
file with an index in place of the label is unlabelled. QNLI was replaced in January 2019: results on its first version
(108,000 training rows), which both papers report, are not comparable with results on the second (104,743).

Inference outside GLUE: SNLI's (Bowman et al. 2015) rows without agreement among the annotators have the gold label `-`
and are dropped from every split, as is usual; TFDS keeps them, without a label. SciTail (Khot et al. 2018) has two
formats: `tsv_format`, without a header, and `snli_format`, whose `.txt` files are JSON lines that say `entailment`
where the TSVs say `entails`. The rows of counterfactually revised SNLI (Kaushik et al. 2020) are edits of one another,
in TSVs with CSV quoting (43 training fields are enclosed in `"`). The published splits are used: a new split by row
would place near copies on both sides.

TREC (Li and Roth 2002) has six coarse classes and one question per line, in two copies: `train.txt` and `test.txt`,
UTF-8 with the class as a number, and the original `train_5500.label` and `TREC_10.label`, Latin-1 with `COARSE:fine`.
Their classes are the same six in the same order here; TFDS swaps the numbers of LOC and NUM. Neither has a dev split.
The original also has the 50 fine classes, 42 of which occur in its test file; a name such as `other` belongs to several
coarse classes, so a fine class is spelt with its coarse one.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from jaxlm.errors import InputError
from jaxlm.reading.lines import Lines
from jaxlm.tasks.builtin import PAPERS, TABLES, BuiltIn, Catalogue, read_table
from jaxlm.tasks.examples import Example, Split
from jaxlm.tasks.kinds.texts import Classification, Regression
from jaxlm.tasks.row_reader import RowReader, collect, parse
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


def read_questions(path: Path, task: Task, *, labelled: bool, fine: bool = False) -> Split:
    """Read lines of a label, one blank and a question, or a file with named columns (`text`, `label`).

    fine: True if the labels of the original files are read whole.

    Raises:
      InputError: a line without a label or a question, or with an unknown label, with its number.
    """
    if path.suffix not in (".txt", ".label"):
        return read_table(path, task, labelled=labelled)
    original = path.suffix == ".label"
    examples, dropped, rows = [], [], 0
    for number, line in Lines(path, encoding="latin-1" if original else "utf-8"):
        rows += 1
        if not line.strip():
            dropped.append((number, "empty line"))
            continue
        label, blank, text = line.partition(" ")
        if not blank or not text.strip():
            raise InputError(f"{path} line {number} must be a label, one blank and a question; fix the line")
        label = label.partition(":")[0] if original and not fine else label
        known = parse(label, task, f"{path} line {number}")
        examples.append(Example((text.strip(),), (), known))
    if not examples:
        raise InputError(f"{path} has no rows; each must be a label, one blank and a question")
    return Split(tuple(examples), rows, tuple(dropped), 0)


def _spell(task: Task, train_file: Path) -> Task:
    if train_file.suffix != ".label":
        return task
    return dataclasses.replace(task, labels=task.spellings[0], spellings=(task.labels,))


TREC = BuiltIn(
    Classification(
        name="trec",
        labels=("0", "1", "2", "3", "4", "5"),
        spellings=(("DESC", "ENTY", "ABBR", "HUM", "LOC", "NUM"),),
        columns=Columns(texts=(("text", "question", "sentence"),), label=("label",)),
        papers=PAPERS,
    ),
    {"train": ("train.txt", "train_5500.label"), "test": ("test.txt", "TREC_10.label")},
    Catalogue(
        "trec",
        ("text",),
        label="label-coarse",
        label_names=("DESC", "ENTY", "ABBR", "HUM", "NUM", "LOC"),
        splits={"train": "train", "test": "test"},
    ),
    read=read_questions,
    spell=_spell,
)

_FINE = {
    "DESC": "def desc manner reason",
    "ENTY": "animal body color cremat currency dismed event food instru lang letter other plant product religion sport "
    "substance symbol techmeth termeq veh word",
    "ABBR": "abb exp",
    "HUM": "desc gr ind title",
    "LOC": "city country mount other state",
    "NUM": "code count date dist money ord other perc period speed temp volsize weight",
}

TREC50 = BuiltIn(
    Classification(
        name="trec50",
        labels=tuple(f"{coarse}:{fine}" for coarse, names in _FINE.items() for fine in names.split()),
        columns=TREC.task.columns,
        papers=PAPERS,
    ),
    {"train": ("train_5500.label",), "test": ("TREC_10.label",)},
    read=partial(read_questions, fine=True),
)

CLASSIFICATIONS = (*GLUE, SNLI, SCITAIL, SNLI_COUNTERFACTUAL, TREC, TREC50)
