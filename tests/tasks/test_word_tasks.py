"""Chunks of CoNLL-2000 and parts of speech of Universal Dependencies: labels, splits, published counts, bad files."""

import dataclasses
import json

import numpy as np
import pytest
import toy_runs
from toy_runs import assert_one_line, run_here

from jaxlm import show
from jaxlm.errors import InputError
from jaxlm.tasks import (
    TASKS,
    Split,
    TaggedSentence,
    read_labelled,
    read_rows,
    read_task,
    task_from_json,
    typical_task,
)
from jaxlm.tasks.kinds.tags import conllu_words
from jaxlm.tasks.metrics.tags import entities

pytestmark = pytest.mark.usefixtures("two_devices")

toy_runs.COMMANDS["show"] = show.main
CHUNKS = "He PRP B-NP\nsaw VBD B-VP\nit PRP B-NP\n\n1 CD B-LST\nGo VB B-VP\n\nYes UH B-INTJ\n"
# A multiword token (2-3), an empty node (4.1) and a word with a blank, as in the format's description.
CONLLU = """# newdoc id = d
# text = Va al 20 000
1\tVa\tir\tVERB\t_\t_\t0\troot\t_\t_
2-3\tal\t_\t_\t_\t_\t_\t_\t_\t_
2\ta\ta\tADP\t_\t_\t4\tcase\t_\t_
3\tel\tel\tDET\t_\t_\t4\tdet\t_\t_
4\t20 000\t20000\tNUM\t_\t_\t1\tobl\t_\t_
4.1\tva\tir\tVERB\t_\t_\t_\t_\t_\t_

# text = #
1\t#\t#\tSYM\t_\t_\t0\troot\t_\t_
"""


def write(directory, **files):
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name.replace("__", ".").replace("_ud_", "-ud-")).write_text(content, encoding="utf-8")
    return str(directory)


def test_the_tags_of_chunks_do_not_depend_on_train(tmp_path):
    """Fails when a tag that stands in test alone (I-LST) has no number, or when an unknown type is accepted."""
    directory = write(tmp_path, train__txt=CHUNKS, test__txt="( ( B-LST\n1 CD I-LST\n")
    task, data = read_task("chunk", directory)
    assert task == TASKS["chunk"] and len(task.labels) == 23 == task.num_outputs and typical_task("chunk") == task
    assert data.splits["test"].examples[0].tags == ("B-LST", "I-LST") and "I-LST" in task.labels
    assert data.splits["train"].examples[0].tokens in (("He", "saw", "it"), ("1", "Go"), ("Yes",))  # words alone
    assert task_from_json(json.loads(json.dumps(task.to_json()))) == task
    with pytest.raises(
        InputError, match=r"test.txt line 1: the type of a tag must be one of ADJP, .* \(task chunk\), got"
    ):
        read_task("chunk", write(tmp_path, test__txt="a NN B-PER\n"))
    small = dataclasses.replace(TASKS["ner"], labels=("O", "B-A", "I-A"))
    sentence = TaggedSentence(("a",), ("B-B",), where="x line 1")
    with pytest.raises(InputError, match=r"x line 1: the type of a tag must be one of A \(task ner\), got 'B-B'"):
        small.with_labels({"train": Split((sentence,))})


def test_words_of_conllu(tmp_path):
    """Fails when a range, an empty node or a comment becomes a word, or when a word is split at its blank."""
    directory = write(tmp_path, es_x_ud_train__conllu=CONLLU, es_x_ud_dev__conllu=CONLLU, es_x_ud_test__conllu=CONLLU)
    task, data = read_task("ud_pos", directory)
    first, second = data.splits["train"].examples
    assert first.tokens == ("Va", "a", "el", "20 000") and first.tags == ("VERB", "ADP", "DET", "NUM")
    assert (second.tokens, second.tags, second.document) == (("#",), ("SYM",), None)
    assert (task.scheme, task.metric, task.metrics, len(task.labels)) == ("none", "accuracy", ("accuracy",), 17)
    assert read_labelled(tmp_path / "es_x-ud-dev.conllu", task).examples == data.splits["dev"].examples
    (new, _) = read_rows(tmp_path / "es_x-ud-test.conllu", task)
    assert new.tokens == first.tokens and new.tags is None
    unlabelled = "1\tVa\t_\t_\t_\t_\t_\t_\t_\t_\n"
    _, data = read_task("ud_pos", write(tmp_path, es_x_ud_test__conllu=unlabelled))
    assert not data.splits["test"].labelled
    assert [line for _, line in conllu_words(enumerate(CONLLU.split("\n")), "x")][-3:] == ["", "#\tSYM", ""]
    write(tmp_path, es_y_ud_train__conllu=CONLLU)
    with pytest.raises(
        InputError, match=r"must have one file \*-train.conllu, got es_x-ud-train.conllu, es_y-ud-train"
    ):
        read_task("ud_pos", directory)
    write(tmp_path, train__conllu=CONLLU)  # a file of the plain name is preferred
    assert len(read_task("ud_pos", directory)[1].splits["train"].examples) == 2


LINE = "1\tVa\tir\tVERB\t_\t_\t0\troot\t_\t_\n"
BAD = {
    "a missing column": ("chunk", {"train.txt": CHUNKS + "\nYes UH B-INTJ\nYes UH\n", "test.txt": CHUNKS},
                         "train.txt line 11 must have 3 columns, as the lines before it, got 2: 'Yes UH'; correct"),
    "a word alone": ("chunk", {"train.txt": "a NN O\nb\n", "test.txt": CHUNKS}, "line 2: 'b' has no tag"),
    "too few columns": ("ud_pos", {"train.conllu": LINE + "2\ta\ta\tADP\n", "dev.conllu": LINE},
                        "train.conllu line 2 must have 10 columns with a TAB between them"),
    "blanks for TABs": ("ud_pos", {"train.conllu": LINE, "dev.conllu": LINE.replace("\t", " ")},
                        "dev.conllu line 1 must have 10 columns with a TAB between them"),
    "another id": ("ud_pos", {"train.conllu": "x" + LINE, "dev.conllu": LINE}, "train.conllu line 1 must have 10"),
    "an unknown tag": ("ud_pos", {"train.conllu": LINE.replace("VERB", "VB"), "dev.conllu": LINE},
                       "the type of a tag must be one of ADJ, ADP"),
    "no tag": ("ud_pos", {"train.conllu": LINE.replace("VERB", "_"), "dev.conllu": LINE}, "'Va' has no tag"),
    "no file": ("ud_pos", {"train.conllu": LINE}, "has no dev.conllu or *-dev.conllu"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_one_line(tmp_path, name):
    """Fails when a damaged file is read in part, or ends in another code or in more than a line."""
    task, files, message = BAD[name]
    for file, content in files.items():
        (tmp_path / file).write_text(content)
    assert_one_line(run_here("show", "--task", task, "--task-dir", tmp_path), 2, message)


def numbers(split):
    """Return the numbers of sentences, words and entities."""
    tags = [example.tags for example in split.examples]
    return len(tags), sum(map(len, tags)), sum(len(entities(sentence)) for sentence in tags)


@pytest.mark.data
def test_real_chunks(data_directory):
    """Compare with the shared task's published counts. Fails when a sentence, a word or a chunk is lost."""
    directory = data_directory / "chunk/conll2000"
    task, data = read_task("chunk", str(directory))
    train, dev, test = (numbers(data.splits[part]) for part in ("train", "dev", "test"))
    assert tuple(np.add(train, dev)) == (8936, 211_727, 106_978) and test == (2012, 47_377, 23_852)
    assert dev[0] == 1500 and "1,500 of the 8,936 train rows (17%) are held out by seed 0" in str(data.held_out)
    assert data.splits["dev"] == read_task("chunk", str(directory))[1].splits["dev"]
    words = {part: {example.tokens for example in data.splits[part].examples} for part in ("train", "dev")}
    assert not words["train"] & words["dev"]
    given = {tag for split in data.splits.values() for example in split.examples for tag in example.tags}
    assert given == set(task.labels)


@pytest.mark.data
def test_real_parts_of_speech(data_directory):
    """Compare with the counts in the treebank's description. Fails when a word is lost or a range becomes one."""
    task, data = read_task("ud_pos", str(data_directory / "ud/ewt"))
    counts = {part: numbers(dataclasses.replace(split, examples=[
        dataclasses.replace(example, tags=["O"] * len(example.tokens)) for example in split.examples
    ]))[:2] for part, split in data.splits.items()}  # fmt: skip
    assert counts == {"train": (12_544, 204_577), "dev": (2001, 25_147), "test": (2077, 25_094)}
    assert {tag for example in data.splits["train"].examples for tag in example.tags} == set(task.labels)
