"""Class weights as given on the command line, or from the training split."""

import numpy as np
import pytest
from sklearn.utils.class_weight import compute_class_weight

from jaxlm.errors import InputError
from jaxlm.tasks import KINDS, Example, Split, TaggedSentence, Task
from jaxlm.tasks.class_weights import check_smoothing, class_weights, weight_notes

LABELS = ("cold", "hot", "mild")


def task(kind="classification", labels=LABELS, **more) -> Task:
    return KINDS[kind](name="custom", labels=labels, **more)


def split(labels) -> Split:
    return Split(tuple(Example(("a",), label=label) for label in labels))


def test_balanced_weights_are_those_of_scikit_learn():
    """Fails when a class without an example in train divides by zero, or counts as one of the classes."""
    labels = np.random.default_rng(0).choice(LABELS, 50, p=[0.1, 0.6, 0.3]).tolist()
    wanted = compute_class_weight("balanced", classes=np.array(LABELS), y=labels)
    assert class_weights(("balanced",), task(), split(labels)) == pytest.approx(wanted.tolist())
    more = task(labels=(*LABELS, "zero"))
    assert class_weights(("balanced",), more, split(labels)) == pytest.approx([*wanted, 1.0])


def test_balanced_weights_of_several_labels_are_absence_over_presence():
    labels = [("cold",), (), ("cold", "hot"), ("hot",), ()]
    assert class_weights(("balanced",), task("multilabel"), split(labels)) == pytest.approx((3 / 2, 3 / 2, 1.0))


def test_balanced_weights_of_tags_count_tokens_as_the_model_spells_them():
    """I- at the beginning of an entity is B- to the model; fails when it is counted as the file spells it."""
    rows = Split((TaggedSentence(("a", "b", "c", "d"), ("I-X", "I-X", "O", "O")),))
    found = class_weights(("balanced",), task("tagging", ("O", "B-X", "I-X")), rows)
    assert found == pytest.approx((4 / (3 * 2), 4 / 3, 4 / 3))


def test_weights_by_name_leave_the_others_at_one():
    """A label may hold an equals sign; the last one separates."""
    assert class_weights((), task(), split(())) == ()
    assert class_weights(("hot=2.5", "mild=0"), task(), split(())) == (1.0, 2.5, 0.0)
    assert class_weights(("a=b=3",), task(labels=("a=b", "c")), split(())) == (3.0, 1.0)


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        (("warm=2",), "classification", "with the labels cold, hot, mild, got warm=2; give one of them, or balanced"),
        (("hot",), "classification", "as NAME=WEIGHT, with the labels cold, hot, mild, got hot"),
        (("hot=2", "hot=3"), "classification", "at most once, .* got hot=3 twice"),
        (("balanced", "hot=2"), "classification", "must be balanced or NAME=WEIGHT, got balanced hot=2"),
        (("hot=-1",), "classification", "finite weights of at least 0, got hot=-1"),
        (("hot=nan",), "classification", "finite weights of at least 0, got hot=nan"),
        (("hot=x",), "classification", "finite weights of at least 0, got hot=x"),
        (("hot=0", "cold=0", "mild=0"), "classification", "must have a weight above 0"),
        (("hot=2",), "regression", "must be left out for a regression task, got hot=2"),
        (("hot=2",), "choice", "must be left out for a choice task"),
    ],
)
def test_wrong_weights_are_refused(given, kind, said):
    with pytest.raises(InputError, match=f"^--class-weights .*{said}"):
        class_weights(given, task(kind), split(("hot",)))


def test_weights_are_said():
    """Fails when a user cannot see what `balanced` has chosen."""
    assert weight_notes(task()) == ()
    assert weight_notes(task(class_weights=(1.0, 2.5, 1 / 3))) == ("class weights: cold 1, hot 2.5, mild 0.3333",)
    (line,) = weight_notes(task(labels=tuple(map(str, range(22))), class_weights=(1.0,) * 22))
    assert line.endswith("19 1 and 2 more")


def test_smoothing_without_classes_is_refused():
    check_smoothing(task(), 0.1)
    check_smoothing(task("regression"), 0.0)
    with pytest.raises(InputError, match="--label-smoothing must be 0 for a span task, got 0.1; leave it out"):
        check_smoothing(task("span"), 0.1)
