"""GLUE's other tasks, SNLI and SciTail in small files with the traps of their formats, and the submission's files."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxlm.errors import InputError
from jaxlm.tasks import TASKS, Example, encode_examples, predictions, read_labelled, read_rows, read_task
from jaxlm.tasks.predicted import SUBMITTED


def write(directory, files):
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return str(directory)


def labels(data, part):
    return [example.label for example in data.splits[part].examples]


PARSES = "index promptID pairID genre s1_binary_parse s2_binary_parse s1_parse s2_parse sentence1 sentence2".split()


def mnli(kind, rows):
    """A file of MNLI's: 12 columns in train, 16 in dev, 10 in test."""
    annotators = {"train": ["label1"], "dev": [f"label{i}" for i in range(1, 6)], "test": []}[kind]
    header = [*PARSES, *annotators, *(["gold_label"] if annotators else [])]
    lines = ["\t".join(header)]
    for number, (first, second, gold) in enumerate(rows):
        wrong = ["neutral"] * len(annotators)  # what a reader of column 11 would take in dev
        lines.append("\t".join([str(number), *"abcdefg", first, second, *wrong, *([gold] if annotators else [])]))
    return "\n".join(lines) + "\n"


@pytest.fixture
def mnli_directory(tmp_path):
    rows = [("p", "h", "entailment"), ('p "2', "h2", "contradiction"), ("p3", "h3", "neutral")]
    files = {
        "MNLI/train.tsv": mnli("train", rows),
        "MNLI/dev_matched.tsv": mnli("dev", rows),
        "MNLI/dev_mismatched.tsv": mnli("dev", rows[:2]),
        "MNLI/test_matched.tsv": mnli("test", rows),
        "MNLI/test_mismatched.tsv": mnli("test", rows[:1]),
        "diagnostic/diagnostic.tsv": "index\tsentence1\tsentence2\n0\ta\tb\n1\tc\td\n",
    }
    return write(tmp_path, files) + "/MNLI"


def test_mnli_has_two_dev_parts_and_its_gold_labels_go_by_name(mnli_directory):
    task, data = read_task("mnli", mnli_directory)
    assert list(data.splits) == ["train", "dev_matched", "dev_mismatched", "test_matched", "test_mismatched", "ax"]
    assert labels(data, "train") == ["entailment", "contradiction", "neutral"] == labels(data, "dev_matched")
    assert labels(data, "dev_mismatched") == ["entailment", "contradiction"]
    assert labels(data, "test_matched") == [None] * 3 and labels(data, "ax") == [None] * 2
    assert data.splits["train"].examples[1].texts == ('p "2', "h2")
    assert task.selects == "dev_matched" and data.held_out is None
    Path(mnli_directory, "dev_mismatched.tsv").unlink()
    with pytest.raises(InputError, match="has no dev_mismatched.tsv"):
        read_task("mnli", mnli_directory)


def test_qqp_rows_that_are_cut_are_left_out_and_counted(tmp_path):
    header = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
    train = (
        header + "0\t1\t2\tWhat?\tWhat is?\t1\n1\t3\t4\tHow\n to do?\tHow?\t0\n2\t5\t6\tA?\tB?\t0\n3\t7\t8\tA?\tB?\t\n"
    )
    dev = header + "0\t1\t2\ta\tb\t0\n"
    directory = write(tmp_path, {"train.tsv": train, "dev.tsv": dev, "test.tsv": "id\tquestion1\tquestion2\n0\ta\tb\n"})
    task, data = read_task("qqp", directory)
    assert labels(data, "train") == ["1", "0"]
    assert data.splits["train"].dropped == ((3, "4 columns"), (4, "3 columns"), (6, "no label"))
    assert "3 dropped: line 3 (4 columns)" in data.report()[0] and data.splits["train"].rows_read == 5
    assert (task.form, task.metric) == ("similarity", "f1") and labels(data, "test") == [None]
    write(tmp_path, {"test.tsv": "id\tquestion1\tquestion2\n0\ta\n"})
    with pytest.raises(
        InputError, match="line 2: the row must have 3 columns .*, got 2"
    ):  # the server wants an answer to every row
        read_task("qqp", directory)


def test_qnli_and_wnli(tmp_path):
    qnli = "index\tquestion\tsentence\tlabel\n0\tWho?\tHe.\tentailment\n1\tWhen?\tHe.\tnot_entailment\n"
    _, data = read_task("qnli", write(tmp_path / "q", {"train.tsv": qnli, "dev.tsv": qnli}))
    assert labels(data, "train") == ["entailment", "not_entailment"]
    assert data.splits["train"].examples[0].texts == ("Who?", "He.")
    wnli = "index\tsentence1\tsentence2\tlabel\n0\ta\tb\t1\n1\tc\td\t0\n"
    task, data = read_task("wnli", write(tmp_path / "w", {"train.tsv": wnli, "dev.tsv": wnli}))
    assert labels(data, "train") == ["1", "0"] and task.parse_label("entailment") == "1"


def test_snli_leaves_out_rows_without_a_gold_label_in_every_part(tmp_path):
    header = "gold_label\tsentence1_binary_parse\tsentence1\tsentence2\n"
    rows = header + 'neutral\tx\tA "man".\tHe.\n-\tx\tb\tc\nentailment\tx\td\te\n'
    files = {f"snli_1.0_{part}.txt": rows for part in ("train", "dev", "test")}
    _, data = read_task("snli", write(tmp_path / "t", files))
    for part in ("train", "dev", "test"):
        assert labels(data, part) == ["neutral", "entailment"]
        assert data.splits[part].dropped == ((3, "label -"),) and data.splits[part].rows_read == 3
    named = [
        {"gold_label": "neutral", "sentence1": 'A "man".', "sentence2": "He.", "annotator_labels": ["-"]},
        {"gold_label": "-", "sentence1": "b", "sentence2": "c"},
        {"gold_label": "entailment", "sentence1": "d", "sentence2": "e"},
    ]
    lines = "".join(json.dumps(row) + "\n" for row in named)
    _, same = read_task("snli", write(tmp_path / "j", {f"snli_1.0_{part}.jsonl": lines for part in files_of(files)}))
    assert same.splits["train"].examples == data.splits["train"].examples


def files_of(files):
    return [name.removeprefix("snli_1.0_").removesuffix(".txt") for name in files]


def test_scitail_in_both_formats(tmp_path):
    tsv = 'A "premise\tA hypothesis\tentails\nb\tc\tneutral\n'
    lines = "".join(
        json.dumps({"sentence1": first, "sentence2": second, "gold_label": label}) + "\n"
        for first, second, label in (('A "premise', "A hypothesis", "entailment"), ("b", "c", "neutral"))
    )
    parts = ("train", "dev", "test")
    one, first = read_task("scitail", write(tmp_path / "a", {f"tsv_format/scitail_1.0_{p}.tsv": tsv for p in parts}))
    other, second = read_task(
        "scitail", write(tmp_path / "b", {f"snli_format/scitail_1.0_{p}.txt": lines for p in parts})
    )
    assert first.splits == second.splits and one == other
    assert labels(first, "train") == ["entails", "neutral"]  # the first row is a row


def test_submission_files(mnli_directory):
    task, data = read_task("mnli", mnli_directory)

    class Words:
        specials = {"cls": 1, "sep": 2}

        def encode_batch(self, texts):
            return [[5] for _ in texts]

    files = {}
    for part in data.splits:
        encoded = encode_examples(task, data.splits[part].examples, Words(), 16, "bert", part=part)
        outputs = np.eye(3)[np.arange(len(encoded)) % 3]
        files |= predictions(task, encoded, outputs).files
    assert set(files) == {"glue/MNLI-m.tsv", "glue/MNLI-mm.tsv", "glue/AX.tsv"}
    assert files["glue/MNLI-m.tsv"] == "index\tprediction\n0\tcontradiction\n1\tentailment\n2\tneutral\n"
    assert files["glue/AX.tsv"] == "index\tprediction\n0\tcontradiction\n1\tentailment\n"


def test_submitted_scores_have_three_decimals_between_0_and_5():
    from jaxlm.tasks.predicted import submission

    text = submission(TASKS["stsb"], "test", [-0.2, 2.34567, 7.0])["glue/STS-B.tsv"]
    assert text == "index\tprediction\n0\t0.000\n1\t2.346\n2\t5.000\n"
    assert submission(TASKS["cola"], "dev", ["1"]) == {} == submission(TASKS["snli"], "test", ["neutral"])
    assert submission(TASKS["rte"], "test", ["not_entailment"])["glue/RTE.tsv"].endswith("0\tnot_entailment\n")
    assert len(set(SUBMITTED.values())) == 11  # all that the server wants


def test_words_and_numbers_of_the_server():
    for (name, _), _ in SUBMITTED.items():
        task = TASKS[name]
        words = name in ("mnli", "qnli", "rte")
        assert all(label.isdigit() != words for label in task.labels), name


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("mnli", {"premise": "x", "hypothesis": "y"}),
        ("qqp", {"question1": "x", "question2": "y"}),
        ("qnli", {"question": "x", "sentence": "y"}),
        ("wnli", {"sentence1": "x", "sentence2": "y"}),
        ("snli", {"premise": "x", "hypothesis": "y"}),
        ("scitail", {"premise": "x", "hypothesis": "y"}),
        ("swag", {"sent1": "x", "sent2": "y", "endings": ["a", "b", "c", "d"]}),
        ("race", {"article": "x", "question": "y", "options": ["a", "b", "c", "d"]}),
    ],
)
def test_new_rows(tmp_path, name, row):
    path = tmp_path / "new.jsonl"
    path.write_text(json.dumps(row) + "\n")
    (example,) = read_rows(path, TASKS[name])
    assert example.texts == ("x", "y") and example.label is None


def test_another_labelled_file(tmp_path):
    path = tmp_path / "more.txt"
    path.write_text("gold_label\tsentence1\tsentence2\n-\ta\tb\nneutral\tc\td\n")
    assert read_labelled(path, TASKS["snli"]).examples == (Example(("c", "d"), (), "neutral"),)
