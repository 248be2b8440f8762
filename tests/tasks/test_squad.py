"""Questions on texts: reading, windows, answers and their scores, each against hand-made cases or another statement."""

import collections
import dataclasses
import json
import math

import numpy as np
import pytest

from jaxlm.errors import InputError
from jaxlm.tasks import (
    TASKS,
    CustomConfig,
    SpanExample,
    TaskOptions,
    TrainBatches,
    encode_examples,
    encode_split,
    eval_batches,
    predictions,
    read_labelled,
    read_rows,
    read_task,
    steps_of_epochs,
    task_from_json,
)
from jaxlm.tasks.metrics.answers import answer_scores, best_threshold, normalized, token_f1
from jaxlm.tasks.token_rows import most_context, windows

CLS, SEP = 1, 2


class Words:
    """A word is a token, its id by its length; places are known."""

    specials = {"pad": 0, "cls": CLS, "sep": SEP}

    def encode_batch(self, texts):
        return [ids for ids, _ in self.encode_batch_with_offsets(texts)]

    def encode_batch_with_offsets(self, texts):
        found = []
        for text in texts:
            places, place = [], 0
            for word in text.split():
                start = text.index(word, place)
                place = start + len(word)
                places.append((start, place))
            found.append(([10 + b - a for a, b in places], np.array(places, np.int64).reshape(-1, 2)))
        return found


def qa(name, question, answers, context=None, **more):
    return {"id": name, "question": question, "answers": answers} | more


def official(*paragraphs):
    return json.dumps(
        {"version": "v", "data": [{"title": "T", "paragraphs": [{"context": c, "qas": q} for c, q in paragraphs]}]}
    )


def at(context, text, occurrence=0):
    place = -1
    for _ in range(occurrence + 1):
        place = context.index(text, place + 1)
    return {"text": text, "answer_start": place}


CONTEXT = "Zoë saw the\u200b cat at 5 PM, the \U0001f642 cat at noon."


def write(directory, **parts):
    for part, content in parts.items():
        (directory / f"{part}.json").write_text(content, encoding="utf-8")
    return str(directory)


def test_offsets_count_code_points_and_questions_are_stripped(tmp_path):
    answer = at(CONTEXT, "cat at noon")  # beyond letters of two and four bytes
    train = official((CONTEXT, [qa("a", " When? ", [answer]), qa("b", "What?", [at(CONTEXT, "5 PM")])]))
    task, data = read_task("squad", write(tmp_path, train=train, dev=train))
    first = data.splits["train"].examples[0]
    assert (first.question, first.name) == ("When?", "a") and CONTEXT[slice(*first.answer_span)] == "cat at noon"
    assert data.report()[0] == "train: 2 examples of 2 rows read; 2 questions with an answer"
    assert (task.kind, task.metrics, task.num_outputs) == ("span", ("f1", "exact_match"), 2)
    assert task_from_json(json.loads(json.dumps(task.to_json()))) == task


def test_answers_astray_are_left_out_of_training_counted_and_listed_when_strict(tmp_path):
    wrong = [{"text": "cat", "answer_start": 3}]
    negative = [{"text": "noon.", "answer_start": -5}]
    good = qa("good", "?", [at(CONTEXT, "cat")])
    content = official((CONTEXT, [good, qa("off", "?", wrong), qa("minus", "?", negative)]))
    directory = write(tmp_path, train=content, dev=content)
    _, data = read_task("squad", directory)
    assert [example.name for example in data.splits["train"].examples] == ["good"]
    assert len(data.splits["dev"].examples) == 3  # every question is scored
    assert "2 of 3 questions have an answer that is not at its answer_start; they are dropped" in data.report()[1]
    with pytest.raises(InputError, match="train: 2 of 3 .* off, minus; fix the offsets") as error:
        read_task("squad", directory, strict=True)
    assert "\n" not in str(error.value)
    lost = official((CONTEXT, [qa("off", "?", wrong)]))
    with pytest.raises(InputError, match="no question has an answer at its answer_start"):
        read_task("squad", write(tmp_path, train=lost, dev=content))


def test_several_answers_in_training_are_said_once_and_plausible_ones_never_read(tmp_path):
    several = qa("a", "?", [at(CONTEXT, "5 PM"), at(CONTEXT, "cat")], is_impossible=False)
    none = qa("b", "?", [], is_impossible=True, plausible_answers=[at(CONTEXT, "cat")])
    content = official((CONTEXT, [several, none]))
    _, data = read_task("squad2", write(tmp_path, train=content, dev=content))
    one, other = data.splits["train"].examples
    assert CONTEXT[slice(*one.answer_span)] == "5 PM" and len(one.answers) == 2
    assert other.answers == () and other.labelled
    said = [line for line in data.report() if "several answers" in line]
    assert said == ["train: 1 questions have several answers; the first is the target"]
    with pytest.raises(InputError, match="answers must not be empty, .*--task squad2.*--unanswerable"):
        read_task("squad", str(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ('{"version": 1}', "a SQuAD file must have data, .*: KeyError.'data'"),
        (json.dumps({"data": [{"paragraphs": [{"context": "a", "qas": [{"id": "x"}]}]}]}), "no answers"),
        (official(("a b", [qa("x", "?", [{"text": "a"}])])), "answers must be objects with text and answer_start"),
        (official(("a b", [qa("x", "?", [at("a b", "a")])] * 2)), "ids must be distinct, got 'x' twice"),
        (official(("a b", [])), "has no questions"),
    ],
)
def test_files_that_do_not_fit(tmp_path, content, message):
    with pytest.raises(InputError, match=message) as error:
        read_task("squad", write(tmp_path, train=content, dev=content))
    assert "\n" not in str(error.value)


def split(*examples, length=32, part="dev", name="squad", **options):
    task = dataclasses.replace(TASKS[name], options=TaskOptions(**options))
    return task, encode_examples(task, examples, Words(), length, "bert", part=part)


def text_of(count):
    return " ".join(f"{n}".rjust(3, "w") for n in range(count))


def test_windows_start_a_stride_apart_as_in_the_original():
    def originals(total, room, stride):  # run_squad.py:340-355
        found, start = [], 0
        while start < total:
            length = min(total - start, room)
            found.append((start, length))
            if start + length == total:
                break
            start += min(length, stride)
        return found

    for total in range(1, 60):
        for room in (1, 5, 20):
            for stride in (1, 3, 30):
                assert windows(total, room, stride) == originals(total, room, stride)
    assert windows(0, 5, 3) == [(0, 0)]


def test_rows_are_windows_and_labels_their_places():
    context = text_of(30)
    answer = (context[context.index("w20") :][:7], context.index("w20"))  # words 20 and 21
    task, encoded = split(SpanExample("a", "one two", context, (answer,)), length=15, stride=8)
    assert len(encoded) == 4 and encoded.num_examples == 1 and encoded.first.tolist() == [0, 8, 16, 24]
    assert encoded.longest.tolist() == [15, 15, 15, 11] and encoded.rows_of(0) == range(4)
    assert encoded.labels.tolist() == [[0, 0], [0, 0], [8, 9], [0, 0]]
    (batch,) = eval_batches(encoded, batch_size=5)
    for row, window in enumerate(batch.index):
        if window >= 0:
            assert batch.ids[row, 0, 0] == CLS and batch.second[row, 0] == 4 and batch.extract[row, 0] == 0
            assert batch.ids[row, 0, 3] == SEP == batch.ids[row, 0, batch.lengths[row, 0] - 1]
    assert batch.ids.shape == (5, 1, 15) and batch.labels.shape == (5, 2)
    assert batch.weights.tolist() == [1, 1, 1, 1, 0] and batch.labels[4].tolist() == [0, 0]
    # An answer across the end of a window is not in it.
    _, across = split(SpanExample("a", "one two", context, (answer,)), length=15, stride=21)
    assert across.labels.tolist()[:2] == [[0, 0], [0, 0]]


def test_questions_are_cut_and_counted_and_must_leave_room():
    _, encoded = split(SpanExample("a", text_of(9), "b c", None), question_length=4)
    assert encoded.truncated == 1 and encoded.begin(0) == 6 and not encoded.labelled
    with pytest.raises(InputError, match="length must exceed the 12 tokens of a question"):
        split(SpanExample("a", text_of(9), "b c", None), length=10)


def test_the_length_of_a_run_counts_questions():
    examples = [SpanExample(str(n), "q", text_of(30), ((text_of(30)[:3], 0),)) for n in range(8)]
    _, encoded = split(*examples, length=15, stride=4)
    num_steps = steps_of_epochs("bert", encoded, batch_size=4, num_epochs=3)
    batches = TrainBatches(encoded, batch_size=4, num_steps=num_steps, seed=0)
    assert len(encoded) == 8 * 6 and num_steps == 3 * 8 // 4 and batches.steps_per_epoch == 12
    assert batches[0].labels.shape == (4, 2)


def test_most_context():
    def originals(spans, place):  # run_squad.py, _check_is_max_context
        best, best_window = None, None
        for number, (start, length) in enumerate(spans):
            if start <= place < start + length:
                score = min(place - start, start + length - 1 - place) + 0.01 * length
                if best is None or score > best:
                    best, best_window = score, number
        return best_window

    for total, room, stride in ((30, 10, 4), (31, 12, 5), (9, 20, 3), (40, 9, 9)):
        spans = windows(total, room, stride)
        masks = most_context(spans)
        owners = {start + k: number for number, (start, _) in enumerate(spans) for k in np.flatnonzero(masks[number])}
        assert owners == {place: originals(spans, place) for place in range(total)}


def logits(encoded, seed=0, padding=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((int(n) + padding, 2)).astype(np.float32) * 3 for n in encoded.longest]


def originals_answers(encoded, outputs, question, context, longest):
    """All candidates by loops, as run_squad.py:770-860, with as many starts and ends as there are."""
    spans = [(int(encoded.first[row]), int(encoded.count[row])) for row in encoded.rows_of(question)]
    masks, found, null = most_context(spans), [], math.inf
    for (row, (first, count)), mask in zip(zip(encoded.rows_of(question), spans, strict=True), masks, strict=True):
        begin = encoded.begin(row)
        null = min(null, float(outputs[row][0, 0]) + float(outputs[row][0, 1]))
        for start in range(count):
            for end in range(start, min(count, start + longest)):
                if mask[start]:
                    score = float(outputs[row][begin + start, 0]) + float(outputs[row][begin + end, 1])
                    words = context.split()[first + start : first + end + 1]
                    found.append((score, " ".join(words)))
    return sorted(found, reverse=True), null


def test_answers_are_the_best_pairs_of_a_start_and_an_end():
    context = text_of(40)
    examples = [SpanExample(str(n), "a question", context, ((context[:3], 0),)) for n in range(20)]
    task, encoded = split(*examples, length=20, stride=7, num_best=40, answer_length=4, name="squad2")
    outputs = logits(encoded)
    found = predictions(task, encoded, outputs, threshold=0.0)
    for question in range(20):
        pairs, null = originals_answers(encoded, outputs, question, context, 4)
        entries = [e for e in found.files["nbest_predictions.json"][str(question)] if e["text"]]
        texts = list(dict.fromkeys(text for _, text in pairs))[: len(entries)]
        assert len(entries) >= 39 and [entry["text"] for entry in entries[:30]] == texts[:30]
        assert entries[0]["start_logit"] + entries[0]["end_logit"] == pytest.approx(pairs[0][0])
        odds = found.files["null_odds.json"][str(question)]
        assert odds == pytest.approx(null - pairs[0][0])
        assert found.lines[question][0] == (texts[0] if odds < 0 else "")
    assert len({line[0] for line in found.lines}) > 10


def test_padding_and_the_length_of_a_batch_change_nothing():
    examples = [SpanExample(str(n), "a question", text_of(20 + n), ()) for n in range(5)]
    task, encoded = split(*examples, length=20, stride=7, name="squad2")
    outputs = logits(encoded)
    padded = [np.concatenate([row, np.full((9, 2), 99.0, np.float32)]) for row in outputs]
    assert predictions(task, encoded, outputs) == predictions(task, encoded, padded)


def test_answers_are_cut_from_the_original_text():
    context = "Él  vió\u200b the   CAT."
    task, encoded = split(SpanExample("x", "Who ?", context, ((context[:3], 0),)))
    outputs = np.zeros((1, int(encoded.longest[0]), 2), np.float32)
    outputs[0, encoded.begin(0), 0] = outputs[0, encoded.begin(0) + 3, 1] = 5
    assert predictions(task, encoded, outputs).lines[0][0] == context


def test_files_have_the_originals_names_and_shapes():
    examples = [SpanExample("q1", "a", "b c d", (("b", 0),)), SpanExample("q2", "a", "b c", ())]
    task, encoded = split(*examples, name="squad2", num_best=2)
    outputs = [np.zeros((int(n), 2), np.float32) for n in encoded.longest]
    outputs[0][encoded.begin(0)] = 4
    outputs[1][0] = 3
    found = predictions(task, encoded, outputs)
    assert found.files["predictions.json"] == {"q1": "b", "q2": ""}
    best = found.files["nbest_predictions.json"]
    assert list(best) == ["q1", "q2"] and best["q2"][0]["text"] == "" and best["q1"][0]["text"] == "b"
    assert [set(entry) for entry in best["q1"]] == [{"text", "probability", "start_logit", "end_logit"}] * len(
        best["q1"]
    )
    assert "" in [entry["text"] for entry in best["q1"]]  # no answer is always among them
    assert all(sum(e["probability"] for e in entries) == pytest.approx(1) for entries in best.values())
    assert found.files["null_odds.json"] == {"q1": -8.0, "q2": 6.0}
    json.dumps(found.files), json.dumps(found.lines)
    plain, encoded = split(*examples[:1], part="test")
    files = predictions(plain, encoded, outputs[:1]).files
    assert set(files) == {"test/predictions.json", "test/nbest_predictions.json"}  # dev's are those at the top
    assert files["test/predictions.json"] == {"q1": "b"}


def test_where_no_text_can_be_answered_there_is_a_placeholder():
    task, encoded = split(SpanExample("x", "a", "", ()), SpanExample("y", "a", "b", ()), name="squad2")
    found = predictions(task, encoded, [np.zeros((int(n), 2), np.float32) for n in encoded.longest])
    assert found.files["nbest_predictions.json"]["x"][0]["text"] == "empty" and len(found.lines) == 2
    json.dumps(found.files, allow_nan=False)
    # Every end before every start among the best: the best of the rest, and no failure.
    task, encoded = split(SpanExample("x", "a", "b c d e", (("b", 0),)), num_best=1)
    outputs = np.zeros((1, int(encoded.longest[0]), 2), np.float32)
    outputs[0, encoded.begin(0) + 3, 0] = outputs[0, encoded.begin(0), 1] = 5
    assert predictions(task, encoded, outputs).lines[0][0] in ("b", "e")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The Cat,  a dog!", "cat dog"),
        ("An  U.S.-led theory", "usled theory"),
        ("the", ""),
        ("“quoted”", "“quoted”"),  # only ASCII's punctuation goes
        ("a-b the-end", "ab theend"),  # punctuation goes before articles
    ],
)
def test_normalising(text, expected):
    assert normalized(text) == expected


def test_scores_by_both_scripts():
    assert answer_scores("The cat!", ["a cat"], no_answer=False) == (1.0, 1.0)
    assert answer_scores("big cat", ["dog", "the big black cat"], no_answer=False) == (0.0, pytest.approx(0.8))
    assert answer_scores("cat cat", ["cat"], no_answer=False) == (0.0, pytest.approx(2 / 3))  # a multiset
    assert answer_scores("the", ["The"], no_answer=False) == (1.0, 0.0)  # nothing is left: 1.1's script
    assert answer_scores("the", ["The"], no_answer=True) == (1.0, 1.0)  # 2.0's
    assert answer_scores("", [], no_answer=True) == (1.0, 1.0) and answer_scores("x", [], no_answer=True) == (0.0, 0.0)
    assert answer_scores("", ["x", "the"], no_answer=True) == (0.0, 0.0)  # gold answers without words are left out
    assert token_f1("", "x", no_answer=True) == 0.0


def test_the_best_threshold_is_the_best():
    rng = np.random.default_rng(0)
    for trial in range(300):
        n = int(rng.integers(1, 12))
        odds = np.round(rng.standard_normal(n) * 3, int(rng.integers(0, 3)))
        gain, without = rng.choice([0.0, 0.5, 1.0], n), rng.choice([0.0, 1.0], n)
        value = lambda tau: np.where(odds < -tau, gain, without).sum()  # noqa: B023, E731
        candidates = [-o for o in odds] + [-o - 1e-6 for o in odds] + [odds.max() - 100, 100.0, 0.0]
        tau = best_threshold(odds, gain, without)
        assert value(tau) == pytest.approx(max(value(-c) for c in np.negative(candidates))), trial
        if value(0.0) == pytest.approx(value(tau)):
            assert tau == 0.0
    assert best_threshold(np.zeros(0), np.zeros(0), np.zeros(0)) == 0.0


def test_the_threshold_has_the_papers_sign_and_is_tuned_on_texts_that_0_would_empty():
    # Both questions prefer no answer at tau = 0; one has an answer, whose text is its best.
    examples = [SpanExample("has", "a", "b c", (("b", 0),)), SpanExample("none", "a", "b c", ())]
    task, encoded = split(*examples, name="squad2")
    outputs = [np.zeros((int(n), 2), np.float32) for n in encoded.longest]
    outputs[0][0], outputs[0][encoded.begin(0)] = 1.0, 0.5  # s_null 2, best 1: odds 1
    outputs[1][0], outputs[1][encoded.begin(1)] = 3.0, 0.5  # odds 5
    assert predictions(task, encoded, outputs, threshold=0.0).metrics["f1"] == 0.5
    tuned = predictions(task, encoded, outputs)
    assert tuned.metrics == {
        "f1": 1.0, "exact_match": 1.0, "f1_answerable": 1.0, "f1_unanswerable": 1.0, "threshold": -3.0
    }  # fmt: skip
    assert [line[0] for line in tuned.lines] == ["b", ""]  # answered if best > s_null + tau
    saved = dataclasses.replace(task, threshold=tuned.metrics["threshold"])
    new = [dataclasses.replace(example, answers=None) for example in examples]
    unlabelled = encode_examples(saved, new, Words(), 32, "bert")
    found = predictions(saved, unlabelled, outputs)
    assert [line[0] for line in found.lines] == ["b", ""] and found.metrics == {}


def test_a_users_own_questions(tmp_path):
    rows = [
        {"context": "a b c", "question": "q?", "answers": [{"text": "b", "answer_start": 2}], "id": "one"},
        {"context": "a b c", "question": "q?", "answers": {"text": ["c"], "answer_start": [4]}},
        {"context": "a b c", "question": "q?", "answers": []},
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "dev.jsonl").write_text(json.dumps(rows[0]) + "\n")
    custom = CustomConfig(train="train.jsonl", dev="dev.jsonl", kind="span")
    task, data = read_task("custom", str(tmp_path), custom)
    assert task.no_answer and [e.answers for e in data.splits["train"].examples] == [(("b", 2),), (("c", 4),), ()]
    assert [example.name for example in data.splits["train"].examples] == ["one", "1", "2"]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:2]))
    assert not read_task("custom", str(tmp_path), custom)[0].no_answer
    assert read_labelled(tmp_path / "dev.jsonl", task).examples == data.splits["dev"].examples
    renamed = [{"passage": "a b c", "ask": "q?", "gold": [{"text": "b", "answer_start": 2}]}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in renamed))
    named = dataclasses.replace(custom, dev="train.jsonl", text="passage", text_pair="ask", label="gold")
    assert read_task("custom", str(tmp_path), named)[1].splits["train"].examples[0].context == "a b c"
    with pytest.raises(InputError, match="line 1 has no field 'context'"):
        read_task("custom", str(tmp_path), custom)


def test_without_a_dev_part_questions_on_one_text_stay_together(tmp_path):
    rows = [
        {"context": f"text {n // 5}", "question": f"{n}", "answers": [{"text": "text", "answer_start": 0}]}
        for n in range(100)
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, data = read_task("custom", str(tmp_path), CustomConfig(train="train.jsonl", kind="span"))
    train, dev = ({example.context for example in data.splits[part].examples} for part in ("train", "dev"))
    assert (
        len(data.splits["dev"].examples) == 10
        and not train & dev
        and "rows with the same text together" in data.held_out
    )


def test_new_questions_stream(tmp_path):
    (tmp_path / "new.jsonl").write_text(
        '{"question": " q? ", "context": " c d"}\n\n{"question": "r", "context": "e"}\n'
    )
    found = list(read_rows(tmp_path / "new.jsonl", TASKS["squad2"]))
    assert found == [SpanExample("0", "q?", " c d", None), SpanExample("1", "r", "e", None)]
    (tmp_path / "new.tsv").write_text("question\tcontext\nq?\tc d\n")
    assert list(read_rows(tmp_path / "new.tsv", TASKS["squad"])) == [SpanExample("0", "q?", "c d", None)]
    (tmp_path / "bad.jsonl").write_text('{"question": 5, "context": "c"}\n')
    with pytest.raises(InputError, match="line 1: question must be a string, got 5"):
        list(read_rows(tmp_path / "bad.jsonl", TASKS["squad"]))


@pytest.mark.data
@pytest.mark.slow
def test_real_files(data_directory):
    from jaxlm.text import tokenizer_from_spec

    tokenizer = tokenizer_from_spec(f"wordpiece:{data_directory}/vocab/bert/bert-base-uncased-vocab.txt")
    task, data = read_task("squad", str(data_directory / "squad/v1.1"), strict=True)  # all answers are in their places
    assert [len(part.examples) for part in data.splits.values()] == [11877, 10570]
    encoded = encode_split(task, data, "train", tokenizer, 384, "bert")
    assert len(encoded) == 12032 and encoded.num_examples == 11877
    with_answer = {int(encoded.question_of[row]) for row in np.flatnonzero(encoded.labels.any(axis=1))}
    assert len(with_answer) == 11877  # no training answer falls between the windows
    for row in range(0, len(encoded), 97):  # the tokens of the label spell the answer, or a little more than it
        if encoded.labels[row].any():
            question = int(encoded.question_of[row])
            example, places = encoded.examples[question], encoded.offsets[encoded.context_of[question]]
            first, last = encoded.labels[row] - encoded.begin(row) + encoded.first[row]
            text = example.context[places[first, 0] : places[last, 1]]
            assert example.answers[0][0].strip() in text and len(text) < len(example.answers[0][0]) + 20
    task, data = read_task("squad2", str(data_directory / "squad/v2.0"))
    counts = {part: collections.Counter(bool(e.answers) for e in data.splits[part].examples) for part in data.splits}
    assert counts["train"] == {True: 2168, False: 2432} and counts["dev"] == {True: 742, False: 736}
    assert "train: 2168 questions have several answers; the first is the target" in data.report()
    encoded = encode_split(task, data, "dev", tokenizer, 384, "bert")
    gold = []
    for row in range(len(encoded)):
        scores = np.zeros((int(encoded.longest[row]), 2), np.float32)
        scores[encoded.labels[row, 0], 0] = scores[encoded.labels[row, 1], 1] = 9
        gold.append(scores)
    assert predictions(task, encoded, gold).metrics["f1"] == 1.0  # what is trained on is what is asked for
