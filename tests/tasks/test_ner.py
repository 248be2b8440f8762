"""Tags: columns in IOB1 and BIO, entities by the CoNLL definition, rows with their documents, a tag for every word."""

import dataclasses
import json

import numpy as np
import pytest

from jaxlm.errors import InputError
from jaxlm.tasks import (
    TASKS,
    CustomConfig,
    Size,
    TaggedSentence,
    TaskOptions,
    encode_examples,
    encode_split,
    eval_batches,
    predictions,
    read_labelled,
    read_rows,
    read_task,
    task_from_json,
)
from jaxlm.tasks.metrics.tags import entities, entity_metrics, scheme_of, spell
from jaxlm.tasks.token_rows import first_tokens, sentence_context

CLS, SEP = 1, 2


class Pieces:
    """Words are cut into pieces of two letters; a word of `~` alone has none."""

    specials = {"pad": 0, "cls": CLS, "sep": SEP}

    def encode_batch_with_offsets(self, texts):
        found = []
        for text in texts:
            places, place = [], 0
            for word in text.split(" "):
                if word.strip("~"):
                    places += [(place + k, min(place + k + 2, place + len(word))) for k in range(0, len(word), 2)]
                place += len(word) + 1
            found.append(([10 + ord(text[a]) for a, _ in places], np.array(places, np.int64).reshape(-1, 2)))
        return found


def write(directory, **files):
    for name, content in files.items():
        (directory / name.replace("__", ".")).write_text(content, encoding="utf-8")
    return str(directory)


IOB1 = """-DOCSTART- -X- O O

EU NNP I-NP I-ORG
rejects VBZ I-VP O
Peter NNP I-NP I-PER
Blackburn NNP I-NP I-PER
BRUSSELS NNP I-NP B-PER

Germany NNP I-NP I-LOC

-DOCSTART- -X- -X- O

He PRP I-NP O
"""


def test_conll_columns_and_documents(tmp_path):
    task, data = read_task("ner", write(tmp_path, eng__train=IOB1, eng__testa=IOB1, eng__testb=IOB1))
    first, second, third = data.splits["train"].examples
    assert first.tokens == ("EU", "rejects", "Peter", "Blackburn", "BRUSSELS")
    assert first.tags == ("I-ORG", "O", "I-PER", "I-PER", "B-PER")  # as they stand
    assert (first.document, second.document, third.document) == (0, 0, 1)  # a boundary, not a sentence
    assert task.labels == ("O", "B-LOC", "I-LOC", "B-ORG", "I-ORG", "B-PER", "I-PER") and task.scheme == "iob1"
    assert (task.kind, task.metric, task.num_outputs) == ("tagging", "entity_f1", 7)
    assert "3 examples of 3 rows read; 7 tokens in 2 documents; tags B-PER: 1" in data.report()[0]
    assert task_from_json(json.loads(json.dumps(task.to_json()))) == task
    assert data.splits["test"].labelled


def test_wnut_sentences_end_in_white_space_of_any_kind(tmp_path):
    train = "Blvd\tI-creative-work\n.\tO\n\t\nx\tB-person\n\ny\ufeff\tO\n"
    dev = "a\tO\n\nEmpire\tB-creative-work\n\ufeff\n"  # the last line is a mark without a width and without a tag
    task, data = read_task("ner", write(tmp_path, train__conll=train, dev__conll=dev, test__conll="z\tO\n"))
    assert [len(example.tokens) for example in data.splits["train"].examples] == [2, 1, 1]
    assert data.splits["train"].examples[2].tokens == ("y\ufeff",)
    assert data.splits["dev"].dropped == ((4, "only zero-width characters"),)
    assert [len(example.tokens) for example in data.splits["dev"].examples] == [1, 1]
    assert task.labels == ("O", "B-creative-work", "I-creative-work", "B-person", "I-person")  # the first - parts


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a\tO\nb\tX-PER\n", "train.conll line 2: a tag must be O, B-TYPE or I-TYPE, got 'X-PER'"),
        ("a\tO\nb\tB-\n", "line 2: a tag must be O, B-TYPE or I-TYPE, got 'B-'"),
        ("a\tO\nb\n", "line 2: 'b' has no tag"),
        ("\n\n", "has no sentences"),
        ("a\tO\n", "the training split has no entities"),
    ],
)
def test_columns_that_do_not_fit(tmp_path, content, message):
    with pytest.raises(InputError, match=message) as error:
        read_task("ner", write(tmp_path, train__conll=content, dev__conll="a\tO\n"))
    assert "\n" not in str(error.value)


def test_types_of_other_parts_must_be_known(tmp_path):
    with pytest.raises(
        InputError, match=r"dev.conll line 1: the type .* must be one of PER \(the training split\), got"
    ):
        read_task("ner", write(tmp_path, train__conll="a\tB-PER\n", dev__conll="x\tO\ny\tB-LOC\n"))


CASES = [  # tags, entities by conlleval's definition
    ("O O", []),
    ("B-PER I-PER O", [("PER", 0, 2)]),
    ("I-PER I-PER O", [("PER", 0, 2)]),
    ("I-PER B-PER", [("PER", 0, 1), ("PER", 1, 2)]),
    ("B-PER B-PER I-PER", [("PER", 0, 1), ("PER", 1, 3)]),
    ("B-PER I-LOC I-LOC", [("PER", 0, 1), ("LOC", 1, 3)]),
    ("O I-PER I-PER", [("PER", 1, 3)]),
    ("I-creative-work O I-creative-work", [("creative-work", 0, 1), ("creative-work", 2, 3)]),
]


@pytest.mark.parametrize(("tags", "expected"), CASES)
def test_entities(tags, expected):
    assert entities(tags.split()) == expected


def test_both_schemes_are_the_same_entities_and_are_spelt_back():
    rng = np.random.default_rng(0)
    for _ in range(300):
        tags = rng.choice(["O", "B-A", "I-A", "B-B", "I-B"], int(rng.integers(0, 9))).tolist()
        found = entities(tags)
        bio, iob1 = spell(found, len(tags)), spell(found, len(tags), "iob1")
        assert entities(bio) == entities(iob1) == found
        assert all(tag[0] == "B" for _, start, _ in found for tag in [bio[start]])
        for place, tag in enumerate(iob1):  # B- only between neighbours of one type
            assert tag[0] != "B" or (place and iob1[place - 1][2:] == tag[2:])
    assert scheme_of([["O", "I-A", "B-A"]]) == "iob1" and scheme_of([["O", "B-A", "I-A"], ["I-A"]]) == "bio"


def test_entity_f1_by_hand():
    truth = [["B-PER", "I-PER", "O", "B-LOC"], ["O", "B-ORG"]]
    figures = entity_metrics(truth, truth)
    assert figures == {"entity_f1": 1.0, "entity_precision": 1.0, "entity_recall": 1.0, "accuracy": 1.0}
    # One right (LOC, written as IOB1), one too short, one of another type, one invented; one of three is found.
    guess = [["B-PER", "O", "O", "I-LOC"], ["B-ORG", "B-PER"]]
    figures = entity_metrics(truth, guess)
    assert figures["entity_precision"] == 1 / 4 and figures["entity_recall"] == 1 / 3
    assert figures["entity_f1"] == pytest.approx(2 / 7) and figures["accuracy"] == pytest.approx(3 / 6)
    # The end of a sentence ends an entity; an I- without a beginning counts.
    assert entity_metrics([["B-A"], ["B-A"]], [["I-A"], ["I-A"]])["entity_f1"] == 1.0
    assert entity_metrics([["O"]], [["O"]])["entity_f1"] == 0.0  # nothing to find: no warning, no NaN


def tagged(*sentences, document=None):
    return [TaggedSentence(tuple(words.split()), tuple(tags.split()), document) for words, tags in sentences]


def encode(examples, length=64, task=None, **options):
    labels = ("O", "B-A", "I-A")
    task = task or dataclasses.replace(TASKS["ner"], labels=labels, options=TaskOptions(**options))
    return task, encode_examples(task, examples, Pieces(), length, "bert", part="dev")


def test_first_pieces_are_labelled_and_words_without_pieces_are_o():
    task, encoded = encode(tagged(("abcd ~ e", "I-A B-A O")))
    (batch,) = eval_batches(encoded, batch_size=2)
    assert batch.ids[0, 0, :5].tolist() == [CLS, 10 + ord("a"), 10 + ord("c"), 10 + ord("e"), SEP]
    assert batch.labels[0].tolist()[:5] == [-1, 1, -1, 0, -1] and (batch.labels[1] == -1).all()  # I-A begins one: B-A
    assert batch.labels.shape == (2, batch.ids.shape[-1]) and batch.lengths.tolist() == [[5], [0]]
    outputs = np.zeros((1, 8, 3))
    outputs[0, [1, 3], [1, 1]] = 9
    found = predictions(task, encoded, outputs)
    tags, scores = found.lines[0]
    assert tags == ["B-A", "O", "B-A"] and scores["probabilities"][1] is None and scores["probabilities"][0] > 0.99
    json.dumps(found.lines, allow_nan=False)


def test_words_past_the_limit_are_o_and_count():
    task, encoded = encode(tagged(("aa bb cc dd", "B-A B-A B-A B-A"), ("aa", "O")), length=5)
    assert encoded.truncated == 1 and encoded.longest.tolist() == [5, 3]
    outputs = [np.eye(3)[[0, 1, 1, 1, 0]] * 9, np.eye(3)[[0, 0, 0]]]
    found = predictions(task, encoded, outputs)
    assert [line[0] for line in found.lines] == [["B-A", "B-A", "B-A", "O"], ["O"]]
    assert found.metrics["entity_recall"] == 3 / 4


def test_predictions_are_spelt_as_in_the_training_file():
    task, encoded = encode(tagged(("aa bb cc", "I-A B-A O")))
    outputs = np.eye(3)[None, [0, 1, 1, 0, 0]] * 9
    assert predictions(task, encoded, outputs).lines[0][0] == ["B-A", "B-A", "O"]
    iob1 = dataclasses.replace(task, scheme="iob1")
    found = predictions(iob1, encoded, outputs)
    assert found.lines[0][0] == ["I-A", "B-A", "O"] and found.metrics["entity_f1"] == 1.0


def test_neighbours_of_the_document_are_read_but_not_labelled():
    sentences = [(" ".join([letter * 2] * 3), "O B-A O") for letter in "abcdefg"]
    examples = tagged(*sentences[:5], document=0) + tagged(*sentences[5:], document=1)
    _, encoded = encode(examples, length=2 + 9)  # room for three sentences of three pieces
    rows = [[chr(i - 10) for i in sequence[1:-1]] for row in range(7) for sequence in encoded.sequences(row)]
    seen = ["".join(dict.fromkeys(row)) for row in rows]
    assert seen == ["abc", "abc", "bcd", "cde", "cde", "fg", "fg"]
    for row in range(7):
        batch = encoded.batch(np.array([row]), Size(0, 11), 1)
        labelled = np.flatnonzero(batch.labels[0] >= 0)
        assert {chr(batch.ids[0, 0, place] - 10) for place in labelled} == {"abcdefg"[row]} and len(labelled) == 3
    _, alone = encode(examples, length=11, context="sentence")
    assert alone.longest.tolist() == [5] * 7
    _, unmarked = encode(tagged(*sentences), length=11)
    assert unmarked.longest.tolist() == [5] * 7  # no documents are marked


def test_surroundings_fill_the_room_and_stay_in_the_document():
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 9, 60)
    ends = np.concatenate([[0], np.cumsum(sizes)])
    documents = np.repeat([0, 1, 2], 20).tolist()
    for row in range(60):
        first, last = sentence_context(documents, ends, row, 25)
        assert first <= row < last and ends[last] - ends[first] <= 25
        assert set(documents[first:last]) == {documents[row]}
        for place in (first - 1, last):  # no neighbour that fits is left out
            if 0 <= place < 60 and documents[place] == documents[row]:
                assert ends[last] - ends[first] + sizes[place] > 25
    assert sentence_context([None] * 3, np.array([0, 1, 2, 3]), 1, 25) == (1, 2)


def test_first_pieces_with_blanks_that_are_pieces():
    # As SentencePiece has it: a blank belongs to the word after it, or is a piece of its own.
    offsets = np.array([(0, 2), (2, 5), (5, 6), (6, 7), (7, 9)])
    assert first_tokens(("ab", "cd", "efg"), offsets).tolist() == [0, 1, -1, 2, -1]
    assert first_tokens((), np.zeros((0, 2), np.int64)).tolist() == []


def test_a_users_own_sentences(tmp_path):
    rows = [{"tokens": ["Ann", "sat"], "tags": ["B-PER", "O"], "document": "d"}, {"tokens": ["x"], "tags": ["O"]}]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    custom = CustomConfig(train="train.jsonl", dev="train.jsonl", test="test.jsonl", kind="tagging")
    directory = write(tmp_path, train__jsonl=lines, test__jsonl='{"tokens": ["y"]}\n')
    task, data = read_task("custom", directory, custom)
    assert task.labels == ("O", "B-PER", "I-PER") and data.splits["train"].examples[0].document == "d"
    assert not data.splits["test"].labelled and task.name == "custom"
    assert read_labelled(tmp_path / "train.jsonl", task).examples == data.splits["train"].examples
    named = dataclasses.replace(custom, test="", text="words", label="marks")
    other = lines.replace("tokens", "words").replace("tags", "marks")
    assert read_task("custom", write(tmp_path, train__jsonl=other), named)[0].labels == task.labels
    columns = dataclasses.replace(custom, train="a.conll", dev="a.conll", test="")
    assert read_task("custom", write(tmp_path, a__conll="Ann\tB-PER\n"), columns)[0].labels == task.labels
    for row, message in (
        ({"tokens": ["a", "b"], "tags": ["O"]}, "line 1: 2 tokens must have as many tags, got 1"),
        ({"tokens": "a b", "tags": ["O"]}, "line 1: tokens must be a list of strings, got 'a b'"),
        ({"tokens": ["a"]}, "line 1 has no field 'tags'"),
        ({"text": "a", "tags": ["O"]}, "line 1 has no field 'tokens'"),
    ):
        with pytest.raises(InputError, match=message):
            read_task("custom", write(tmp_path, train__jsonl=json.dumps(row) + "\n"), custom)


def test_new_sentences_stream(tmp_path):
    write(tmp_path, a__jsonl='{"tokens": ["a", "b"]}\n{"text": "Don\'t go, Zoë."}\n', b__conll="a\nb\n\nc\tO\n")
    first, second = read_rows(tmp_path / "a.jsonl", TASKS["ner"])
    assert first == TaggedSentence(("a", "b")) and second.text == "Don't go, Zoë."
    assert second.tokens == ("Don", "'", "t", "go", ",", "Zoë", ".") and not second.labelled
    assert [example.tokens for example in read_rows(tmp_path / "b.conll", TASKS["ner"])] == [("a", "b"), ("c",)]
    write(tmp_path, c__tsv="text\tx\nGo on.\t1\n")
    assert [example.tokens for example in read_rows(tmp_path / "c.tsv", TASKS["ner"])] == [("Go", "on", ".")]


@pytest.mark.data
def test_real_wnut(data_directory):
    from jaxlm.text import tokenizer_from_spec

    tokenizer = tokenizer_from_spec(f"wordpiece:{data_directory}/vocab/bert/bert-base-uncased-vocab.txt")
    task, data = read_task("ner", str(data_directory / "ner/wnut17"))
    assert [len(split.examples) for split in data.splits.values()] == [3394, 1009, 1287]
    types = {label.partition("-")[2] for label in task.labels} - {""}
    assert types == {"corporation", "creative-work", "group", "location", "person", "product"} and task.scheme == "bio"
    assert sum(tag == "B-person" for e in data.splits["train"].examples for tag in e.tags) == 660
    without = {"dev": 4, "test": 3}  # words that are U+FE0F alone
    for part in ("dev", "test"):
        encoded = encode_split(task, data, part, tokenizer, 200, "bert")
        assert encoded.truncated == 0
        words = sum(len(example.tokens) for example in encoded.examples)
        assert words - int((encoded.words >= 0).sum()) == without[part]
        gold = []
        for row in range(len(encoded)):
            (batch,) = [encoded.batch(np.array([row]), Size(0, int(encoded.longest[row])), 1)]
            gold.append(np.eye(len(task.labels))[np.maximum(batch.labels[0], 0)] * 9)
        found = predictions(task, encoded, gold)
        assert found.metrics["entity_f1"] == 1.0 and len(found.lines) == len(encoded)
        assert all(len(tags) == len(e.tokens) for (tags, _), e in zip(found.lines, encoded.examples, strict=True))
    test = encode_split(task, data, "test", tokenizer, 512, "bert")
    assert max(len(sequence) for row in range(len(test)) for sequence in test.sequences(row)) == 189 + 2
