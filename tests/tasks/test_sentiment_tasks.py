"""Trees of the Stanford Sentiment Treebank, reviews of IMDb, and the fine classes of TREC."""

import json
from collections import Counter

import pytest
import toy_runs
from toy_runs import assert_one_line, run_here

from jaxlm import show
from jaxlm.errors import InputError
from jaxlm.tasks import TASKS, read_labelled, read_rows, read_task, task_from_json, typical_task
from jaxlm.tasks.datasets.sentiment import phrases_of
from jaxlm.tasks.text_to_text import as_text

pytestmark = pytest.mark.usefixtures("two_devices")

toy_runs.COMMANDS["show"] = show.main
SIX = "(4 (2 -LRB-) (3 (2 a) (3 (2 1\\/2) (3 (4 good) (2 (2 film) (2 -RRB-))))))"
TREES = f"{SIX}\n(1 (2 No) (2 .))\n"
NESTED = "(2 (2 x) " * 3000 + "(2 y)" + ")" * 3000


def write(directory, **files):
    for name, content in files.items():
        (directory / name.replace("__", ".")).write_text(content, encoding="utf-8")
    return str(directory)


def texts(split):
    return [(example.texts[0], example.label) for example in split.examples]


def test_phrases_of_a_tree():
    """Fails when a phrase has another label or other words, or when an escape stays. The tree is read by hand."""
    found = [(label, " ".join(words)) for label, words in phrases_of(SIX)]
    words = [("2", "("), ("2", "a"), ("2", "1/2"), ("4", "good"), ("2", "film"), ("2", ")")]
    phrases = [("2", "film )"), ("3", "good film )"), ("3", "1/2 good film )"), ("3", "a 1/2 good film )")]
    assert found == [*words, *phrases, ("4", "( a 1/2 good film )")]
    assert [word for _, (word, *_) in phrases_of("(2 (2 \\*\\*) (2 8\u00a01\\/2))")] == ["**", "8\u00a01/2", "**"]
    assert len(phrases_of(NESTED)) == 6001  # deeper than Python's recursion


def test_train_has_phrases_and_dev_has_sentences(tmp_path):
    """Fails when a phrase of three words is in train, a short sentence is not, or dev has phrases."""
    directory = write(
        tmp_path, train__txt=TREES, dev__txt=f"{SIX}\n", test__txt="(2 (2 It) (2 is))\n(0 (0 Bad) (2 .))\n"
    )
    task, data = read_task("sst_fine", directory)
    long = [("1/2 good film )", "3"), ("a 1/2 good film )", "3"), ("( a 1/2 good film )", "4")]
    assert texts(data.splits["train"]) == [*long, ("No .", "1")]
    assert texts(data.splits["dev"]) == long[-1:]
    assert texts(data.splits["test"]) == [("It is", "2"), ("Bad .", "0")]
    converted, form = as_text(task, data)
    assert form.splits["dev"].examples[0].texts == ("sst_fine sentence: ( a 1/2 good film )",)
    assert form.splits["dev"].examples[0].targets == ("very positive",) and converted.metrics == ("accuracy",)
    task, data = read_task("sst_binary", directory)
    assert [label for _, label in texts(data.splits["train"])] == ["positive", "positive", "positive", "negative"]
    assert texts(data.splits["test"]) == [("Bad .", "negative")] and data.splits["test"].dropped == ((1, "label 2"),)
    assert task.labels == ("negative", "positive") and typical_task("sst_binary") == task
    assert read_labelled(tmp_path / "train.txt", task).examples == data.splits["train"].examples[2:]  # sentences
    write(tmp_path, new__jsonl='{"text": "It is ."}\n', own__tsv="sentence\tlabel\nFine .\tpositive\n")
    assert next(read_rows(tmp_path / "new.jsonl", task)).texts == ("It is .",)
    assert texts(read_labelled(tmp_path / "own.tsv", task)) == [("Fine .", "positive")]


def test_dev_at_the_end_of_train_is_dropped(tmp_path):
    """Fails when the sentences on which a run is selected are trained on, as in public copies of the file."""
    plain = write(tmp_path, train__txt="(1 (1 Not) (1 so))\n", dev__txt=TREES)
    _, expected = read_task("sst_fine", plain)
    joined = write(tmp_path, train__txt=f"(1 (1 Not) (1 so))\n{TREES}")
    _, data = read_task("sst_fine", joined)
    assert data.splits["train"].examples == expected.splits["train"].examples and not expected.splits["train"].dropped
    assert data.splits["train"].dropped == ((2, "a line of dev.txt"), (3, "a line of dev.txt"))
    write(tmp_path, train__txt=f"{TREES}(1 (1 Not) (1 so))\n")  # not at the end: the sentences are train's own
    assert not read_task("sst_fine", joined)[1].splits["train"].dropped


@pytest.mark.parametrize(
    "tree",
    ["(3 (2 It) (4 works)", "(3 (2 It) (4 works)))", "(3 (2 It) (4 works)) (2 .)", "(5 (2 It) (4 works))", "It works",
     "(3 It works)", "(3 (2 It) ())", "(3 (2 It) (4 ))", "(3 )", ")", "(3 (2 It) 4 works)"],
)  # fmt: skip
def test_damaged_trees_are_one_line(tmp_path, tree):
    """Fails when a damaged tree is read in part, or ends in another code or in more than a line."""
    write(tmp_path, train__txt=f"{TREES}{tree}\n", dev__txt=TREES)
    message = "train.txt line 3 must be a tree such as (3 (2 It) (4 works)), got another line"
    assert_one_line(run_here("show", "--task", "sst_fine", "--task-dir", tmp_path), 2, message)


def test_a_file_without_trees_of_the_classes(tmp_path):
    with pytest.raises(InputError, match="dev.txt has no trees with one of the labels 0, 1, 3, 4"):
        read_task("sst_binary", write(tmp_path, train__txt=TREES, dev__txt="(2 (2 It) (2 is))\n"))


def make_imdb(directory, **counts):
    """Write a directory in the layout of the archive; the data itself is not at hand."""
    for folder, count in counts.items():
        place = directory / folder.replace("_", "/")
        place.mkdir(parents=True)
        for number in range(count):
            (place / f"{number}_7.txt").write_text(f"{folder} {number}<br />\nIt was. ", encoding="utf-8")
    return str(directory)


def test_reviews_of_a_directory(tmp_path):
    """Fails when a label is not its folder's, a file is lost, or the reviews without labels are read."""
    directory = make_imdb(tmp_path, train_neg=10, train_pos=10, train_unsup=3, test_neg=2, test_pos=1)
    (tmp_path / "train/labeledBow.feat").write_text("9 0:9")
    task, data = read_task("imdb", directory)
    assert {part: len(split.examples) for part, split in data.splits.items()} == {"train": 18, "dev": 2, "test": 3}
    assert texts(data.splits["test"])[0] == ("test_neg 0<br />\nIt was.", "neg")
    assert [label for _, label in texts(data.splits["test"])] == ["neg", "neg", "pos"]
    assert all(text.split("_")[1][:3] == label for part in ("train", "dev") for text, label in texts(data.splits[part]))
    assert read_labelled(tmp_path / "test", task).examples == data.splits["test"].examples
    assert task_from_json(json.loads(json.dumps(task.to_json()))) == task
    assert as_text(task, data)[1].splits["test"].examples[2].targets == ("pos",)


@pytest.mark.parametrize(
    "folders", [{"train_pos": 2}, {"train_pos": 2, "train_neg": 0}, {"train_pos": 2, "test_neg": 2}]
)
def test_a_directory_without_a_class_is_one_line(tmp_path, folders):
    make_imdb(tmp_path, **folders)
    message = "train/neg must be a folder of .txt files, got none; keep the layout of the archive"
    assert_one_line(run_here("show", "--task", "imdb", "--task-dir", tmp_path), 2, message)


def test_fine_classes_of_questions(tmp_path):
    """Fails when labels of one name are joined (ENTY:other, LOC:other), or the file is not read as Latin-1."""
    (tmp_path / "train_5500.label").write_bytes(b"ENTY:other A caf\xe9 ?\nLOC:other Where ?\nHUM:ind Who ?\n")
    (tmp_path / "TREC_10.label").write_bytes(b"DESC:def What ?\n")
    task, data = read_task("trec50", str(tmp_path))
    found = dict(texts(data.splits["train"]) + texts(data.splits["dev"]))
    assert found == {"A café ?": "ENTY:other", "Where ?": "LOC:other", "Who ?": "HUM:ind"}
    assert len(task.labels) == 50 == len(set(task.labels)) and task == TASKS["trec50"]
    (tmp_path / "TREC_10.label").write_bytes(b"DESC:definition What ?\n")
    message = "TREC_10.label line 1: a label must be one of DESC:def, "
    assert_one_line(run_here("show", "--task", "trec50", "--task-dir", tmp_path), 2, message)


@pytest.mark.data
def test_real_fine_classes(data_directory):
    """Fails when a class of the published file is missing, or when a question is lost."""
    task, data = read_task("trec50", str(data_directory / "classify/trec50"))
    counts = {part: Counter(label for _, label in texts(split)) for part, split in data.splits.items()}
    assert {part: sum(count.values()) for part, count in counts.items()} == {"train": 4907, "dev": 545, "test": 500}
    assert set(counts["train"]) | set(counts["dev"]) == set(task.labels) and len(counts["test"]) == 42
    coarse, _ = read_task("trec", str(data_directory / "classify/trec50"))
    assert {label.partition(":")[0] for label in task.labels} == set(coarse.labels)


@pytest.mark.data
def test_real_trees(data_directory):
    """Compare with the published sizes of the splits. Fails when a sentence is lost or a phrase counts otherwise.

    Sentences with the labels 0, 1, 3, 4: 6,920, 872 and 1,821 (Socher et al. 2013). McCann et al. (2017) have 94.2k and
    56.4k training rows; the files give 93,703 and 56,405.
    """
    directory = str(data_directory / "classify/sst_trees")
    for name, sizes in (("sst_fine", (93_703, 1101, 2210)), ("sst_binary", (56_405, 872, 1821))):
        task, data = read_task(name, directory)
        assert tuple(len(split.examples) for split in data.splits.values()) == sizes
        sentences = read_labelled(data_directory / "classify/sst_trees/train.txt", task).examples
        assert len(sentences) == {"sst_fine": 8544, "sst_binary": 6920}[name]
        assert set(sentences) <= set(data.splits["train"].examples)
        assert not any("-LRB-" in text or "\\" in text for split in data.splits.values() for text, _ in texts(split))
