"""The built-in tasks: small files with each trap of their formats, and the real files with exact counts."""

import json

import numpy as np
import pytest

from jaxlm.errors import InputError
from jaxlm.tasks import FORMATS, TASKS, CustomConfig, read_labelled, read_rows, read_task, task_from_json
from jaxlm.tasks.registry import BUILT_IN


def write(directory, **files):
    for name, content in files.items():
        path = directory / (name.replace("__", ".") if "__" in name else name + ".tsv")
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(directory)


def labels(data, part):
    return [example.label for example in data.splits[part].examples]


def test_cola_has_no_header_but_its_test_part_has(tmp_path):
    train = 'gj04\t1\t\tA "quoted\x08 start.\nks08\t0\t*\tBad one this.\nks08\t0\t \tA blank mark.\n'
    directory = write(
        tmp_path, train=train, dev="clc95\t1\t\tNo last newline", test="index\tsentence\n0\tUnlabelled.\n"
    )
    task, data = read_task("cola", directory)
    first, second, third = data.splits["train"].examples
    assert (first.texts, first.label) == (('A "quoted\x08 start.',), "1")  # the first row is a row
    assert (second.label, third.label) == ("0", "0")
    assert data.splits["dev"].examples[0].texts == ("No last newline",)
    assert data.splits["test"].examples[0].label is None and not data.splits["test"].labelled
    assert (task.metric, data.labels, data.held_out) == ("matthews", ("0", "1"), None)


def test_sst2_texts_lose_the_blank_at_their_end(tmp_path):
    directory = write(tmp_path, train="sentence\tlabel\nhide it \t0\nfun \t1\n", dev="sentence\tlabel\nyes \t1\n")
    _, data = read_task("sst2", directory)
    assert [example.texts[0] for example in data.splits["train"].examples] == ["hide it", "fun"]


def test_mrpc_quotes_are_text_and_an_index_is_no_label(tmp_path):
    header = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
    train = b"\xef\xbb\xbf" + (header + '1\t0\t1\t" We grew .\tIt " grew .\n0\t2\t3\ta\tb\n').encode()
    test = "index\t#1 ID\t#2 ID\t#1 String\t#2 String\n0\t5\t6\tc\td\n"
    task, data = read_task("mrpc", write(tmp_path, train=train, dev=header + "1\t0\t1\ta\tb\n", test=test))
    assert data.splits["train"].examples[0].texts == ('" We grew .', 'It " grew .')
    assert labels(data, "train") == ["1", "0"] and labels(data, "test") == [None]
    assert (task.form, task.metric, task.metrics) == ("similarity", "f1", ("f1", "accuracy"))


def test_stsb_scores_are_standardised_for_the_loss_and_undone_in_predictions(tmp_path):
    header = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n"
    row = "0\tg\tf\ty\t0\tn\tn\t{}\t{}\t{}\n"
    train = header + row.format("a", '"b', "5.000") + row.format("c", "d", "1.0")
    unlabelled = header.replace("\tscore", "") + "0\tg\tf\ty\t0\tn\tn\te\tf\n"
    task, data = read_task(
        "stsb", write(tmp_path, train=train, dev=header + row.format("a", "b", "2.5"), test=unlabelled)
    )
    assert labels(data, "train") == [5.0, 1.0] and labels(data, "test") == [None]
    assert (task.mean, task.deviation) == (3.0, 2.0)
    assert [task.label_number(score) for score in (5.0, 1.0, 2.5)] == [1.0, -1.0, -0.25]
    assert task.prediction(np.array([-0.25])) == (2.5, {})
    with pytest.raises(InputError, match="line 2: a score must be a number, got 'high'"):
        read_task("stsb", write(tmp_path, train=header + row.format("a", "b", "high")))
    with pytest.raises(InputError, match="line 2: a score must be finite, got 'nan'"):
        read_task("stsb", write(tmp_path, train=header + row.format("a", "b", "nan")))


def test_rte_labels_are_words_and_columns_must_fit(tmp_path):
    header = "index\tsentence1\tsentence2\tlabel\n"
    dev = header + "0\tp\th\tentailment\n"
    directory = write(tmp_path, train=header + '0\tAn odd " mark\th\tnot_entailment\n1\tp\th\tentailment\n', dev=dev)
    task, data = read_task("rte", directory)
    assert labels(data, "train") == ["not_entailment", "entailment"]
    assert [task.label_number(label) for label in labels(data, "train")] == [1, 0]
    with pytest.raises(InputError, match=r"train.tsv line 3: the row must have 4 columns .*, got 3"):
        read_task("rte", write(tmp_path, train=header + "0\tp\th\tentailment\n1\tp\tentailment\n"))
    with pytest.raises(InputError, match=r"dev.tsv line 2: a label must be one of entailment, not_entailment, got '1'"):
        read_task("rte", write(tmp_path, train=dev, dev=header + "0\tp\th\t1\n"))


def test_snli_counterfactual_is_csv_quoted(tmp_path):
    header = "sentence1\tsentence2\tgold_label\n"
    train = header + '"A ""big"" dog runs."\t A dog. \tentailment\nA cat.\tNo cat.\tcontradiction\n'
    task, data = read_task("snli_counterfactual", write(tmp_path, train=train, dev=header + "a\tb\tneutral\n"))
    assert data.splits["train"].examples[0].texts == ('A "big" dog runs.', "A dog.")
    assert data.labels == ("contradiction", "entailment", "neutral") and task.form == "entailment"


def test_codah_choices_and_answers(tmp_path):
    row = 'o\tShe\tran.\tsat.\tsang.\t5" tall.\t3\n'
    task, data = read_task("codah", write(tmp_path, train="\tHe\ta\tb\ta\td\t0\n" + row, dev=row))
    second = data.splits["train"].examples[1]
    assert (second.texts, second.choices, second.label) == (("She",), ("ran.", "sat.", "sang.", '5" tall.'), "3")
    assert data.splits["train"].empty_fields == 0  # the category is not read
    assert (FORMATS["gpt1"].num_sequences(task), task.num_outputs, task.label_number("3")) == (4, 1, 3)
    with pytest.raises(InputError, match="line 1: a label must be one of 0, 1, 2, 3, got '4'"):
        read_task("codah", write(tmp_path, train=row.replace("\t3\n", "\t4\n")))


def test_trec_labels_of_both_copies_mean_the_same(tmp_path):
    ours = "0 What is it ?\n4 Where is é ?\n5 How many ?\n3 Who ?\n"
    theirs = b"DESC:def What is it ?\nLOC:other Where is \xe9 ?\nNUM:count How many ?\nHUM:ind Who ?\n"
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one, first = read_task("trec", write(tmp_path / "a", train__txt=ours, test__txt="1 x y\n"))
    other, second = read_task("trec", write(tmp_path / "b", train_5500__label=theirs, TREC_10__label=b"ENTY:z x y\n"))
    for part in ("train", "dev", "test"):
        assert [e.texts for e in first.splits[part].examples] == [e.texts for e in second.splits[part].examples]
        numbers = [one.label_number(label) for label in labels(first, part)]
        assert numbers == [other.label_number(label) for label in labels(second, part)]
    assert one.labels[4] == "4" and other.labels[4] == "LOC"  # predictions are spelt as in the files
    assert other.parse_label("4") == "LOC" and one.parse_label("NUM") == "5"


def test_trec_lines_need_a_label_and_a_question(tmp_path):
    with pytest.raises(InputError, match="train.txt line 2 must be a label, one blank and a question"):
        read_task("trec", write(tmp_path, train__txt="0 What ?\n1\n"))
    with pytest.raises(InputError, match="train.txt line 1: a label must be one of 0, 1, 2, 3, 4, 5, got '6'"):
        read_task("trec", write(tmp_path, train__txt="6 What ?\n"))


def test_held_out_share_is_seeded_and_keeps_duplicates_together(tmp_path):
    rows = [f"{i % 6} Question {i // 2} ?" for i in range(200)]  # every question stands twice
    directory = write(tmp_path, train__txt="\n".join(rows) + "\n")
    _, data = read_task("trec", directory, seed=0)
    _, again = read_task("trec", directory, seed=0)
    _, other = read_task("trec", directory, seed=1)
    assert data == again and data.splits["dev"].examples != other.splits["dev"].examples
    assert data.fingerprint() == again.fingerprint() != other.fingerprint()
    train, dev = ({example.texts for example in data.splits[part].examples} for part in ("train", "dev"))
    assert not train & dev
    assert len(data.splits["dev"].examples) == 20 and len(data.splits["train"].examples) == 180
    assert "20 of the 200 train rows (10%) are held out by seed 0" in (data.held_out or "")
    # Fails on 2968321, which printed the share that was asked for: here all rows but one are the same question.
    (tmp_path / "uneven").mkdir()
    uneven = write(tmp_path / "uneven", train__txt="0 Same ?\n" * 3 + "1 Other ?\n")
    assert "1 of the 4 train rows (25%)" in (read_task("trec", uneven, seed=0)[1].held_out or "")
    everything = data.splits["train"].examples + data.splits["dev"].examples
    assert sorted(f"{e.label} {e.texts[0]}" for e in everything) == sorted(rows)


def test_files_in_a_tasks_own_format_can_be_evaluated(tmp_path):
    train = "ks08\t1\t\tFine.\nks08\t0\t*\tNot fine.\n"
    task, _ = read_task("cola", write(tmp_path, train=train, dev=train))
    named = tmp_path / "named.tsv"
    named.write_text("label\tsentence\nacceptable\tFine.\n0\tNot fine.\n")  # TFDS's spelling is understood
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"sentence": "Fine.", "label": 1}\n{"sentence": "Not fine.", "label": "0"}\n')
    splits = [read_labelled(path, task).examples for path in (tmp_path / "dev.tsv", named, rows)]
    assert splits[0] == splits[1] == splits[2]


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("cola", {"sentence": "x"}),
        ("sst2", {"sentence": "x"}),
        ("mrpc", {"sentence1": "x", "sentence2": "y"}),
        ("stsb", {"sentence1": "x", "sentence2": "y"}),
        ("rte", {"premise": "x", "hypothesis": "y"}),
        ("snli_counterfactual", {"premise": "x", "hypothesis": "y"}),
        ("trec", {"question": "x"}),
        ("codah", {"context": "x", "choices": ["a", "b", "c", "d"]}),
    ],
)
def test_new_rows_carry_natural_names(tmp_path, name, row):
    path = tmp_path / "new.jsonl"
    path.write_text(json.dumps(row | {"label": "ignored", "id": 7}) + "\n")
    (example,) = read_rows(path, TASKS[name])
    assert example.texts == ("x", "y")[: len(example.texts)] and example.label is None
    assert task_from_json(json.loads(json.dumps(TASKS[name].to_json()))) == TASKS[name]


def test_every_task_has_what_a_run_needs():
    for name, task in TASKS.items():
        assert task.name == name and task.metric == task.metrics[0]
        assert task.kind != "classification" or "accuracy" in task.metrics
        for kind in ("gpt1", "bert"):
            own = kind == "gpt1" and task.kind in ("span", "tagging")  # a decoder does not do these
            assert set(task.papers.get(kind, {})) == (
                set() if own else {"length", "batch_size", "peak_lr", "num_epochs"}
            )
        assert task.selects in (BUILT_IN[name].files.keys() | {"dev"})
        assert all(len(names) == len(task.labels) for names in task.spellings)


# (directory, rows of train, dev and test as read, a digest of label counts of train)
REAL = {
    "cola": ("glue/CoLA", (8551, 1043), {"0": 2528, "1": 6023}),
    "sst2": ("glue/SST-2", (67349, 872), {"0": 29780, "1": 37569}),
    "mrpc": ("glue/MRPC", (3668, 408, 1725), {"0": 1194, "1": 2474}),
    "stsb": ("glue/STS-B", (5749, 1500, 1379), None),
    "rte": ("glue/RTE", (2490, 277), {"entailment": 1249, "not_entailment": 1241}),
    "snli_counterfactual": (
        "nli/snli_counterfactual",
        (8330, 1000, 2000),
        {"contradiction": 2782, "entailment": 2770, "neutral": 2778},
    ),
    "codah": ("choice/codah", (1665, 556, 555), {"0": 426, "1": 402, "2": 404, "3": 433}),
}


@pytest.mark.data
@pytest.mark.parametrize("name", REAL)
def test_real_files(data_directory, name):
    directory, counts, spread = REAL[name]
    task, data = read_task(name, str(data_directory / directory))
    assert tuple(len(split.examples) for split in data.splits.values()) == counts
    assert [part for part in data.splits] == ["train", "dev", "test"][: len(counts)]
    for split in data.splits.values():
        assert split.rows_read == len(split.examples) and not split.dropped and not split.empty_fields
        assert all(text == text.strip() for example in split.examples for text in (*example.texts, *example.choices))
    if spread:
        assert {label: labels(data, "train").count(label) for label in data.labels} == spread
    else:
        assert 0 == min(labels(data, "train")) and 5 == max(labels(data, "train"))
        assert task.mean == pytest.approx(np.mean(labels(data, "train")))
    assert len(data.report()) == len(counts)


@pytest.mark.data
def test_real_trec(data_directory):
    _, data = read_task("trec", str(data_directory / "classify/trec"))
    sizes = {part: len(split.examples) for part, split in data.splits.items()}
    assert sizes["train"] + sizes["dev"] == 5452 and sizes["test"] == 500 and sizes["dev"] == 545
    train, dev = ({example.texts for example in data.splits[part].examples} for part in ("train", "dev"))
    assert not train & dev
    assert any("ð" in example.texts[0] for part in ("train", "dev") for example in data.splits[part].examples)


@pytest.mark.data
def test_real_texts_with_quotes_and_control_characters(data_directory):
    _, cola = read_task("cola", str(data_directory / "glue/CoLA"))
    assert sum(example.texts[0].count("\x08") for example in cola.splits["train"].examples) == 3
    _, mrpc = read_task("mrpc", str(data_directory / "glue/MRPC"))
    assert sum(text.startswith('"') for example in mrpc.splits["train"].examples for text in example.texts) == 687
    _, rte = read_task("rte", str(data_directory / "glue/RTE"))
    assert sum(text.count('"') % 2 for example in rte.splits["train"].examples for text in example.texts) == 13


@pytest.mark.data
def test_real_csv_quoted_files_read_as_plain_tsv_are_noticed(data_directory):
    directory = str(data_directory / "nli/snli_counterfactual")
    files = CustomConfig(
        train="train.tsv", dev="dev.tsv", test="test.tsv", text="sentence1", text_pair="sentence2", label="gold_label"
    )
    with pytest.warns(UserWarning) as caught:
        read_task("custom", directory, files)
    assert [int(str(warning.message).split(": ")[1].split()[0]) for warning in caught] == [43, 5, 15]
    _, plain = read_task("snli_counterfactual", directory)
    _, custom = read_task("custom", directory, CustomConfig(**vars(files) | {"quoting": "csv"}))
    assert custom.splits == plain.splits and custom.labels == plain.labels
