"""Zero-shot tasks on files in the layout of their published archives, written for the test."""

import json
from pathlib import Path

import pytest

from jaxlm.errors import InputError
from jaxlm.zero_shot.comparisons import cloze_questions, labelled
from jaxlm.zero_shot.prompted_rows import conversations, stories

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


STORY = """\ufeff(CNN) -- The cat sat on the mat.


It saw a crow.

@highlight

A cat saw
a crow

@highlight

It sat
"""


def test_story_files_of_cnn_and_dailymail(tmp_path):
    """Fails when a highlight becomes part of the article, or when files are read in another order."""
    write(tmp_path / "stories" / "b.story", STORY.replace("crow", "fox").replace("\n", "\r\n"))
    one = write(tmp_path / "stories" / "a.story", STORY)
    rows, without = stories(tmp_path / "stories")
    assert [row.answers for row in rows] == [("A cat saw a crow\nIt sat",), ("A cat saw a fox\nIt sat",)]
    assert rows[0].fields["document"] == "(CNN) -- The cat sat on the mat.\nIt saw a crow." and without == 0
    assert stories(one)[0] == rows[:1]
    with pytest.raises(InputError, match="none.story must have an article and texts after @highlight, got 0"):
        stories(write(tmp_path / "none.story", "The cat sat."))


def test_a_file_of_the_childrens_book_test(tmp_path):
    """Tabs, the empty field, curly contractions in Penn's tokens, and a blank line between questions, as in
    cbtest_CN_test_2500ex.txt. Fails when the numbers of the sentences or the tabs become text.
    """
    sentences = [f"{number} `` I do n't know , '' said the cat ." for number in range(1, 21)]
    query = "21 So the XXXXX lay in the tree .\tcat\t\tbird|cat|crow|dog|fox|hill|mat|morning|rug|tree"
    path = write(tmp_path / "cbtest_CN_test_2500ex.txt", "\n".join([*sentences, query, "", *sentences, query]) + "\n\n")
    (texts, right), second = cloze_questions(path)
    context = " ".join(['"I don\'t know," said the cat.'] * 20)
    assert texts[1].parts == (f"{context} So the", " cat lay in the tree.") and right == 1 and len(texts) == 10
    assert [text.parts for text in second[0]] == [text.parts for text in texts]


def test_a_file_of_coqa(tmp_path):
    """CoQA's dev file has the answers of three more people. Fails when the turns of one story reach the next."""
    turn = [{"input_text": "Who sat?", "turn_id": 1}, {"input_text": "Where?", "turn_id": 2}]
    answers = [{"span_start": 0, "span_end": 3, "span_text": "cat", "input_text": "cat", "turn_id": 1}] * 2
    story = {"source": "mctest", "story": "The cat sat.", "questions": turn, "answers": answers, "name": "x.txt"}
    more = {key: [answer | {"input_text": key} for answer in answers] for key in "012"}
    data = [story | {"id": key, "additional_answers": more} for key in ("a", "b")]
    rows, _ = conversations(write(tmp_path / "coqa-dev-v1.0.json", json.dumps({"version": "1.0", "data": data})))
    assert [len(row.turns) for row in rows] == [0, 1, 0, 1]
    assert rows[1].answers == ("cat", "0", "1", "2") and rows[1].turns == ({"question": "Who sat?", "answer": "cat"},)
