"""Choices: SWAG, RACE and the Story Cloze Test in small files of their formats, figures together and apart."""

import json

import numpy as np
import pytest

from jaxlm.errors import InputError
from jaxlm.tasks import TASKS, encode_split, predictions, read_rows, read_task


class Words:
    specials = {"pad": 0, "cls": 1, "sep": 2, "start": 1, "delimiter": 2, "extract": 3}

    def encode_batch(self, texts):
        return [[len(word) + 10 for word in text.split()] for text in texts]


def write(directory, files):
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return str(directory)


SWAG = ",video-id,fold-ind,startphrase,sent1,sent2,gold-source,ending0,ending1,ending2,ending3,label\n"


def test_swag_is_csv_and_its_second_sentence_begins_each_ending(tmp_path):
    row = '0,v,1,"She said, ""Hi"". He","She said, ""Hi"".",He,gold,"runs, fast.",sits.,eats.,"says ""no"".",3\n'
    unlabelled = SWAG.replace(",label", "") + row.replace(",3\n", "\n")
    task, data = read_task(
        "swag", write(tmp_path, {"train.csv": SWAG + row, "val.csv": SWAG + row, "test.csv": unlabelled})
    )
    (example,) = data.splits["train"].examples
    assert example.texts == ('She said, "Hi".', "He") and example.label == "3"
    assert example.choices == ("runs, fast.", "sits.", "eats.", 'says "no".')
    assert data.splits["test"].examples[0].label is None
    assert task.papers.get("bert", {})["batch_size"] == 16 and task.papers.get("bert", {})["length"] == 80
    full = SWAG[1:].replace("ending0", "gold-ending") + row.partition(",")[2]  # swag_full.csv: other columns, one fewer
    with pytest.raises(InputError, match="no column 'ending0'"):
        read_task("swag", write(tmp_path, {"train.csv": full, "val.csv": full}))


def passage(name, questions=2):
    return json.dumps(
        {
            "article": f"Article {name}.\n\nMore of it.",
            "questions": ["He is _ .", "Who?"][:questions],
            "options": [["a", "b", "c", "d"], ["e", "f", "g", "h"]][:questions],
            "answers": ["B", "D"][:questions],
            "id": f"{name}.txt",
        }
    )


def race(tmp_path):
    files = {}
    for part in ("train", "dev", "test"):
        files |= {f"RACE/{part}/middle/{n}.txt": passage(f"m{n}", 1) for n in ("10", "2")}
        files |= {f"RACE/{part}/high/7.txt": passage("h7")}
    return write(tmp_path, files)


def test_race_has_several_questions_a_file_and_its_files_are_sorted(tmp_path):
    directory = race(tmp_path)
    for place in (directory, directory + "/RACE"):
        task, data = read_task("race", place)
        articles = [example.texts[0].split(".")[0] for example in data.splits["dev"].examples]
        assert articles == ["Article m10", "Article m2", "Article h7", "Article h7"]
    assert [example.group for example in data.splits["dev"].examples] == ["middle", "middle", "high", "high"]
    assert [example.label for example in data.splits["dev"].examples] == ["B", "B", "B", "D"]
    encoded = encode_split(task, data, "dev", Words(), 64, "bert")
    outputs = np.array([[0, 9, 0, 0], [9, 0, 0, 0], [0, 9, 0, 0], [0, 0, 0, 9]])
    found = predictions(task, encoded, outputs)
    assert [line[0] for line in found.lines] == ["B", "A", "B", "D"]
    assert {name: value for name, value in found.metrics.items() if name.startswith("accuracy")} == {
        "accuracy": 0.75,
        "accuracy_middle": 0.5,
        "accuracy_high": 1.0,
    }
    decoder = encode_split(task, data, "dev", Words(), 64)
    assert decoder.num_sequences == 4 and predictions(task, decoder, outputs).metrics == found.metrics


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answers": ["E"]}, "question 1: a label must be one of A, B, C, D, got 'E'"),
        ({"options": [["a", "b", "c"]]}, "question 1: the row must have 4 choices, got 3"),
        ({"questions": ["a", "b"]}, "equally many, got 2, 1 and 1"),
    ],
)
def test_race_passages_that_do_not_fit(tmp_path, change, message):
    directory = race(tmp_path)
    path = tmp_path / "RACE/train/high/7.txt"
    path.write_text(json.dumps(json.loads(passage("h7", 1)) | change))
    with pytest.raises(InputError, match=message) as error:
        read_task("race", directory)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


STORY = (
    "InputStoryid,InputSentence1,InputSentence2,InputSentence3,InputSentence4,"
    "RandomFifthSentenceQuiz1,RandomFifthSentenceQuiz2,AnswerRightEnding\n"
)


def story(count):
    return STORY + "".join(
        f'id{n},One {n}.,"Two, two.",Three.,Four.,Good.,"Bad, bad.",{n % 2 + 1}\n' for n in range(count)
    )


def test_story_cloze_trains_on_the_validation_part_and_counts_endings_from_1(tmp_path):
    files = {
        "cloze_test_val__spring2016 - cloze_test_ALL_val.csv": story(20),
        "cloze_test_test__spring2016 - cloze_test_ALL_test.csv": story(3),
    }
    task, data = read_task("story_cloze", write(tmp_path, files))
    assert [len(split.examples) for split in data.splits.values()] == [16, 4, 3]  # a fifth, as 374 of 1,871
    example = data.splits["test"].examples[1]
    assert example.texts == ("One 1. Two, two. Three. Four.",) and example.choices == ("Good.", "Bad, bad.")
    assert example.label == "2" and task.label_number("2") == 1
    encoded = encode_split(task, data, "test", Words(), 64, "bert")
    assert predictions(task, encoded, np.array([[1.0, 0], [0, 1], [0, 1]])).metrics["accuracy"] == 2 / 3
    new = tmp_path / "new.jsonl"
    new.write_text(json.dumps({"context": "A story.", "choices": ["x", "y"]}) + "\n")
    assert [example.texts for example in read_rows(new, TASKS["story_cloze"])] == [("A story.",)]


def test_1871_stories_are_split_as_in_gpt1(tmp_path):
    files = {"val.csv": story(1871), "test.csv": story(2)}
    _, data = read_task("story_cloze", write(tmp_path, files))
    assert [len(data.splits[part].examples) for part in ("train", "dev")] == [1497, 374]
