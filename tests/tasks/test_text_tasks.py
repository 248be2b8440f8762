"""Tasks whose predictions are texts: their files, the ids that a decoder reads, and their batches."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from jaxlm.errors import InputError
from jaxlm.tasks import (
    CustomConfig,
    Size,
    TaskOptions,
    encode_examples,
    encode_split,
    read_labelled,
    read_rows,
    read_task,
    task_from_json,
)
from jaxlm.tasks.task import Task

DATA = Path(os.environ.get("JAXLM_DATA", ".data"))
START, DELIMITER, END = 1, 2, 4
PAIRS = [("1 2 3", "3 2 1"), ("4 5", "5 4"), ("6", "6")]


class Words:
    """A word of the form `7` is the token 107."""

    specials = {"pad": 0, "start": START, "delimiter": DELIMITER, "end": END}

    def encode_batch(self, texts):
        return [[100 + int(word) for word in text.split()] for text in texts]


def write_pairs(directory, pairs=PAIRS, *, ending="", parts=("train", "val", "test_2016")):
    for part in parts:
        for language, side in (("en", 0), ("de", 1)):
            text = "".join(f"{pair[side]}\n" for pair in pairs)
            (directory / f"{part}.{language}{ending}").write_text(text)
    return directory


def translation(directory, **options):
    return read_task("translation", str(directory), options=TaskOptions(languages="en-de", **options))


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_decoder_reads_source_and_target_as_one_sequence(tmp_path):
    """Written down by hand. Fails when the loss counts another token, or the source is cut by its own target."""
    task, data = translation(write_pairs(tmp_path), target_length=4)
    encoded = encode_split(task, data, "train", Words(), 8)
    batch = encoded.batch(np.array([0, 1]), Size(0, 8), 3)
    assert batch.ids[0].tolist() == [START, 101, 102, DELIMITER, 103, 102, 101, 0]
    assert batch.targets[0].tolist() == [101, 102, DELIMITER, 103, 102, 101, END, 0]
    assert batch.weights.tolist() == [[0, 0, 0, 1, 1, 1, 1, 0], [0, 0, 0, 1, 1, 1, 0, 0], [0] * 8]
    assert batch.index.tolist() == [0, 1, -1] and batch.positions[2].tolist() == list(range(8))
    assert encoded.longest.tolist() == [7, 6, 4] and encoded.truncated == 1 and encoded.labelled
    assert encoded.references == (("3 2 1",), ("5 4",), ("6",)) and not encoded.longest_source.any()
    unlabelled = task.encode(tuple(read_rows(tmp_path / "test_2016.en", task)), Words(), 8, "gpt1", "")
    assert [row.prompt for row in unlabelled.rows] == [row.prompt for row in encoded.rows] and not unlabelled.labelled
    assert unlabelled.rows[0].target == () and unlabelled.batch(np.array([0]), Size(0, 8), 1).weights.sum() == 0


def test_prefix_and_special_tokens_are_options(tmp_path):
    task, data = translation(write_pairs(tmp_path), target_length=4, prefix="9 ")
    (row, *_) = encode_split(task, data, "dev", Words(), 16).rows
    assert row.prompt == (START, 109, 101, 102, 103, DELIMITER) and row.target == (103, 102, 101, END)
    ends = task_from_json(task.to_json() | {"special_tokens": "end"})
    assert encode_split(ends, data, "dev", Words(), 16).rows[0].prompt == (END, 109, 101, 102, 103, END)
    assert isinstance(ends, Task) and ends.options == task.options and ends.generates


def test_the_two_sides_of_an_encoder_decoder_have_limits_of_their_own(tmp_path):
    """Fails when a target may not be longer than --length, or a source takes its room from the target."""
    task, data = translation(write_pairs(tmp_path), target_length=12, prefix="9 9 9 ")
    encoded = encode_examples(task, data.splits["train"].examples, Words(), 4, "t5")
    row = encoded.rows[0]
    assert row.source == (109, 109, 109, END) and encoded.truncated == 3
    assert row.target == (103, 102, 101, END) and encoded.largest == Size(4, 12)
    batch = encoded.batch(np.array([0]), encoded.largest, 1)
    assert batch.source.shape == (1, 4) and batch.ids.shape == (1, 12) and batch.weights.sum() == 4


def test_files_of_a_translation(tmp_path):
    """Fails when a split is lost, when the direction is ignored, or when an entity of SGML stays."""
    task, data = translation(write_pairs(tmp_path))
    assert {part: len(split.examples) for part, split in data.splits.items()} == {"train": 3, "dev": 3, "test": 3}
    assert data.splits["train"].examples[0].texts == ("1 2 3",) and data.splits["train"].examples[0].gold == "3 2 1"
    assert "2.0 words per source and 2.0 per target" in data.report()[0]
    back = read_task("translation", str(tmp_path), options=TaskOptions(languages="de-en"))[1]
    assert back.splits["dev"].examples[0].texts == ("3 2 1",)
    for side, language in (("src", "en"), ("ref", "de")):
        (tmp_path / f"newstest-{side}.{language}.sgm").write_text(f'<doc>\n<seg id="1">{side} &amp; b</seg>\n</doc>\n')
    _, data = translation(tmp_path)
    assert list(data.splits) == ["train", "dev", "newstest", "test_2016"]
    (example,) = data.splits["newstest"].examples
    assert (example.texts, example.label) == (("src & b",), "ref & b")
    both = f"{tmp_path / 'newstest-src.en.sgm'},{tmp_path / 'newstest-ref.de.sgm'}"
    assert read_labelled(both, task).examples == (example,)
    assert [one.texts for one in read_rows(tmp_path / "newstest-src.en.sgm", task, keep=True)] == [("src & b",)]


def test_rows_with_several_targets(tmp_path):
    """Fails when a list of targets is taken for one text, or when a held-out row shares its source with train."""
    rows = [{"document": f"{k}", "summary": ["1", "2"] if k % 2 else "1"} for k in range(20)]
    for part in ("train", "dev"):
        write_rows(tmp_path / f"{part}.jsonl", rows)
    task, data = read_task("summarization", str(tmp_path))
    assert data.splits["dev"].examples[1].gold == ["1", "2"] and task.metric == "rouge_l"
    encoded = encode_split(task, data, "dev", Words(), 200)
    assert encoded.references[:2] == (("1",), ("1", "2")) and encoded.rows[1].target == (101, END)
    columns = {"text": "document", "label": "summary", "kind": "text", "metric": "chrf"}
    custom = CustomConfig(train=str(tmp_path / "train.jsonl"), **columns)
    task, data = read_task("custom", None, custom)
    assert task.metrics == ("chrf", "bleu", "exact_match") and len(data.splits["dev"].examples) == 2
    assert task.is_right(" 2", ["1", "2"]) and not task.is_right("3", "2")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda d: (d / "train.de").write_text("5\n"),
            r"train.de must have the 3 sentences of .*train.en, got 1; give",
        ),
        (lambda d: (d / "val.en").write_text("1\n\n3\n"), r"val.en line 2 must have a sentence, got an empty one"),
        (lambda d: (d / "val.de").unlink(), r"val.en must have a translation, got no val.de; put it beside it"),
        (lambda d: (d / "train.en").unlink(), r"has no train.en and train.de; give --task-dir"),
    ],
)
def test_bad_files_of_a_translation(tmp_path, change, message):
    change(write_pairs(tmp_path))
    with pytest.raises(InputError, match=message) as caught:
        translation(tmp_path)
    assert "\n" not in str(caught.value)


def test_bad_rows_and_options(tmp_path):
    """Fails when an empty side trains a model to be silent, or when a target is cut without a word."""
    write_pairs(tmp_path)
    with pytest.raises(InputError, match=r"options.languages must be SOURCE-TARGET.*\(de, en\), got ''; give for"):
        read_task("translation", str(tmp_path))
    task, data = translation(tmp_path, target_length=3)
    with pytest.raises(
        InputError, match=r"target_length must be at least 4, .* got 3, which 1 target of 3 exceed; give"
    ):
        encode_split(task, data, "train", Words(), 16)
    assert encode_split(task, data, "dev", Words(), 16).truncated == 1
    with pytest.raises(InputError, match=r"length must be at least 6 to hold .* options.target_length 3, got 5"):
        encode_split(task, data, "dev", Words(), 5)
    with pytest.raises(InputError, match="needs a model that generates texts, got an encoder"):
        encode_split(task, data, "dev", Words(), 16, "bert")
    for side, row in (("source", {"text": " ", "label": "a"}), ("target", {"text": "a", "label": ["a", " "]})):
        file = write_rows(tmp_path / "rows.jsonl", [{"text": "b", "label": "b"}, row])
        custom = CustomConfig(train=str(file), dev=str(file), text="text", label="label", kind="text")
        with pytest.raises(InputError, match=f"row 2 of train must have a {side}, got an empty text; fill it in"):
            read_task("custom", None, custom)


@pytest.mark.data
def test_published_files(data_directory):
    """The numbers of rows that the data sets publish."""
    task, data = translation(data_directory / "translation/multi30k")
    assert [len(split.examples) for split in data.splits.values()] == [29000, 1014, 1000]
    folder = data_directory / "translation/wmt14"
    both = f"{folder / 'newstest2014-fren-src.en.sgm'},{folder / 'newstest2014-fren-ref.fr.sgm'}"
    assert len(read_labelled(both, task).examples) == 3003
