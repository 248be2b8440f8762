"""The encoder's arrangement: segments, the original's rule for cutting, choices, batches that say where things are."""

import dataclasses

import numpy as np
import pytest

from jaxlm.errors import InputError
from jaxlm.tasks import FORMATS, TASKS, Example, encode_examples, eval_batches, predictions
from jaxlm.tasks.input_formats import arrange_segments, truncate_pair

CLS, SEP = 1, 2


class Words:
    """A word of the form `7` is the token 107; other words are 99."""

    specials = {"pad": 0, "cls": CLS, "sep": SEP, "mask": 3}

    def encode_batch(self, texts):
        return [[100 + int(word) if word.isdigit() else 99 for word in text.split()] for text in texts]


def words(first, count):
    return " ".join(str(number) for number in range(first, first + count))


def tokens(first, count):
    return list(range(100 + first, 100 + first + count))


def encode(name, *examples, length=64, **changes):
    task = dataclasses.replace(TASKS[name], **changes)
    return encode_examples(task, examples, Words(), length, "bert")


def sequences(encoded, example=0):
    return [sequence.tolist() for sequence in encoded.sequences(example)]


def test_forms():
    single = encode("cola", Example(("5 6",), (), "1"))
    assert sequences(single) == [[CLS, 105, 106, SEP]] and single.second.tolist() == [4]
    for name in ("rte", "mrpc"):  # a similarity pair is read once: an encoder sees both ways
        pair = encode(name, Example(("5 6", "7"), (), TASKS[name].labels[0]))
        assert sequences(pair) == [[CLS, 105, 106, SEP, 107, SEP]] and pair.second.tolist() == [4]
        assert pair.num_sequences == 1 == FORMATS["bert"].num_sequences(TASKS[name])
    choices = encode("codah", Example(("5",), ("6", "7 8", "9", "1"), "2"))
    assert sequences(choices)[1] == [CLS, 105, SEP, 107, 108, SEP] and choices.second.tolist() == [3] * 4
    assert choices.num_sequences == 4 and choices.labels.tolist() == [2]
    empty = encode("rte", Example(("", ""), (), "entailment"))
    assert sequences(empty) == [[CLS, SEP, SEP]]


def one_at_a_time(first, second, room):
    """google-research/bert, run_classifier.py, `_truncate_seq_pair`."""
    while first + second > room:
        if first > second:
            first -= 1
        else:
            second -= 1
    return first, second


def test_pairs_are_cut_as_the_original_does():
    for first in range(14):
        for second in range(14):
            for room in range(2, 20):
                assert truncate_pair(first, second, room) == one_at_a_time(first, second, room), (first, second, room)


def test_cutting_is_at_the_end_and_counted():
    pair = encode("rte", Example((words(0, 9), words(20, 3)), (), None), length=10)
    assert sequences(pair) == [[CLS, *tokens(0, 4), SEP, *tokens(20, 3), SEP]]
    assert pair.truncated == 1 and pair.longest.tolist() == [10] and pair.second.tolist() == [6]
    single = encode("cola", Example((words(0, 9),), (), None), length=10)
    assert sequences(single) == [[CLS, *tokens(0, 8), SEP]] and single.truncated == 1
    fits = encode("cola", Example((words(0, 8),), (), None), length=10)
    assert fits.truncated == 0


def test_of_an_article_with_a_question_only_the_article_is_cut():
    race = encode("race", Example((words(0, 30), "50 51"), ("61", "62 63", "64", "65"), "B"), length=14)
    assert sequences(race)[1] == [CLS, *tokens(0, 7), SEP, 150, 151, 162, 163, SEP]
    assert sequences(race)[0] == [CLS, *tokens(0, 8), SEP, 150, 151, 161, SEP]
    nothing_left = encode("race", Example((words(0, 30), words(40, 20)), ("61",) * 4, "B"), length=14)
    assert sequences(nothing_left)[0] == [CLS, SEP, *tokens(40, 11), SEP]
    swag = encode("swag", Example((words(0, 9), "50"), ("61",) * 4, "1"), length=10)  # a pair like any other
    assert sequences(swag)[0] == [CLS, *tokens(0, 5), SEP, 150, 161, SEP]


def test_what_becomes_of_a_second_text():
    question = Example(("Article.", "Who is _ ?"), ("he", "she"))
    assert FORMATS["bert"].read(question, TASKS["race"]) == (("Article.",), ("Who is he ?", "Who is she ?"))
    plain = Example(("Article.", "Who?"), ("he", "she"))
    assert FORMATS["bert"].read(plain, TASKS["race"]) == (("Article.",), ("Who? he", "Who? she"))
    assert FORMATS["gpt1"].read(question, TASKS["race"]) == (
        question.texts,
        question.choices,
    )  # article, question $ option
    swag = Example(("She sits.", "She"), ("eats.", "sings."))
    for kind in ("gpt1", "bert"):
        assert FORMATS[kind].read(swag, TASKS["swag"]) == (("She sits.",), ("She eats.", "She sings."))


def test_batches_say_where_the_second_segment_begins():
    examples = [Example((words(0, n), words(30, m)), (), "entailment") for n, m in ((3, 4), (9, 1), (1, 1))]
    encoded = encode("rte", *examples)
    (batch,) = eval_batches(encoded, batch_size=4)
    for row, index in enumerate(batch.index):
        if index < 0:
            assert not batch.lengths[row].any() and not batch.second[row].any() and batch.weights[row] == 0
            continue
        ids, second, length = batch.ids[row, 0], batch.second[row, 0], batch.lengths[row, 0]
        assert ids[0] == CLS and batch.extract[row, 0] == 0
        assert ids[second - 1] == SEP and ids[second] == 130 and ids[length - 1] == SEP and not ids[length:].any()
    alone = encode("cola", Example(("5 6 7",), (), "1"))
    (batch,) = eval_batches(alone, batch_size=1)
    assert (batch.second == batch.lengths).all()  # no second segment


def test_scores_are_as_for_the_decoder():
    task = dataclasses.replace(TASKS["stsb"], mean=2.0, deviation=0.5)
    examples = [Example(("5", "6"), (), 3.0), Example(("5", "7"), (), 2.0)]
    encoded = encode_examples(task, examples, Words(), 16, "bert", part="dev")
    assert encoded.labels.dtype == np.float32 and encoded.labels.tolist() == [2.0, 0.0]
    found = predictions(task, encoded, np.array([[1.0], [-1.0]]))
    assert found.lines == [(2.5, {}), (1.5, {})] and set(found.metrics) == {"pearson", "spearman"}


def test_what_cannot_be_is_refused_in_one_line():
    with pytest.raises(InputError, match="no CLS and no SEP; use a BERT vocabulary"):
        arrange_segments([[5]], [], "single", {"pad": 0}, 16)
    with pytest.raises(InputError, match="no SEP"):
        arrange_segments([[5]], [], "single", {"cls": 1}, 16)
    with pytest.raises(InputError, match="length must be at least 5 to hold a pair"):
        encode("cola", Example(("5",), (), "1"), length=4)
    for name in ("squad", "squad2", "ner"):
        with pytest.raises(InputError, match=f"task {name} needs an encoder"):
            encode_examples(TASKS[name], [], Words(), 64, "gpt1")
