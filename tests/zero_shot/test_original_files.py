"""Zero-shot tasks on files in the layout of their published archives, written for the test."""

import json
from pathlib import Path

import pytest

from jaxlm.errors import InputError
from jaxlm.zero_shot.continuations import labelled

PASSAGE = {
    "article": "The cat sat on the mat. It saw a crow.",
    "questions": ["Who sat on the mat?", "The cat saw _ ."],
    "options": [["A dog", "The cat", "A crow", "Nobody"], ["a crow", "a dog", "the sun", "it"]],
    "answers": ["B", "A"],
    "id": "high1.txt",
}


def write(path: Path, content: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8")
    return path


def race(directory: Path, *parts: str) -> Path:
    """RACE's archive: RACE/{train,dev,test}/{middle,high}/N.txt, with one question less in the middle school."""
    for part in parts:
        write(directory / "RACE" / part / "high" / "1.txt", json.dumps(PASSAGE))
        middle = {key: value[:1] if isinstance(value, list) else value for key, value in PASSAGE.items()}
        write(directory / "RACE" / part / "middle" / "2.txt", json.dumps(middle))
    return directory / "RACE"


@pytest.mark.parametrize(
    "place, count, split",
    [
        ("", 3, {"split": "dev"}),
        ("..", 3, {"split": "dev"}),
        ("test", 3, {}),
        ("dev/high", 2, {}),
        ("test/high/1.txt", 2, {}),
    ],
)
def test_race_without_train(tmp_path, place, count, split):
    """Fails when training files are required, when the test split cannot be named, or when a school is left out."""
    examples, found = labelled("race", race(tmp_path, "dev", "test") / place)
    assert (len(examples), found) == (count, split)
    assert {(one.texts[1], one.choices[0], one.label) for one in examples} == {
        ("Who sat on the mat?", "A dog", "B"),
        ("The cat saw _ .", "a crow", "A"),
    }


def test_only_the_split_that_is_scored_is_read(tmp_path):
    """Fails when another split is read: here they are damaged. The Story Cloze Test has no dev split, and its labelled
    test split is scored.
    """
    good = "sentence\tlabel\nthe cat sat\t1\n"
    for part, content in (("train", "x\n"), ("dev", good), ("test", "x\n")):
        write(tmp_path / "SST-2" / f"{part}.tsv", content)
    examples, split = labelled("sst2", tmp_path / "SST-2")
    assert [one.label for one in examples] == ["1"] and split == {"split": "dev"}
    names = [f"InputSentence{number}" for number in range(1, 5)]
    header = ",".join(["InputStoryid", *names, "RandomFifthSentenceQuiz1", "RandomFifthSentenceQuiz2"])
    story = f'{header},AnswerRightEnding\nid,"A, b.",It lay.,It sat.,It sang.,It saw.,It ran.,2\n'
    write(tmp_path / "stories" / "cloze_test_test__spring2016 - cloze_test_ALL_test.csv", story)
    write(tmp_path / "stories" / "cloze_test_val__spring2016 - cloze_test_ALL_val.csv", "x\n")
    examples, split = labelled("story_cloze", tmp_path / "stories")
    assert examples[0].choices == ("It saw.", "It ran.") and split == {"split": "test"}


def test_a_directory_without_a_split_is_refused(tmp_path):
    """Fails when the message names the flag of another command."""
    with pytest.raises(InputError, match="must have dev.tsv or test.tsv or train.tsv, got none; give the task's dir"):
        labelled("codah", write(tmp_path / "codah" / "README.txt", "x").parent)
    with pytest.raises(InputError, match="has no middle/.*; keep the layout of RACE's archive"):
        labelled("race", write(tmp_path / "RACE" / "dev" / "middle" / "README", "x").parent.parent)
