"""The comparison of systems: its script with commands that only note a call, its table, and its probe."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import toy_encoder
import toy_run
from documents import parse
from paths import REPOSITORY
from staged_checkout import run_staged, staged_checkout
from toy_runs import make_word_stores, run_here

import jaxlm
from jaxlm.tasks.examples import TaggedSentence

pytestmark = pytest.mark.usefixtures("two_devices")
SYSTEMS = REPOSITORY / "launch" / "systems"


def script(name: str):
    """Return a script of launch/systems as a module."""
    spec = importlib.util.spec_from_file_location(f"systems_{name}", SYSTEMS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- the script -------------------------------------------------------------------------------------------------------


@pytest.fixture
def stage(tmp_path) -> Path:
    for part in ("books/train", "books/test", "classify/trec", "glue/SST-2", "ner/wnut17", "translation/multi30k"):
        (tmp_path / "data" / part).mkdir(parents=True)
    for name in ("train.en", "train.de", "val.en", "val.de", "test_2016_flickr.en", "test_2016_flickr.de"):
        (tmp_path / "data" / "translation" / "multi30k" / name).touch()
    return staged_checkout(tmp_path, "systems.sh")


def systems(stage: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return run_staged(stage, "systems.sh", *arguments, **environment)


def calls_of(stage: Path) -> list[list[str]]:
    return [line.split() for line in (stage / "calls").read_text().splitlines()]


def test_every_system_reads_the_same_text_and_every_command_parses(stage, monkeypatch):
    """Fails when a system reads more text, when a step lacks a name, or when a command has an unknown flag."""
    done = systems(stage, "--share", "0.25", str(stage / "data"), "out")
    assert done.returncode == 0, done.stderr
    calls = calls_of(stage)
    assert f"[{len(calls)}/{len(calls)}] table" in done.stdout
    steps = [json.loads(line)["step"] for line in (stage / "out" / "steps.jsonl").read_text().splitlines()]
    shown = [line.split()[1].rstrip(",") for line in done.stdout.splitlines() if line.startswith("[")]
    assert steps == shown
    shares = {call[2]: call[call.index("--num-epochs") + 1] for call in calls if call[1] == "jaxlm.pretrain"}
    assert len(shares) == 8 and set(shares.values()) == {"0.25"}
    tasks = [call for call in calls if call[1] == "jaxlm.finetune" and "translation" not in call]
    assert len(tasks) == 4 * 9 and sum("--start" in call or "--word-features" in call for call in tasks) == 2 * 9
    for call in calls:
        if call[0] == "-m":
            assert parse(call[1].removeprefix("jaxlm."), call[2:], monkeypatch) is None, call


def test_one_system_of_another_seed_has_runs_and_a_row_of_its_own(stage):
    """Fails when a seed overwrites the runs of another, or when a system that was not asked for runs."""
    done = systems(stage, "--only", "bert", "--seed", "2", str(stage / "data"), "out")
    assert done.returncode == 0, done.stderr
    calls = calls_of(stage)
    (pretrained,) = (call for call in calls if call[1] == "jaxlm.pretrain")
    assert pretrained[2] == "pretrain/bert_small" and pretrained[pretrained.index("--run") + 1] == "out/bert-2"
    assert pretrained[pretrained.index("--seed") + 1] == "2"
    (row,) = (call for call in calls if call[0] == "launch/systems/row.py")
    assert row[row.index("--system") + 1 :] == ["bert", "--run", "bert-2"]
    assert sum(call[1] == "jaxlm.prepare" for call in calls) == 2


def test_a_stop_says_how_to_continue(stage):
    """Fails when a failed step is hidden, or when the command that continues is another one."""
    failed = systems(stage, "--share", "0.1", str(stage / "data"), "out", PRETRAIN_CODE="75")
    assert failed.returncode == 75
    assert f"(gpt-pretrain); launch/systems.sh --share 0.1 {stage / 'data'} out continues" in failed.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "expected DATA"),
        (("--share", "much", "data"), "--share must be a positive number"),
        (("--only", "gpt3", "data"), "--only must be one of gpt transformer_xl"),
        (("--seed", "-1", "data"), "--seed must be a number"),
        (("--fast", "data"), "unknown option"),
        (("nowhere",), "must have a directory books/train"),
    ],
)
def test_wrong_usage(stage, arguments, said):
    wrong = systems(stage, *arguments)
    assert wrong.returncode == 2 and said in wrong.stderr and not (stage / "calls").exists()


# --- rows and table ---------------------------------------------------------------------------------------------------


def filled(directory: Path) -> Path:
    """Results of one system as the commands leave them, with figures that are easy to check."""
    (directory / "gpt").mkdir(parents=True)
    lines = [
        {"kind": "train", "step": step, "loss": 3.0, "tokens_per_second": speed, "trained_tokens": step * 100}
        for step, speed in ((20, 900), (40, 1100), (60, 1000))
    ]
    (directory / "gpt" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (directory / "gpt" / "config.json").write_text('{"seed": 0}')
    (directory / "gpt-probe.json").write_text(
        json.dumps({"parameters": 2_500_000, "embeddings": [1.0, 2.0, 3.0], "last_layer": [10.0, 12.0, 14.0]})
    )
    (directory / "gpt-perplexity.json").write_text(json.dumps({"bits_per_byte": 1.2345}))
    for name, test in (("trec", True), ("trec-scratch", True), ("sst2", False), ("sst2-scratch", False)):
        runs = [
            {"dev": {"accuracy": value}} | ({"test": {"accuracy": value + 0.1}} if test else {})
            for value in (0.5, 0.6, 0.7)
        ]
        (directory / f"gpt-{name}").mkdir()
        (directory / f"gpt-{name}" / "results.json").write_text(json.dumps({"runs": runs}))
    (directory / "rows").mkdir()
    return directory


def run_script(name: str, *arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, SYSTEMS / name, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        check=False,
    )


def cells(text: str, title: str) -> list[str]:
    row = next(line for line in text.splitlines() if line.startswith(f"| {title} "))
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_the_table_has_means_and_sample_deviations(tmp_path):
    """Fails when dev is reported where test labels are there, or when the deviation is that of a population."""
    made = run_script("row.py", "--directory", filled(tmp_path), "--system", "gpt", "--run", "gpt")
    assert made.returncode == 0, made.stderr
    row = json.loads((tmp_path / "rows" / "gpt.json").read_text())
    assert row["trec"] == pytest.approx([60, 70, 80]) and (row["seed"], row["steps"]) == (0, 60)
    done = run_script("table.py", "--rows", tmp_path / "rows", "--output", tmp_path / "systems.md")
    trec, sst2, first = "70.0 ± 10.0", "60.0 ± 10.0", ["GPT", "2.50 M", "0.0 M pieces", "1,000", "1", "1.234", "none"]
    assert cells(done.stdout, "GPT") == [*first, trec, trec, sst2, sst2, "12.0 ± 2.0", "2.0 ± 1.0"]
    assert (tmp_path / "systems.md").read_text() == done.stdout

    row |= {"seed": 1, "bits_per_byte": 1.4345, "trec": [60.0, 60.0, 60.0]}
    (tmp_path / "rows" / "gpt-1.json").write_text(json.dumps(row))
    of_two = cells(run_script("table.py", "--rows", tmp_path / "rows").stdout, "GPT")
    assert of_two[4:8] == ["2", "1.335 ± 0.141", "none", "65.0 ± 7.1"]  # of the means of the pretrainings


def test_a_missing_or_damaged_result_is_one_line(tmp_path):
    (filled(tmp_path) / "gpt-sst2" / "results.json").unlink()
    done = run_script("row.py", "--directory", tmp_path, "--system", "gpt", "--run", "gpt")
    assert done.returncode == 2 and "gpt-sst2" in done.stderr and done.stderr.count("\n") == 1
    assert not list((tmp_path / "rows").iterdir())
    done = run_script("table.py", "--rows", tmp_path / "rows")
    assert done.returncode == 2 and "must have rows of systems" in done.stderr
    (tmp_path / "rows" / "gpt.json").write_text("{")
    done = run_script("table.py", "--rows", tmp_path / "rows")
    assert done.returncode == 2 and "gpt.json is not a row" in done.stderr and done.stderr.count("\n") == 1


# --- the probe --------------------------------------------------------------------------------------------------------


SENTENCES = (("The", "cat", "sat."), ("A", "bird", "sang", "the", "cat"))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    directory = tmp_path_factory.mktemp("probe")
    tokenizer = toy_run.toy_tokenizer()
    store = toy_run.toy_store(directory / "store", tokenizer)
    toy_run.pretrained(directory / "gpt", store, steps=(7,))
    toy_encoder.pretrained(directory / "bert", toy_encoder.write_vocabulary(directory / "vocabulary"), steps=(7,))
    return {name: jaxlm.load(str(directory / name)) for name in ("gpt", "bert")}


def test_a_decoders_word_has_the_state_of_its_last_token(models):
    """Fails when a word gets another token's state: that of the text up to the word is the same, by causality."""
    model = models["gpt"]
    found = script("probe").word_states(model, [TaggedSentence(words) for words in SENTENCES])
    prefixes = [" ".join(words[: end + 1]) for words in SENTENCES for end in range(len(words))]
    expected = [states[[0, -1], -1] for states in model.hidden_states([model.encode([text])[0] for text in prefixes])]
    np.testing.assert_allclose(np.swapaxes(found, 0, 1), expected, rtol=1e-5, atol=1e-5)


def test_an_encoder_reads_whole_sentences(models):
    """Fails when CLS or SEP is missing or counted as a word, or when an encoder reads the words before one only."""
    model, words = models["bert"], ("ba", "be", "bo")
    found = script("probe").word_states(model, [TaggedSentence(words)])
    (whole,) = model.hidden_states([" ".join(words)])
    assert whole.shape[1] == 2 + len(words)
    np.testing.assert_allclose(found[1], whole[-1, 1:-1], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_words_of_elmo_and_of_a_source(tmp_path):
    """Against the states of the sentence as a text, whose words are tokens of their own.

    Fails when ELMo's words are read as ids, when a source lacks its end, which the backward layers read first, or when
    a place is shifted.
    """
    store, _ = make_word_stores(tmp_path)
    rows = tmp_path / "rows.tsv"
    rows.write_text("source\ttarget\n" + "bada zizi bobo\tbobo zizi bada\n" * 8)
    words = f"--custom.train {rows} --custom.dev {rows} --task custom --custom.kind text --custom.text source".split()
    words += f"--custom.label target --batch-size 8 --num-epochs 1 --tokenizer store:{store}".split()
    assert run_here("finetune", "debug/mt_lstm", "--run", tmp_path / "mt_lstm", *words).code == 0
    elmo = ["--run", tmp_path / "elmo", "--data.store", store, "--num-steps", 2]
    assert run_here("pretrain", "debug/elmo", *elmo).code == 0
    sentence = TaggedSentence(("bobo", "bada", "zizi"))
    for name in ("elmo", "mt_lstm"):
        model = jaxlm.load(str(tmp_path / name))
        (states,) = model.hidden_states([" ".join(sentence.tokens)])
        found = script("probe").word_states(model, [sentence])
        np.testing.assert_allclose(found, states[[0, -1], :3], rtol=1e-5, atol=1e-6)
        assert np.abs(found[1, 0] - found[1, 1]).max() > 1e-3


def test_the_probe_finds_entities_that_the_features_name():
    """Fails when words and tags are out of step, or when the F1 is not that of exact entities."""
    rng = np.random.default_rng(0)
    tags = ("O", "B-PER", "I-PER")
    sentences = [TaggedSentence(("x",) * 3, tuple(["O", "B-PER", rng.choice(["I-PER", "O"])])) for _ in range(60)]
    features = np.eye(3, dtype=np.float32)[[tags.index(tag) for sentence in sentences for tag in sentence.tags]]
    probe = script("probe").probe
    assert probe(features, sentences, features, sentences, 0) == 100
    assert probe(features, sentences, np.roll(features, 1, axis=0), sentences, 0) < 50
    assert 30 < probe(features, sentences, np.zeros_like(features), sentences, 0, "ud_pos") < 70  # of the words, O


@pytest.mark.data
def test_parts_of_speech_are_read(data_directory):
    """Fails when a split is another one, or a word or a tag is lost."""
    train, test = script("probe").read("ud_pos", data_directory / "ud" / "ewt")
    assert (len(train), len(test)) == (12_544, 2_077)
    assert len(test[0].tokens) == len(test[0].tags) and "PROPN" in {tag for one in test for tag in one.tags}
