"""Every metric that is reported: its name, the kinds of task that have it, its definition, and its source.

docs/metrics.md is `markdown()`.
"""

from dataclasses import dataclass

from jaxlm.errors import InputError
from jaxlm.wording import did_you_mean

LOSS = "loss"
BINS = 15  # of the calibration error


@dataclass(frozen=True)
class Metric:
    """A metric. kinds: the kinds of task that report it. lower: True if lower values are better."""

    name: str
    kinds: tuple[str, ...]
    definition: str
    source: str
    lower: bool = False


_SKLEARN = "scikit-learn, `{}`"
_CLASSES: tuple[str, ...] = ("classification",)
_TEXTS: tuple[str, ...] = ("text",)
METRICS: tuple[Metric, ...] = (
    Metric(
        "accuracy",
        ("classification", "choice", "tagging"),
        "Fraction of examples, or of tokens with a tag, with the correct label. Tags of entities are compared as BIO.",
        _SKLEARN.format("accuracy_score"),
    ),
    Metric(
        "f1",
        _CLASSES,
        "Harmonic mean of precision and recall of the positive class. The positive class is that of "
        "`--custom.positive`, by default the second of two labels, and results.json names it as `positive`. For more "
        "than two labels without `--custom.positive` it is `macro_f1`.",
        _SKLEARN.format("f1_score"),
    ),
    Metric(
        "macro_f1",
        ("classification", "multilabel"),
        "Mean of the F1 of all labels of the task. A label with neither predictions nor examples counts as 0.",
        _SKLEARN.format("f1_score(average='macro', zero_division=0)"),
    ),
    Metric(
        "micro_f1",
        ("classification", "multilabel"),
        "F1 of the true positives, false positives and false negatives of all labels together. With one label per "
        "example it equals `accuracy`.",
        _SKLEARN.format("f1_score(average='micro', zero_division=0)"),
    ),
    Metric(
        "matthews",
        _CLASSES,
        "Matthews correlation coefficient; 0 if all predictions or all labels are the same.",
        _SKLEARN.format("matthews_corrcoef"),
    ),
    Metric(
        "exact_match",
        ("multilabel",),
        "Fraction of examples whose predicted set of labels is the correct set.",
        _SKLEARN.format("accuracy_score of label indicators"),
    ),
    Metric(
        "log_loss",
        ("classification", "choice", "multilabel"),
        "Mean negative log-likelihood of the correct label, in nats, without class weights and label smoothing. "
        "multilabel: the mean over examples and labels of the binary one.",
        _SKLEARN.format("log_loss"),
        lower=True,
    ),
    Metric(
        "calibration_error",
        ("classification", "choice"),
        f"Expected calibration error over {BINS} bins of equal width: the mean over examples of the absolute "
        "difference between accuracy and mean probability of the predicted label in the bin of the example. Bins "
        "include their upper edge.",
        "Guo et al. 2017, equation 3",
        lower=True,
    ),
    Metric("pearson", ("regression",), "Pearson correlation of predictions and scores.", "SciPy, `pearsonr`"),
    Metric("spearman", ("regression",), "Spearman rank correlation of predictions and scores.", "SciPy, `spearmanr`"),
    Metric(
        "exact_match",
        ("span",),
        "Fraction of questions whose answer equals one of the given answers, without case, punctuation, articles and "
        "repeated blanks.",
        "SQuAD's `evaluate-v1.1.py`, `evaluate-v2.0.py` (`exact`)",
    ),
    Metric(
        "f1",
        ("span",),
        "Mean over questions of the F1 over words of the best given answer.",
        "SQuAD's `evaluate-v1.1.py`, `evaluate-v2.0.py` (`f1`)",
    ),
    Metric(
        "f1_answerable",
        ("span",),
        "`f1` of the questions with an answer.",
        "SQuAD's `evaluate-v2.0.py` (`HasAns_f1`)",
    ),
    Metric(
        "f1_unanswerable",
        ("span",),
        "`f1` of the questions without an answer.",
        "SQuAD's `evaluate-v2.0.py` (`NoAns_f1`)",
    ),
    Metric(
        "entity_f1",
        ("tagging",),
        "Harmonic mean of `entity_precision` and `entity_recall`, over all sentences together.",
        "CoNLL's `conlleval`",
    ),
    Metric(
        "entity_precision",
        ("tagging",),
        "Fraction of the predicted entities whose type, first and last token are correct.",
        "CoNLL's `conlleval`",
    ),
    Metric(
        "entity_recall",
        ("tagging",),
        "Fraction of the given entities that are predicted with type, first and last token.",
        "CoNLL's `conlleval`",
    ),
    Metric(
        "bleu",
        _TEXTS,
        "BLEU of the corpus, from 0 to 100: cased, with the tokenization `13a`, against all targets of a row.",
        "sacrebleu, `BLEU`",
    ),
    Metric(
        "chrf",
        _TEXTS,
        "chrF2 of the corpus, from 0 to 100: F-score of character n-grams up to order 6, against all targets of a row.",
        "sacrebleu, `CHRF`",
    ),
    *(
        Metric(
            name,
            _TEXTS,
            f"Mean over texts of the F1 of {units}, with stemming; of several targets the best one counts.",
            f"rouge-score, `{theirs}`",
        )
        for name, theirs, units in (
            ("rouge_1", "rouge1", "words"),
            ("rouge_2", "rouge2", "pairs of words"),
            ("rouge_l", "rougeLsum", "longest common subsequences of lines"),
        )
    ),
    Metric(
        "exact_match",
        _TEXTS,
        "Fraction of texts that equal one of the targets, blanks at the ends aside.",
        "jaxlm/tasks/metrics/generated.py",
    ),
    Metric(
        "no_label",
        _TEXTS,
        "With `--as-text`, beside the metrics of the task: fraction of texts that are not a label; they count as "
        "wrong.",
        "jaxlm/tasks/text_to_text.py",
        lower=True,
    ),
    Metric(
        LOSS,
        _TEXTS,
        "Mean negative log-likelihood per token of the targets, their ends included, given the tokens before it, in "
        "nats, without dropout and label smoothing.",
        "jaxlm/training/text_model.py",
        lower=True,
    ),
    Metric(
        LOSS,
        ("classification", "regression", "choice", "span", "tagging", "multilabel"),
        "The task's training loss without dropout, in nats, with class weights and label smoothing. regression: mean "
        "squared error of standardized scores.",
        "jaxlm/objectives/task.py",
        lower=True,
    ),
)


def lower_is_better(name: str) -> bool:
    """Return True if lower values of the metric are better."""
    return any(metric.lower and name == metric.name for metric in METRICS)


def check_metric(name: str, flag: str, known: tuple[str, ...]) -> None:
    """Raise InputError, with the metric that is nearest in spelling, for a metric that a task does not have."""
    if name not in known:
        hint = did_you_mean(name, known, "choose one of them")
        raise InputError(f"{flag} must be one of {', '.join(known)} for this task, got {name}; {hint}")


def names_for(kind: str) -> tuple[str, ...]:
    """Return the names of the metrics of a kind of task."""
    return tuple(metric.name for metric in METRICS if kind in metric.kinds)


def markdown() -> str:
    """Return the table of all metrics as Markdown."""
    lines = ["| metric | kinds of task | definition | source |", "|---|---|---|---|"]
    for metric in METRICS:
        better = " Lower is better." if metric.lower else ""
        lines.append(f"| `{metric.name}` | {', '.join(metric.kinds)} | {metric.definition}{better} | {metric.source} |")
    return "\n".join(lines) + "\n"
