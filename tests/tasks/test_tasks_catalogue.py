"""GLUE from TFDS: a real ArrayRecord copy read without TensorFlow, label ids by name, and what is said without it."""

import builtins

import numpy as np
import pytest

from jaxlm.errors import InputError
from jaxlm.tasks import SpanExample, read_task
from jaxlm.tasks.builtin import is_catalogue


class _Labels:
    def __init__(self, names):
        self.names = names


class _Source(list):
    """A random-access source as TFDS gives it."""

    def __init__(self, rows, names=None):
        super().__init__(rows)
        if names:
            self.dataset_info = type("Info", (), {"features": {"label": _Labels(names)}})


@pytest.fixture
def catalogue(monkeypatch):
    tfds = pytest.importorskip("tensorflow_datasets")
    sources, asked = {}, []

    def data_source(name, *, split, data_dir=None):
        asked.append((name, split, data_dir))
        return sources[name, split]  # a KeyError: a data set that is not there

    monkeypatch.setattr(tfds, "data_source", data_source)
    return sources, asked


def pair(label, i=0):
    return {"sentence1": f"first {i}".encode(), "sentence2": b"caf\xc3\xa9 ", "label": label, "idx": i}


def test_names_of_label_ids_decide(catalogue):
    sources, asked = catalogue
    turned = ["not_entailment", "entailment"]  # another order than the one known for TFDS
    sources["glue/rte", "train"] = _Source([pair(0, 0), pair(1, 1)], turned)
    sources["glue/rte", "validation"] = _Source([pair(1)], turned)
    sources["glue/rte", "test"] = _Source([pair(-1)], turned)
    task, data = read_task("rte", "tfds:somewhere")
    assert [example.label for example in data.splits["train"].examples] == ["not_entailment", "entailment"]
    assert data.splits["train"].examples[1].texts == ("first 1", "café")
    assert data.splits["test"].examples[0].label is None
    assert ("glue/rte", "validation", "somewhere") in asked and task.labels == ("entailment", "not_entailment")


def test_labels_of_tfds_become_those_of_the_files(catalogue):
    sources, asked = catalogue
    for split, label in (("train", 1), ("validation", 0), ("test", -1)):
        sources["glue/mrpc", split] = _Source([pair(label), pair(label, 1)])
    _, data = read_task("mrpc", "tfds")
    assert [data.splits[part].examples[0].label for part in data.splits] == ["1", "0", None]
    assert asked[0] == ("glue/mrpc", "train", None)


def test_trec_orders_its_classes_otherwise(catalogue):
    sources, _ = catalogue
    rows = [{"text": f"question {i}".encode(), "label-coarse": i, "label-fine": 0} for i in range(6)]
    sources["trec", "train"] = sources["trec", "test"] = _Source(rows)
    _, data = read_task("trec", "tfds")
    assert [example.label for example in data.splits["test"].examples] == ["0", "1", "2", "3", "5", "4"]
    assert data.held_out


def test_scores_and_missing_labels(catalogue):
    sources, _ = catalogue
    sources["glue/stsb", "train"] = _Source([pair(3.5), pair(0.0)])
    sources["glue/stsb", "validation"] = _Source([pair(1.0)])
    sources["glue/stsb", "test"] = _Source([pair(-1.0)])
    task, data = read_task("stsb", "tfds")
    assert [example.label for example in data.splits["train"].examples] == [3.5, 0.0] and task.mean == 1.75
    assert data.splits["test"].examples[0].label is None
    sources["glue/stsb", "validation"] = _Source([pair(-1.0)])
    with pytest.raises(InputError, match="1 of 1 rows of dev have no label"):
        read_task("stsb", "tfds")


def inference(label, i=0):
    return {"premise": f"p {i}".encode(), "hypothesis": b"h", "label": label, "idx": i}


def test_mnli_has_two_dev_parts_and_the_diagnostic_set_if_it_is_there(catalogue):
    sources, asked = catalogue
    for split in ("train", "validation_matched", "validation_mismatched"):
        sources["glue/mnli", split] = _Source([inference(0), inference(2), inference(1)])
    for split in ("test_matched", "test_mismatched"):
        sources["glue/mnli", split] = _Source([inference(-1)])
    task, data = read_task("mnli", "tfds")
    assert list(data.splits) == ["train", "dev_matched", "dev_mismatched", "test_matched", "test_mismatched"]
    assert [e.label for e in data.splits["dev_mismatched"].examples] == ["entailment", "contradiction", "neutral"]
    sources["glue/ax", "test"] = _Source([inference(-1), inference(-1)])
    _, data = read_task("mnli", "tfds")
    assert len(data.splits["ax"].examples) == 2 and data.held_out is None


def test_rows_without_a_gold_label_stay_in_tfds_and_not_here(catalogue):
    sources, _ = catalogue
    for split in ("train", "validation", "test"):
        sources["snli", split] = _Source([inference(1), inference(-1, 1), inference(2, 2)])
    _, data = read_task("snli", "tfds")
    for split in data.splits.values():
        assert [example.label for example in split.examples] == ["neutral", "contradiction"]
        assert split.rows_read == 3 and split.dropped == ((1, "no label"),)


def test_race_records_are_passages_of_two_data_sets(catalogue):
    sources, _ = catalogue
    passage = {
        "article": b"A.",
        "questions": [b"q", b"r"],
        "answers": np.array([b"A", b"D"], object),
        "options": [[b"a", b"b", b"c", b"d"]] * 2,
        "example_id": b"1",
    }
    for part in ("train", "dev", "test"):
        for school in ("middle", "high"):
            sources[f"race/{school}", part] = _Source([passage])
    _, data = read_task("race", "tfds")
    assert [(e.group, e.label) for e in data.splits["test"].examples] == [
        ("middle", "A"), ("middle", "D"), ("high", "A"), ("high", "D")
    ]  # fmt: skip


def test_story_cloze_answers_are_passed_on_unshifted(catalogue):
    sources, _ = catalogue
    rows = [{"context": f"c{n}".encode(), "endings": [b"a", b"b"], "label": np.int32(n % 2 + 1)} for n in range(10)]
    sources["story_cloze/2016", "validation"] = sources["story_cloze/2016", "test"] = _Source(rows)
    _, data = read_task("story_cloze", "tfds")
    assert [example.label for example in data.splits["test"].examples] == ["1", "2"] * 5
    assert len(data.splits["dev"].examples) == 2


def test_squad(catalogue):
    sources, _ = catalogue
    answers = {"text": np.array([b"b", b"c"], object), "answer_start": np.array([2, 4], np.int32)}
    row = {"id": b"x", "title": b"t", "context": b"a b c", "question": b" q ", "answers": answers}
    sources["squad/v1.1", "train"] = sources["squad/v1.1", "validation"] = _Source([row])
    _, data = read_task("squad", "tfds")
    assert data.splits["dev"].examples[0] == SpanExample("x", "q", "a b c", (("b", 2), ("c", 4)))
    none = row | {"is_impossible": True, "plausible_answers": answers}
    sources["squad/v2.0", "train"] = sources["squad/v2.0", "validation"] = _Source([none])
    assert read_task("squad2", "tfds")[1].splits["train"].examples[0].answers == ()


def test_conll_ends_in_an_empty_record(catalogue):
    sources, _ = catalogue
    rows = [{"tokens": [b"Ann", b"sat"], "ner": np.array([1, 0])}, {"tokens": [], "ner": np.array([], np.int64)}]
    for part in ("train", "dev", "test"):
        sources["conll2003", part] = _Source(rows)
    task, data = read_task("ner", "tfds")
    assert [example.tags for example in data.splits["train"].examples] == [("B-PER", "O")]
    assert task.labels == ("O", "B-PER", "I-PER") and data.splits["train"].rows_read == 2


def test_tasks_that_tfds_does_not_have():
    assert is_catalogue("tfds") and is_catalogue("tfds:x") and not is_catalogue("tfds_files")
    with pytest.raises(InputError, match="task codah: TFDS has no copy"):
        read_task("codah", "tfds")


def test_without_the_extra_one_line_names_it(monkeypatch):
    imported = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "tensorflow_datasets":
            raise ImportError("No module named 'tensorflow_datasets'")
        return imported(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InputError, match="No module named 'tensorflow_datasets'; run launch/setup.sh cpu") as error:
        read_task("cola", "tfds")
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_without_tensorflow_a_set_that_is_not_prepared_names_the_extra(tmp_path, monkeypatch):
    pytest.importorskip("tensorflow_datasets")
    import importlib.util

    if importlib.util.find_spec("tensorflow"):
        pytest.skip("TensorFlow is installed: TFDS would download the set")
    # TFDS tries to download it, and waits for minutes between the attempts.
    monkeypatch.setattr("urllib3.util.retry.Retry.get_backoff_time", lambda retry: 0)
    with pytest.raises(InputError, match="needs TensorFlow; run launch/setup.sh cpu tfds") as error:
        read_task("cola", f"tfds:{tmp_path}")
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_array_records_are_read_without_tensorflow(tmp_path, monkeypatch):
    tfds = pytest.importorskip("tensorflow_datasets")
    pytest.importorskip("array_record")
    # TFDS's own set of this name, if an earlier test has loaded it, would be in the way.
    monkeypatch.delitem(tfds.core.registered._DATASET_REGISTRY, "glue", raising=False)
    parts = {"train": ["Fine.", "Not fine it."], "validation": ["Good \u2028one. "], "test": ["Who knows."]}

    class Glue(tfds.core.GeneratorBasedBuilder):
        """CoLA as TFDS keeps it, with rows of our own."""

        VERSION = tfds.core.Version("1.0.0")
        BUILDER_CONFIGS = [tfds.core.BuilderConfig(name="cola")]
        name = "glue"

        def _info(self):
            label = tfds.features.ClassLabel(names=["unacceptable", "acceptable"])
            features = {"sentence": tfds.features.Text(), "label": label}
            return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

        def _split_generators(self, _):
            return {split: self._generate_examples(split) for split in parts}

        def _generate_examples(self, split):
            for row, text in enumerate(parts[split]):
                yield row, {"sentence": text, "label": -1 if split == "test" else int("Not" not in text)}

    Glue(data_dir=str(tmp_path), config="cola", file_format="array_record").download_and_prepare()
    _, data = read_task("cola", f"tfds:{tmp_path}")
    read = {example.texts[0]: example.label for example in data.splits["train"].examples}
    assert read == {"Fine.": "1", "Not fine it.": "0"}
    assert data.splits["dev"].examples[0].texts == ("Good \u2028one.",)
    assert data.splits["test"].examples[0].label is None
