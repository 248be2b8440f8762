"""Zero-shot tasks that compare log-probabilities, against a plain loop over full logits, one text at a time.

The reference shares nothing with the tasks but the model's forward pass and the tokenizer: no batches, no buckets, no
gathered positions.
"""

import json
import math
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import toy_run
from sklearn.metrics import matthews_corrcoef
from toy_processes import run_several
from toy_runs import assert_one_line, checksums, make_stores, pretrain_arguments, run_here

from jaxlm.errors import InputError
from jaxlm.evaluation.arguments import ZeroShotOptions
from jaxlm.evaluation.zero_shot import Results, changed_options, read_results
from jaxlm.inference.loaded_run import load_run
from jaxlm.models.model import Inputs
from jaxlm.zero_shot import ZERO_SHOT_TASKS
from jaxlm.zero_shot.comparisons import best_threshold, cloze_questions, read_schemas
from jaxlm.zero_shot.task import sampled

pytestmark = pytest.mark.usefixtures("two_devices")

PASSAGES = [
    "The cat sat on the mat and the dog lay on the rug",
    "In the morning the fox went over the hill twice",
    "A crow sang in the tree and the bird saw a fox",
]
PAIRS = [("The cat sat.", "The cat sat sat."), ("A fox saw the dog.", "A fox saw dog the."), ("It lay.", "Lay it lay.")]
SCHEMAS = """The cat saw the dog because he sat on the rug.
he
The cat,the dog
the dog

The fox left the bird its tree, and [MASK]  went over the hill.
[MASK]
The fox ,The bird
The fox
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    return toy_run.pretrained(directory / "run", toy_run.toy_store(directory / "store", toy_run.toy_tokenizer()))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A file of each task."""
    directory = tmp_path_factory.mktemp("files")
    write(directory / "lambada.jsonl", [{"text": text} for text in PASSAGES])
    rows = [{"sentence_good": good, "sentence_bad": bad, "UID": "twice", "field": "syntax"} for good, bad in PAIRS]
    write(directory / "blimp" / "a.jsonl", rows)
    write(directory / "blimp" / "b.jsonl", [row | {"UID": "other", "field": "semantics"} for row in rows[:2]])
    (directory / "schemas.txt").write_text(SCHEMAS)
    cola = [("s", k % 2, "", text) for k, text in enumerate([text for pair in PAIRS for text in pair] + PASSAGES)]
    for name, part in (("train", cola), ("dev", cola[2:7])):
        path = directory / "CoLA" / f"{name}.tsv"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join("\t".join(map(str, row)) + "\n" for row in part))
    (directory / "sst2.tsv").write_text("sentence\tlabel\nthe cat sat \t1\nthe dog lay \t0\nthe fox \t1\n")
    return directory


def write(path: Path, rows) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def reference(run):
    """(text, before) -> log-probability of each id of the text after the first, or with ids `before` in front, of each;
    and True where the id is the likeliest. float64.
    """
    loaded = load_run(f"{run}@7")
    forward = jax.jit(lambda ids: forward_logits(loaded, ids))

    def scores(text, before=()):
        ids = [*before, *loaded.tokenizer.encode(text)]
        padded = np.zeros((1, 48), np.int32)
        padded[0, : len(ids)] = ids
        logits = np.asarray(forward(padded), np.float64)[0, : len(ids) - 1]
        table = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        table -= logits.max(-1, keepdims=True)
        right = np.array(ids[1:])
        return table[np.arange(len(right)), right], logits.argmax(-1) == right

    scores.tokenizer = loaded.tokenizer
    return scores


def forward_logits(loaded, ids):
    outputs = loaded.model(loaded.params, Inputs(ids, np.arange(ids.shape[1])[None]))
    return loaded.model.logits(loaded.params, outputs.states, outputs.output)


def evaluate(run, *tasks, more=()):
    words = [word for task in tasks for word in ("--task", task)]
    ended = run_here("evaluate", "zero-shot", "--run", run, *words, "--beyond-length", "--batch-size", 8, *more)
    assert ended.code == 0, ended.errors
    return [json.loads(line) for line in ended.output.splitlines()]


def values(lines, **fields):
    found = [line for line in lines if all(line.get(name) == value for name, value in fields.items())]
    assert len(found) == 1, (fields, lines)
    return found[0]


def test_last_words(run, files, reference):
    """Fails when other tokens than the last one are scored."""
    lines = evaluate(f"{run}@7", f"lambada:{files}/lambada.jsonl")
    scores = [reference(text) for text in PASSAGES]
    losses, right = [-log_probs[-1] for log_probs, _ in scores], [greedy[-1] for _, greedy in scores]
    found = values(lines, metric="perplexity")
    assert found["value"] == pytest.approx(math.exp(np.mean(losses)), rel=1e-4)
    error = np.std(losses, ddof=1) / math.sqrt(3) * math.exp(np.mean(losses))
    assert found["stderr"] == pytest.approx(error, rel=1e-3)
    assert values(lines, metric="accuracy")["value"] == pytest.approx(np.mean(right))
    assert (found["examples"], found["scored"], found["left_context"]) == (3, 3, "nothing")
    assert any(len(reference.tokenizer.encode(" " + text.rpartition(" ")[2])) > 1 for text in PASSAGES)


def test_minimal_pairs(run, files, reference):
    """Fails when the first token is scored without a left context, when means are sums, or when paradigms of more rows
    count for more."""
    end = reference.tokenizer.specials["end"]
    for more, before in (((), ()), (("--left-context",), (end,))):
        lines = evaluate(f"{run}@7", f"blimp:{files}/blimp", more=more)
        assert {line["left_context"] for line in lines} == {reference.tokenizer.pieces([end])[0] if more else "nothing"}
        for metric, score in (("accuracy_sum", np.sum), ("accuracy_mean", np.mean)):
            right = [score(reference(good, before)[0]) > score(reference(bad, before)[0]) for good, bad in PAIRS]
            found = values(lines, metric=metric, paradigm="twice")
            assert found["value"] == pytest.approx(np.mean(right)) and found["field"] == "syntax"
            assert found["stderr"] == pytest.approx(np.std(right, ddof=1) / math.sqrt(3))
            overall = [line for line in lines if line["metric"] == metric and "field" not in line]
            assert len(overall) == 1 and overall[0]["examples"] == 5
            assert overall[0]["value"] == pytest.approx((np.mean(right) + np.mean(right[:2])) / 2)


def test_pronouns(run, files, reference):
    """Fails when the candidate itself counts in partial scoring, or an article keeps its capital in a sentence."""
    lines = evaluate(f"{run}@7", f"wsc273:{files}/schemas.txt", f"dpr:{files}/schemas.txt")
    sentences = [
        [("The cat saw the dog because", " the cat", " sat on the rug."),
         ("The cat saw the dog because", " the dog", " sat on the rug.")],
        [("The fox left the bird its tree, and", " the fox", " went over the hill."),
         ("The fox left the bird its tree, and", " the bird", " went over the hill.")],
    ]  # fmt: skip
    assert [[text.parts for text in schema.texts()] for schema in read_schemas(files / "schemas.txt")] == sentences
    for task, score in (("wsc273", np.sum), ("dpr", np.mean)):
        for metric, of in (("accuracy_full", 0), ("accuracy_partial", 2)):
            right = []
            for number, candidates in enumerate(sentences):
                found = []
                for parts in candidates:
                    first = len(reference.tokenizer.encode("".join(parts[:of]))) if of else 1
                    found.append(score(reference("".join(parts))[0][first - 1 :]))
                right.append(int(np.argmax(found)) == (1, 0)[number])
            assert values(lines, task=task, metric=metric)["value"] == pytest.approx(np.mean(right))


@pytest.mark.parametrize("protocol", ["harness", "all"])
def test_values_of_the_harness_are_left_to_it(run, files, protocol):
    """The harness's request for WSC273 has two blanks before its continuation (lm_eval/tasks/wsc273/wsc273.yaml and the
    default target_delimiter), and BLiMP's and LAMBADA's differ too. Fails when a value is reported under its name, or
    when the note does not name the command.
    """
    words = ("--task", f"wsc273:{files}/schemas.txt", "--protocol", protocol, "--beyond-length", "--batch-size", 8)
    ended = run_here("evaluate", "zero-shot", "--run", run, *words)
    assert ended.code == 0, ended.errors
    lines = [json.loads(line) for line in ended.output.splitlines()]
    assert [(line["protocol"], line["metric"]) for line in lines] == [
        ("paper", "accuracy_full"),
        ("paper", "accuracy_partial"),
    ]
    assert ended.errors.count(f"python -m jaxlm.evaluate harness --run {run} --tasks wsc273") == 1


def test_shortened_contexts_are_counted(run, files, reference):
    """Values and their lines in the table count the rows with a text of more tokens than the trained length and one
    that is only predicted. Fails when such a row is scored without a word, or when its two texts count twice.
    """
    tasks = (f"lambada:{files}/lambada.jsonl", f"blimp:{files}/blimp", f"dpr:{files}/schemas.txt")
    length = load_run(f"{run}@7").config.length
    words = [word for task in tasks for word in ("--task", task)]
    ended = run_here("evaluate", "zero-shot", "--run", f"{run}@7", *words, "--batch-size", 8)
    assert ended.code == 0, ended.errors
    lines = [json.loads(line) for line in ended.output.splitlines()]
    schemas = [["".join(text.parts) for text in schema.texts()] for schema in read_schemas(files / "schemas.txt")]
    for task, rows in (("lambada", [[text] for text in PASSAGES]), ("blimp", [*PAIRS, *PAIRS[:2]]), ("dpr", schemas)):
        longer = sum(max(len(reference.tokenizer.encode(text)) for text in texts) > length + 1 for texts in rows)
        found = [line for line in lines if line["task"] == task and "field" not in line]
        assert {(line["shortened"], line["context_length"]) for line in found} == {(longer, length)}
        shown = f", {longer} shortened to {length} tokens" if longer else "examples"
        assert all(line.endswith(shown) for line in ended.errors.splitlines() if line.startswith(task))
        assert longer > 0 or task == "blimp"
    assert values(evaluate(f"{run}@7", tasks[0]), metric="accuracy")["shortened"] == 0  # --beyond-length


def test_a_sample_and_the_lines_of_its_rows(run, files, reference, tmp_path):
    """Fails when a sample counts rows that it left out, when a smaller one has others, or when a line of --items has
    another text, log-probability or value than the row.
    """
    tasks, items = (f"lambada:{files}/lambada.jsonl", f"blimp:{files}/blimp"), tmp_path / "items.jsonl"
    lines = evaluate(f"{run}@7", *tasks, more=("--sample", 2, "--items", items))
    counts = {line["task"]: (line["scored"], line["examples"]) for line in lines if "field" not in line}
    assert counts == {"lambada": (2, 3), "blimp": (4, 5)}
    assert {json.dumps(line["options"]) for line in lines} == {'{"sample": 2}'}
    found = [json.loads(line) for line in items.read_text().splitlines()]
    assert [item["task"] for item in found] == ["lambada"] * 2 + ["blimp"] * 4
    for item in found:
        texts = ["".join(parts) for parts in item["texts"]]
        scores = [reference(text)[0] for text in texts]
        if item["task"] == "lambada":
            tokens = len(reference.tokenizer.encode(item["texts"][0][0]))
            assert texts[0] in PASSAGES and item["log_probabilities"][0] == pytest.approx(
                scores[0][tokens - 1 :].sum(), rel=1e-4
            )
            assert item["perplexity"] == pytest.approx(math.exp(-scores[0][-1]), rel=1e-4)
        else:
            assert tuple(texts) in PAIRS and item["accuracy_sum"] == bool(scores[0].sum() > scores[1].sum())
            assert item["log_probabilities"] == pytest.approx([one.sum() for one in scores], rel=1e-4)
    right = [item["accuracy"] for item in found[:2]]
    assert values(lines, task="lambada", metric="accuracy")["value"] == np.mean(right)
    assert set(sampled(range(40), 5)) < set(sampled(range(40), 9)) < set(range(40))
    assert sampled(range(3), None) == sampled(range(3), 7) == [0, 1, 2]


def test_acceptability_fits_its_threshold_on_train(run, files, reference):
    """Fails when sums take the place of means, or when the threshold is fitted on the rows that it is reported on."""
    lines = evaluate(f"{run}@7", f"cola:{files}/CoLA")
    texts = [text for pair in PAIRS for text in pair] + PASSAGES
    means = np.array([reference(text)[0].mean() for text in texts])
    labels = np.arange(len(texts)) % 2 == 1
    middles = (np.sort(means)[1:] + np.sort(means)[:-1]) / 2
    best = middles[np.argmax([matthews_corrcoef(labels, means > middle) for middle in middles])]
    found = values(lines, metric="matthews")
    assert found["threshold"] == pytest.approx(best, abs=1e-5) and found["examples"] == 5
    assert found["value"] == pytest.approx(matthews_corrcoef(labels[2:7], means[2:7] > best))


def test_thresholds_against_all_of_them():
    """Fails when ties are split, or when a score without a mean is above the threshold."""
    random = np.random.default_rng(0)
    for _ in range(50):
        scores, labels = random.integers(0, 6, 20) / 2.0, random.random(20) < 0.5
        scores[0] = math.nan
        found = best_threshold(scores, labels)
        above = lambda threshold: np.nan_to_num(scores, nan=-math.inf) > threshold  # noqa: B023, E731
        best = max(
            matthews_corrcoef(labels, above(threshold)) for threshold in (*np.arange(-1, 5) / 2 + 0.25, math.inf)
        )
        assert matthews_corrcoef(labels, above(found)) == pytest.approx(best)


def test_sentiment(run, files, reference):
    """Fails when the words are compared without the sentence, or the blank at its end is kept."""
    (found,) = evaluate(f"{run}@7", f"sst2:{files}/sst2.tsv")
    right = []
    for text, label in (("the cat sat", 1), ("the dog lay", 0), ("the fox", 1)):
        first = len(reference.tokenizer.encode(f"{text} very")) - 1
        words = [reference(f"{text} very {word}")[0][first:].sum() for word in ("negative", "positive")]
        right.append(int(np.argmax(words)) == label)
    assert found["value"] == pytest.approx(np.mean(right)) and found["examples"] == 3


def cloze(query: str, answer: str, candidates: str, sentences: int = 20) -> str:
    """A question in the layout of the Children's Book Test's files, whose sentences may end with a blank."""
    lines = [f"{number} He sat . " for number in range(1, sentences + 1)]
    return "\n".join([*lines, f"{sentences + 1} {query}\t{answer}\t\t{candidates}", "", ""])


def test_cloze_questions_read_the_original_format(tmp_path):
    """Fails when the candidate is not followed by the rest of its sentence, when the query's tabs or a blank at the end
    of a line stay in the text, or when a candidate that is listed twice ties with itself.
    """
    question = cloze("Then the XXXXX saw a fox .", "dog", "cat|dog|bird|fox|crow|tree|hill|mat|rug|sun|dog")
    (tmp_path / "cbt.txt").write_text(question + question)
    found = list(cloze_questions(tmp_path / "cbt.txt"))
    assert len(found) == 2 and len(found[0][0]) == 10 and found[0][1] == 1
    assert found[0][0][1].parts == (" ".join(["He sat."] * 20) + " Then the", " dog saw a fox.")


def test_candidates_that_end_a_word_are_joined_to_it(tmp_path):
    """By hand: `'s`, `'ll` and `n't` have no blank before them, as in the context. Fails when they are scored as words
    of their own, or when the candidates of a question are scored from different words on.
    """
    query = "I think he XXXXX going , `` so . ''"
    (tmp_path / "verbs.txt").write_text(
        cloze(query, "was", "'s|was|'ll") + cloze("I do XXXXX know .", "n't", "n't|not")
    )
    (verbs, _), (negations, right) = cloze_questions(tmp_path / "verbs.txt")
    sentences = " ".join(["He sat."] * 20)
    rest = ' going, "so."'
    assert [text.parts for text in verbs] == [
        (f"{sentences} I think", f" he{verb}{rest}") for verb in ("'s", " was", "'ll")
    ]
    assert [text.parts for text in negations] == [
        (f"{sentences} I", " don't know."),
        (f"{sentences} I", " do not know."),
    ]
    assert right == 0


@pytest.mark.parametrize(
    "cut, message",
    [
        (
            lambda text: text.rstrip().rpartition("\n")[0],
            r"the last question must have 21 lines, got 20; fix or remove it",
        ),
        (lambda text: "\n".join(text.splitlines()[:9]), "the last question must have 21 lines, got 9"),
        (lambda text: text.replace("9 He", "\n9 He", 1), "line 31 must have 21 lines, got 8"),
        (
            lambda text: text.replace("XXXXX", "XXXXX XXXXX"),
            "line 43 must have one XXXXX in the query, got 'the XXXXX XXX",
        ),
        (
            lambda text: text.replace("\t\t", "\t"),
            "line 43 must have a query, an answer, an empty field .* got 3 fields",
        ),
    ],
)
def test_a_question_that_is_cut_off_is_refused(tmp_path, cut, message):
    """Fails when the last question of an interrupted download is left out in silence."""
    question = cloze("the XXXXX sat .", "cat", "cat|dog")
    (tmp_path / "cbt.txt").write_text(question + cut(question))
    with pytest.raises(InputError, match=message):
        list(cloze_questions(tmp_path / "cbt.txt"))


def test_checkpoints_are_evaluated_once(run, files, tmp_path):
    """Fails when a second start evaluates again what is there, or gives other values than each step alone."""
    output = tmp_path / "found.jsonl"
    task = f"lambada:{files}/lambada.jsonl"
    more = ("--checkpoints", "all", "--output", output)
    assert evaluate(run, task, more=more) == []
    lines = read_results(output)
    assert [line["step"] for line in lines] == [3] * 2 + [7] * 2
    assert lines[2:] == evaluate(f"{run}@7", task)
    output.write_text("".join(json.dumps(line) + "\n" for line in lines[:2]))
    evaluate(run, task, more=more)
    assert read_results(output) == lines
    ended = run_here("evaluate", "zero-shot-curve", output, "--output", tmp_path / "figure.png")
    assert ended.code == 0, ended.errors
    points = json.loads(ended.output.splitlines()[-1])["curves"][str(output)]["lambada"]
    paper = [line["value"] for line in lines if line["metric"] == "accuracy"]
    assert [point[:2] for point in points] == [[3, paper[0] / 0.5923], [7, paper[1] / 0.5923]]
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_a_value_depends_on_its_own_options(tmp_path):
    """Fails when an option of another task is recorded, or when it makes a finished evaluation start again."""
    blimp, text = ZERO_SHOT_TASKS["blimp"], ZERO_SHOT_TASKS["wikitext2"]
    options = ZeroShotOptions(stride=5, left_context=True)
    assert changed_options(options, blimp) == {"left_context": True}
    assert changed_options(options, text) == {"left_context": True, "stride": 5}
    lines = [
        {"step": 1, "task": task, "path": "x", "protocol": "paper", "metric": "m", "value": 1.0, "stderr": 0.1}
        | {"options": {"left_context": True, "stride": 4}}
        for task in ("blimp", "wikitext2")
    ]
    write(tmp_path / "lines.jsonl", lines)
    results = Results(tmp_path / "lines.jsonl", keep=True)
    assert results.hold(1, blimp, "x", options) and not results.hold(1, text, "x", options)


@pytest.mark.parametrize(
    "words, fragments",
    [
        (["--task", "lambda:x.jsonl"], ["--task must name one of", "got 'lambda'; did you mean lambada?"]),
        ([], ["--task must be given, got none; write for example --task lambada:"]),
        (["--task", "blimp:FILES/blimp", "--stride", "5"], ["--stride must be given with one of wikitext2, ", "blimp"]),
        (["--task", "blimp:FILES/blimp", "--prompt", "x"], ["--prompt must be given with one of squad, coqa, "]),
        (
            ["--task", "text8:FILES/x", "--sample", "9"],
            ["--sample must be given with one of cola, ", "got 9 with text8"],
        ),
        (["--task", "squad:FILES/x", "--seed", "9"], ["--seed must be given with one of summarization, got 9 with sq"]),
        (["--task", "blimp:FILES/blimp", "--items", "FILES/no/x"], ["--items ", "/no/x: No such file or directory"]),
        (["--task", "race:missing"], ["missing must be a file or a directory, got a path that does not exist"]),
        (["--task", "lambada"], ["--task must be NAME:PATH, got 'lambada'"]),
        (["--task", "lambada:missing.jsonl"], ["missing.jsonl"]),
        (["--task", "lambada:FILES/damaged.jsonl"], ["damaged.jsonl line 2", "has no field 'text'"]),
        (["--task", "lambada:FILES/word.jsonl"], ["word.jsonl line 1 must have a word after a context"]),
        (["--task", "wsc273:FILES/lambada.jsonl"], ["lambada.jsonl line 1 must have four lines"]),
        (["--task", "dpr:FILES/schemas.txt", "--protocol", "harness"], ["--protocol must be paper for dpr"]),
        (["--task", "cola:FILES/sst2.tsv"], ["must be a directory with train.tsv and dev.tsv"]),
        (["--task", "lambada:FILES/lambada.jsonl", "--checkpoints", "5"], ["--checkpoints must be all or among 3, 7"]),
    ],
)
def test_bad_input_is_one_line(run, files, words, fragments):
    """Fails when a bad row or argument is skipped in silence, or is reported after the model has run."""
    write(files / "damaged.jsonl", [{"text": PASSAGES[0]}, {"words": "x"}])
    write(files / "word.jsonl", [{"text": "word"}])
    words = [word.replace("FILES", str(files)) for word in words]
    assert_one_line(run_here("evaluate", "zero-shot", "--run", run, *words), 2, *fragments)


def test_pretraining_evaluates_on_the_way(files, tmp_path):
    """Fails when values differ from those of the checkpoints, when a resumed run repeats or omits steps, or when the
    run itself changes."""
    stores = make_stores(tmp_path / "stores")
    words = ["--num-steps", 6, "--checkpoint-every", 2, "--length", 32, "--keep-every", 2]
    task = f"lambada:{files}/lambada.jsonl"
    more = ["--zero-shot", task, "--zero-shot-every", 2]
    plain, run = tmp_path / "plain", tmp_path / "run"
    assert run_here("pretrain", *pretrain_arguments(plain, stores, *words)).code == 0
    assert run_here("pretrain", *pretrain_arguments(run, stores, *words, *more)).code == 0
    lines = read_results(run / "zero_shot.jsonl")
    assert [line["step"] for line in lines] == [step for step in (0, 2, 4, 6) for _ in range(2)]
    assert checksums(run) == checksums(plain)
    command = ["evaluate", "zero-shot", "--run", run, "--task", task, "--checkpoints", "all"]
    assert run_here(*command, "--output", tmp_path / "after.jsonl").code == 0
    after = {(line["step"], line["protocol"], line["metric"]): line for line in read_results(tmp_path / "after.jsonl")}
    for line in lines[2:]:
        found = after.pop((line["step"], line["protocol"], line["metric"]))
        assert line["value"] == pytest.approx(found["value"], rel=1e-4)
    assert not after
    shutil.rmtree(run / "checkpoints" / "6")
    (run / "zero_shot.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:6]))
    assert run_here("pretrain", *pretrain_arguments(run, stores, *words, *more)).code == 0
    assert read_results(run / "zero_shot.jsonl") == lines


@pytest.mark.slow
def test_two_processes_evaluate_together(files, tmp_path):
    """Fails when a process scores a part of the rows, waits for the other one forever, or both write the file."""
    stores = make_stores(tmp_path / "stores")
    words = ["--num-steps", 4, "--checkpoint-every", 2, "--length", 32, "--zero-shot-every", 2]
    words += ["--zero-shot", f"lambada:{files}/lambada.jsonl", "--zero-shot", f"blimp:{files}/blimp"]
    runs = tmp_path / "one", tmp_path / "two"
    one = run_here("pretrain", *pretrain_arguments(runs[0], stores, *words))
    two = run_several("pretrain", *pretrain_arguments(runs[1], stores, *words), log=tmp_path / "log")
    assert [ended.code for ended in (one, *two)] == [0, 0, 0], [ended.errors for ended in (one, *two)]
    expected, found = (read_results(run / "zero_shot.jsonl") for run in runs)
    assert [line["step"] for line in found] == [line["step"] for line in expected]
    for line, other in zip(found, expected, strict=True):
        assert line["metric"] == other["metric"]
        assert line["value"] == pytest.approx(other["value"], rel=1e-5)
