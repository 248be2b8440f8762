"""Comparisons of texts by their log-probabilities: candidates in a context, sentences, referents, and last words.

GPT-1's heuristics (Radford et al., 2018, section 5): `cola` compares the mean log-probability per token of a sentence
with a threshold, which is fitted on the training rows; `sst2` appends `very` and compares `positive` with `negative`;
`race` takes the answer with the highest mean log-probability per token given article and question, and so do `codah`,
`swag` and `story_cloze`. `cbt` (Hill et al., 2016; Radford et al., 2019, section 3.2) compares the probability of each
candidate and the rest of its sentence.

`lambada` (Paperno et al., 2016): people guess the word from the passage, but not from its last sentence. GPT-2's
figures (Radford et al., 2019, section 3.3) rest on the last token of the passage alone. lm-evaluation-harness takes all
tokens of the last word, which starts at the last blank.

`blimp` (Warstadt et al., 2020): a pair is right if the acceptable sentence has the higher log-probability, by the sum
over tokens (the paper) or by the mean. Nothing precedes a sentence, and its first token is not scored; with
`--left-context`, and in lm-evaluation-harness, the end-of-text token precedes it, and its first token is scored.

`wsc273`, the Winograd Schema Challenge, by sums over tokens; `dpr`, Definite Pronoun Resolution (Rahman and Ng, 2012),
by means over tokens, as GPT-1 does with partial scoring: each candidate replaces the pronoun. `full` compares the whole
sentences, `partial` the text after the substitution given the text before it, which does not favour the more frequent
name (Trinh and Le, 2018). A file has blocks of four lines: sentence, pronoun, candidates with commas between them,
correct candidate. Blank lines separate the blocks. The sentence has `[MASK]` in place of the pronoun, or the pronoun
itself; where a pronoun occurs more than once, it is the first one after the candidates.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxlm.errors import InputError
from jaxlm.reading.lines import Lines
from jaxlm.tasks import read_labelled, read_split
from jaxlm.tasks.datasets.choices import SCHOOLS
from jaxlm.tasks.examples import Example
from jaxlm.tasks.metrics.classification import RESAMPLES, SEED
from jaxlm.tasks.registry import BUILT_IN, TASKS
from jaxlm.zero_shot.detokenizers import plain_text
from jaxlm.zero_shot.task import (
    Measured,
    ScoredText,
    Text,
    ZeroShotTask,
    accuracy,
    best,
    chosen_accuracy,
    files_of,
    json_rows,
    perplexity,
    sampled,
    scored_rows,
    shortened,
)

WORDS = {"0": "negative", "1": "positive"}


SPLITS = ("dev", "test", "train")  # of a directory, the first one that is there


def labelled(name: str, path: Path) -> tuple[tuple[Example, ...], dict[str, str]]:
    """Return the labelled examples of a file, or of a split of a directory, and the split for `how`.

    InputError without any.
    """
    if not path.exists():
        raise InputError(f"{path} must be a file or a directory, got a path that does not exist; give the task's")
    if not path.is_dir():
        return read_labelled(path, TASKS[name]).examples, {}
    if path.name in SCHOOLS or any((path / school).is_dir() for school in SCHOOLS):  # a split of RACE
        return BUILT_IN[name].read(path, TASKS[name], labelled=True).examples, {}
    part, split = read_split(name, path, SPLITS)
    return split.examples, {"split": part}


def measure_choices(model, path: Path, options, *, name: str) -> Iterator[Measured]:
    """Yield the accuracy of the choice with the highest mean log-probability per token."""
    examples, split = labelled(name, path)
    questions = _questions(path, examples, TASKS[name].labels, lambda one: (" ".join(one.texts), one.choices))
    how = {"unit": "mean over the tokens of a choice", **split}
    yield chosen_accuracy(model, questions, options, by=lambda text: text.mean, how=how)


def measure_sentiment(model, path: Path, options) -> Iterator[Measured]:
    """Yield the accuracy of the likelier one of `positive` and `negative` after `very`."""
    examples, split = labelled("sst2", path)
    words = tuple(WORDS.values())
    questions = _questions(path, examples, tuple(WORDS), lambda one: (one.texts[0].strip() + " very", words))
    how = {"unit": "sum over the tokens of positive or negative after very", **split}
    yield chosen_accuracy(model, questions, options, by=lambda text: text.sum, how=how)


def measure_acceptability(model, path: Path, options) -> Iterator[Measured]:
    """Yield Matthews correlation and accuracy on dev, with the threshold that is the best one on train."""
    from sklearn.metrics import matthews_corrcoef  # here: its second is not for every start of a pretraining

    if not path.is_dir():
        raise InputError(f"{path} must be a directory with train.tsv and dev.tsv, got a file; give glue/CoLA")
    means, labels = {}, {}
    for split in ("train", "dev"):
        _, data = read_split("cola", path, (split,))
        chosen = sampled(enumerate(data.examples, 1), options.sample)
        rows = scored_rows(model, [[Text((one.texts[0],), 0, f"{split} row {number}")] for number, one in chosen])
        means[split] = np.array([row.scores[0].mean for row in rows])
        labels[split] = np.array([one.label == "1" for _, one in chosen])
    threshold = best_threshold(means["train"], labels["train"])
    predictions, right = means["dev"] > threshold, labels["dev"]
    random = np.random.Generator(np.random.Philox(SEED))
    resampled = [random.integers(0, len(right), len(right)) for _ in range(RESAMPLES)]
    error = float(np.std([matthews_corrcoef(right[rows], predictions[rows]) for rows in resampled], ddof=1))
    how = {
        "unit": "mean over the tokens of a sentence",
        "split": "dev",
        "threshold": threshold,
        "filters": f"threshold with the best Matthews correlation on the {len(labels['train']):,} training rows",
        **shortened(rows),
    }
    counts = len(data.examples), len(rows)
    yield Measured("matthews", float(matthews_corrcoef(right, predictions)), error, *counts, how)
    yield Measured("accuracy", *accuracy(right == predictions), *counts, how, rows, right == predictions)


def best_threshold(scores: np.ndarray, labels: np.ndarray) -> float:
    """Return the threshold of scores (n,) that has the best Matthews correlation with labels (n,).

    Scores of one token have no mean (nan) and count as below every threshold.
    """
    scores = np.where(np.isnan(scores), -np.inf, scores)
    order = np.argsort(scores)
    ordered, positive = scores[order], labels[order]
    below_negative, below_positive = np.cumsum(~positive), np.cumsum(positive)
    tn, fn = below_negative[:-1], below_positive[:-1]
    fp, tp = below_negative[-1] - tn, below_positive[-1] - fn
    with np.errstate(divide="ignore", invalid="ignore"):
        product = np.sqrt(1.0 * (tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
        correlation = np.nan_to_num((1.0 * tp * tn - 1.0 * fp * fn) / product)
    between = ordered[1:] > ordered[:-1]
    index = int(np.argmax(np.where(between, correlation, -np.inf)))
    if not between.any() or correlation[index] < 0:
        return math.inf  # no sentence is acceptable, which has no correlation
    low = ordered[index] if np.isfinite(ordered[index]) else ordered[index + 1] - 1.0
    return float((low + ordered[index + 1]) / 2)


def measure_cloze(model, path: Path, options) -> Iterator[Measured]:
    """Yield the accuracy of the candidate with the highest probability of itself and the rest of its sentence."""
    how = {"unit": "sum over the tokens of a candidate and the rest of its sentence", "detokenizer": "ptb"}
    yield chosen_accuracy(model, list(cloze_questions(path)), options, by=lambda text: text.sum, how=how)


def cloze_questions(path: Path) -> Iterator[tuple[list[Text], int]]:
    """Yield the candidates in their context, and the index of the correct one, of the Children's Book Test's files.

    A question has 20 numbered sentences and `21 query with XXXXX`, answer, an empty field, and the candidates with `|`
    between them, separated by tabs. InputError for a question that is truncated.
    """
    lines: list[str] = []
    found = 0
    for number, line in [*Lines(path), (0, "")]:
        where = f"{path} line {number}" if number else f"{path}: the last question"
        index, _, text = line.strip().partition(" ")
        if index and index != str(len(lines) + 1):
            raise InputError(f"{where} must begin with {len(lines) + 1}, got {index!r}; fix the file")
        if lines and not index:
            raise InputError(f"{where} must have 21 lines, got {len(lines)}; fix or remove it")
        lines += [text] if index else []
        if len(lines) == 21:
            yield _cloze(where, lines)
            lines, found = [], found + 1
    if not found:
        raise InputError(f"{path} must have questions of 21 lines, got none; give a file of the Children's Book Test")


def measure_last_words(model, path: Path, options) -> Iterator[Measured]:
    """Yield the accuracy and the perplexity of the last token."""
    texts = [passage(where, row["text"]) for where, row in json_rows(path, ["text"])]
    rows = scored_rows(model, [[text] for text in sampled(texts, options.sample)])
    words = [word for row in rows for word in row.scores[0].parts]
    filters = {"filters": f"predictions without the stop words of {options.stop_words}"} if options.stop_words else {}
    right = [bool(word.greedy[-1]) for word in words]
    losses = [-float(word.log_probs[-1]) for word in words]
    how = {"unit": "last token", **filters, **shortened(rows)}
    yield Measured("accuracy", *accuracy(right), len(texts), len(rows), how, rows, right)
    yield Measured("perplexity", *perplexity(losses), len(texts), len(rows), how, rows, np.exp(losses))


def passage(where: str, text: str) -> Text:
    """Return a passage as its context and its last word, which begins with the last blank."""
    context, blank, word = text.rstrip().rpartition(" ")
    if not context.strip():
        raise InputError(f"{where} must have a word after a context, got {text!r}; fix or remove the row")
    return Text((context, blank + word), 1, where)


def _questions(
    path: Path, examples: Sequence[Example], labels: Sequence[str], read: Callable[[Example], tuple[str, Sequence[str]]]
) -> list[tuple[list[Text], int]]:
    """Return the candidates of each example, and the right index. read: example -> its context, and its candidates."""
    questions = []
    for number, example in enumerate(examples, 1):
        context, candidates = read(example)
        texts = [Text((context, " " + candidate), 1, f"{path} row {number}") for candidate in candidates]
        questions.append((texts, labels.index(str(example.label))))
    return questions


def _cloze(where: str, lines: Sequence[str]) -> tuple[list[Text], int]:
    """Return the context, and each candidate with the rest of its sentence, as plain text.

    If a candidate is the end of a word, as `n't` is, that word begins the scored text of all candidates.
    """
    fields = [field.strip() for field in lines[-1].split("\t")]
    if len(fields) != 4:
        raise InputError(
            f"{where} must have a query, an answer, an empty field and candidates with tabs between them, got "
            f"{len(fields)} fields; fix or remove the question"
        )
    query, answer, _, listed = fields
    if query.count("XXXXX") != 1:
        raise InputError(f"{where} must have one XXXXX in the query, got {query!r}; fix or remove the question")
    candidates = list(dict.fromkeys(candidate.strip() for candidate in listed.split("|") if candidate.strip()))
    if answer not in candidates:
        raise InputError(f"{where}: the answer must be one of {listed!r}, got {answer!r}; fix or remove the question")
    text = " ".join(" ".join([*lines[:-1], query]).split())
    letters = len(plain_text(text.partition("XXXXX")[0]).replace(" ", ""))
    wholes = [plain_text(text.replace("XXXXX", candidate)) for candidate in candidates]
    begins = [_after_letters(whole, letters) for whole in wholes]
    if any(whole[begin] != " " for whole, begin in zip(wholes, begins, strict=True)):
        begins = [max(whole.rfind(" ", 0, begin), 0) for whole, begin in zip(wholes, begins, strict=True)]
    texts = [Text((whole[:begin], whole[begin:]), 1, where) for whole, begin in zip(wholes, begins, strict=True)]
    return texts, candidates.index(answer)


def _after_letters(text: str, count: int) -> int:
    """Return the index after the first `count` characters that are not blanks."""
    return [index for index, letter in enumerate(text, 1) if letter != " "][count - 1] if count else 0


FIELDS = ("sentence_good", "sentence_bad")
BY: dict[str, Callable[[ScoredText], float]] = {
    "accuracy_sum": lambda text: text.sum,
    "accuracy_mean": lambda text: text.mean,
}


def measure_pairs(model, path: Path, options) -> Iterator[Measured]:
    """Yield the accuracies of each paradigm, of each field, and over all paradigms, which count equally."""
    pairs, field_of = defaultdict(list), {}
    for file in files_of(path, ".jsonl"):
        for where, row in json_rows(file, FIELDS):
            paradigm = row.get("UID", file.stem)
            pairs[paradigm].append(tuple(Text((row[name],), 0, where) for name in FIELDS))
            field_of[paradigm] = row.get("field", "")
    chosen = {paradigm: sampled(rows, options.sample) for paradigm, rows in pairs.items()}
    found = iter(scored_rows(model, [pair for rows in chosen.values() for pair in rows]))
    scored = {paradigm: [next(found) for _ in rows] for paradigm, rows in chosen.items()}
    for metric, score in BY.items():
        right = {name: [score(good) > score(bad) for _, (good, bad) in rows] for name, rows in scored.items()}
        for paradigm, rows in scored.items():
            how = {"paradigm": paradigm, "field": field_of[paradigm], **shortened(rows)}
            yield Measured(metric, *accuracy(right[paradigm]), len(pairs[paradigm]), len(rows), how)
        for name in [*sorted(set(field_of.values()) - {""}), ""]:
            inside = [paradigm for paradigm in scored if name in ("", field_of[paradigm])]
            rows = [row for one in inside for row in scored[one]]
            value, error = _mean_of([accuracy(right[one]) for one in inside])
            how = ({"field": name} if name else {}) | shortened(rows)
            kept = () if name else (rows, [one for paradigm in inside for one in right[paradigm]])
            yield Measured(metric, value, error, sum(len(pairs[one]) for one in inside), len(rows), how, *kept)


def _mean_of(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the mean of independent accuracies and its standard error."""
    values, errors = (np.array(column) for column in zip(*pairs, strict=True))
    return float(values.mean()), float(np.sqrt((errors**2).sum()) / len(values))


# As lm_eval/tasks/wsc273/utils.py does: `his` is replaced by `Bob's`, and `The` becomes `the` inside a sentence.
POSSESSIVE = {"my", "his", "her", "our", "their"}
LOWERED = {"A", "An", "The", "She", "He", "It", "They", "My", "His", "Her", "Their"}


class Schema(NamedTuple):
    """A sentence around a pronoun, its two candidates, and the index of the correct one. recurs: the pronoun occurs
    more than once."""

    where: str
    before: str
    pronoun: str
    after: str
    candidates: tuple[str, ...]
    right: int
    recurs: bool

    def texts(self) -> list[Text]:
        """Return the sentence with each candidate: the parts before, the candidate, and after."""
        space = " " if self.before else ""
        return [
            Text((self.before, space + self._substitute(one), self.after), 0, self.where) for one in self.candidates
        ]

    def _substitute(self, candidate: str) -> str:
        if self.pronoun.lower() in POSSESSIVE:
            candidate += "'s"
        first, *rest = candidate.split(" ")
        begins_sentence = not self.before or self.before.endswith((".", "!", "?"))
        return " ".join([first.lower() if first in LOWERED and not begins_sentence else first, *rest])


def measure_referents(
    model, path: Path, options, *, by: Callable[[ScoredText], float], unit: str
) -> Iterator[Measured]:
    """Yield the accuracies of full and of partial scoring."""
    found = list(read_schemas(path))
    schemas = sampled(found, options.sample)
    rows = scored_rows(model, [schema.texts() for schema in schemas])
    several = sum(schema.recurs for schema in schemas)
    how = {"unit": unit, **shortened(rows)} | ({"pronoun_recurs": several} if several else {})
    for name, first in {"full": 0, "partial": 2}.items():
        right = [
            best([by(one.since(first)) for one in row.scores]) == schema.right
            for row, schema in zip(rows, schemas, strict=True)
        ]
        yield Measured(f"accuracy_{name}", *accuracy(right), len(found), len(rows), how, rows, right)


def read_schemas(path: Path) -> Iterator[Schema]:
    """Yield the schemas of a file. InputError for a block that is not one."""
    block: list[tuple[int, str]] = []
    found = 0
    for number, line in [*Lines(path), (0, "")]:
        if line.strip():
            block.append((number, " ".join(line.split())))
        elif block:
            yield _schema(f"{path} line {block[0][0]}", [text for _, text in block])
            block, found = [], found + 1
    if not found:
        raise InputError(f"{path} must have schemas, got none; give another file")


def _schema(where: str, lines: Sequence[str]) -> Schema:
    if len(lines) != 4:
        raise InputError(
            f"{where} must have four lines (sentence, pronoun, candidates, answer), got {len(lines)}; fix or remove it"
        )
    sentence, pronoun, listed, answer = lines
    candidates = tuple(candidate.strip() for candidate in listed.split(","))
    if answer not in candidates or len(set(candidates)) < 2:
        raise InputError(f"{where}: the answer must be one of {listed!r}, got {answer!r}; fix or remove it")
    places = [match.span() for match in re.finditer(rf"(?<!\w){re.escape(pronoun)}(?!\w)", sentence)]
    if not places:
        raise InputError(f"{where}: the sentence must have the pronoun {pronoun!r}, got {sentence!r}; fix or remove it")
    named = max(sentence.lower().find(candidate.lower()) for candidate in candidates)
    start, end = next((place for place in places if place[0] > named), places[-1])
    after = re.sub(r"^ (?=[.,;:!?'])", "", sentence[end:])
    return Schema(
        where, sentence[:start].strip(), pronoun, after, candidates, candidates.index(answer), len(places) > 1
    )


def _choices(name: str, title: str) -> ZeroShotTask:
    return ZeroShotTask(name, title, partial(measure_choices, name=name), needs="any")


COMPARISONS = (
    ZeroShotTask("cola", "acceptability of sentences (the directory of GLUE)", measure_acceptability, needs="any"),
    ZeroShotTask("sst2", "sentiment of sentences (GLUE's directory, or a file)", measure_sentiment),
    _choices("race", "answers to a question about an article (RACE's directory)"),
    _choices("codah", "endings of a sentence (CODAH's directory, or a file)"),
    _choices("swag", "endings of a sentence (SWAG's directory, or a file)"),
    _choices("story_cloze", "endings of a story (the directory of the Story Cloze Test, or a file)"),
    ZeroShotTask("cbt", "a word of a story, ten candidates (a file of the Children's Book Test)", measure_cloze),
    ZeroShotTask(
        "dpr",
        "the referent of a pronoun (as wsc273)",
        partial(measure_referents, by=lambda text: text.mean, unit="mean over tokens"),
    ),
    ZeroShotTask(
        "wsc273",
        "the referent of a pronoun (blocks of sentence, pronoun, candidates, answer)",
        partial(measure_referents, by=lambda text: text.sum, unit="sum over tokens"),
        harness="wsc273",
    ),
    ZeroShotTask(
        "lambada",
        "the last word of a passage (JSONL with `text`)",
        measure_last_words,
        options=("sample", "stop_words"),
        harness="lambada_openai",
    ),
    ZeroShotTask(
        "blimp",
        "acceptable and unacceptable sentences (a JSONL file per paradigm, or their directory)",
        measure_pairs,
        needs="any",
        harness="blimp",
    ),
)
