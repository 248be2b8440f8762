"""Tasks with labels as text to text: T5's published forms (its appendix D), and predictions that are no label."""

import numpy as np
import pytest
from sklearn.metrics import f1_score

from jaxlm.errors import InputError
from jaxlm.tasks import TASKS, Example, SpanExample, Split, TaskData, task_from_json
from jaxlm.tasks.kinds.generation import Generated
from jaxlm.tasks.text_rows import TextSplit
from jaxlm.tasks.text_to_text import LabelledText, as_text, spaced


def converted(name, *examples, **fields):
    task, data = as_text(TASKS[name], TaskData({"train": Split(examples), "dev": Split(examples)}))
    return task, data.splits["dev"].examples


def predicted(task, examples, texts):
    rows = {"rows": (), "longest": np.zeros(len(examples)), "length": 9, "truncated": 0, "pad": 0, "labelled": True}
    return task.predicted(TextSplit(examples=examples, **rows), [Generated(text, -1.5) for text in texts], None)


@pytest.mark.parametrize(
    ("name", "example", "source", "target"),
    [
        ("cola", Example(("John made Bill master of himself.",), (), "1"),
         "cola sentence: John made Bill master of himself.", "acceptable"),
        ("sst2", Example(("it confirms fincher 's status",), (), "1"), "sst2 sentence: it confirms fincher 's status",
         "positive"),
        ("mnli", Example(("yeah well losing is", "The St. Louis Cardinals have always won."), (), "contradiction"),
         "mnli hypothesis: The St. Louis Cardinals have always won. premise: yeah well losing is", "contradiction"),
        ("rte", Example(("A smaller proportion", "Slovenia has 3,000 inhabitants."), (), "not_entailment"),
         "rte sentence1: A smaller proportion sentence2: Slovenia has 3,000 inhabitants.", "not_entailment"),
        ("mrpc", Example(("We acted", "Rather"), (), "1"), "mrpc sentence1: We acted sentence2: Rather", "equivalent"),
        ("qnli", Example(("Where did Jebe die?", "Genghis Khan"), (), "entailment"),
         "qnli question: Where did Jebe die? sentence: Genghis Khan", "entailment"),
        ("qqp", Example(("What attributes", "How I GET"), (), "0"),
         "qqp question1: What attributes question2: How I GET", "not_duplicate"),
        ("stsb", Example(("Representatives", "Puretunes"), (), 3.25),
         "stsb sentence1: Representatives sentence2: Puretunes", "3.2"),
        ("squad", SpanExample("q", "What does 'x' mean?", "It (x) is 1.5.", (("1.5", 10),)),
         "question: What does ' x ' mean ? context: It ( x ) is 1 . 5 .", "1 . 5"),
    ],
)  # fmt: skip
def test_published_forms(name, example, source, target):
    """Written down from the paper's appendix D and `preprocessors.py`. Fails when texts come in another order."""
    task, (pair,) = converted(name, example)
    assert pair.texts == (source,) and pair.targets == (target,) and pair.gold == example.gold
    again = task_from_json(task.to_json())
    assert isinstance(again, LabelledText) and again.original.to_json() == TASKS[name].to_json()
    assert again.pair(example) == pair and task.metrics == TASKS[name].metrics


def test_choices_are_named():
    task, (pair,) = converted(
        "codah", Example(("The sky is",), ("blue", "loud", "wet", "flat"), TASKS["codah"].labels[1])
    )
    assert pair.texts[0].startswith("codah choice1: blue choice2: loud choice3: wet choice4: flat ")
    assert pair.targets == ("choice2",)
    found = predicted(task, (pair,), ["choice2"])
    assert found.lines == [(TASKS["codah"].labels[1], {"log_probability": -1.5})] and found.metrics["accuracy"] == 1


def test_a_prediction_that_is_no_label_is_wrong_and_counted():
    """Fails when a text that is no label counts as a class by chance, or is left out."""
    labels = ["1", "1", "0", "0", "1"]
    task, pairs = converted("mrpc", *(Example((str(k), "x"), (), label) for k, label in enumerate(labels)))
    texts = ["equivalent ", "hello", "not_equivalent", "equivalents", "not_equivalent"]
    found = predicted(task, pairs, texts)
    assert [line[0] for line in found.lines] == ["1", "hello", "0", "equivalents", "0"]
    given, wanted = [1, 1, 0, 0, 1], [1, 0, 0, 1, 0]  # as T5's f1_score_with_invalid
    assert found.metrics["f1"] == pytest.approx(f1_score(given, wanted)) and found.metrics["accuracy"] == 2 / 5
    assert found.metrics["no_label"] == 2 / 5
    task, pairs = converted("stsb", *(Example((str(k), "x"), (), k / 1.0) for k in range(4)))
    scores = predicted(task, pairs, ["0.0", "1.2", "two", "nan"])
    assert scores.metrics["no_label"] == 0.5 and [line[0] for line in scores.lines] == [0.0, 1.2, "two", "nan"]
    assert scores.metrics["pearson"] == pytest.approx(np.corrcoef([0, 1.2, -1, -1], range(4))[0, 1])


def test_answers_are_compared_as_squad_does():
    questions = [SpanExample(str(k), "Who?", "Ada did.", (("Ada", 0), ("the Ada", 0))) for k in range(2)]
    task, pairs = converted("squad", *questions)
    assert pairs[0].targets == ("Ada", "the Ada")
    assert predicted(task, pairs, ["ADA .", "did"]).metrics == {"f1": 0.5, "exact_match": 0.5, "no_label": 0.0}
    assert spaced("naïve cafe\u0301_1, ok") == "naïve cafe\u0301_1 , ok"


def test_kinds_without_a_text_form_are_refused():
    for name in ("ner", "squad2"):
        with pytest.raises(InputError, match=f"--as-text must be left out for the task {name} of kind"):
            as_text(TASKS[name], TaskData({}))
