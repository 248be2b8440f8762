"""The fault campaign: single random faults in stores, runs, checkpoints, tokenizers, published weights and task files.

Each ends in one line that refuses, in the results of undamaged files, or in an older checkpoint that the log names.
Where files are text, a changed byte may be another text: then what a run remembers of it, its fingerprint, differs.
Fails when a fault ends in a traceback, in no end, or in another result that nothing tells from the right one.

A few dozen faults are judged in every run of the tests; launch/faults.sh judges many more, some through the commands.
"""

import collections
import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fault_campaign import COMMAND_EVERY, SOUND, Specimens, journal, judgement, write
from fault_formats import format_subjects
from faults import WEIGHTS, Fault, copied, damage

from jaxlm.errors import InputError
from jaxlm.inference.loaded_run import load_run
from jaxlm.training.start import open_source

QUICK = 60
EACH = 5  # faults of a later format


@pytest.fixture(scope="module")
def specimens(tmp_path_factory):
    return Specimens(tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize("first", range(0, QUICK, 12))
def test_faults_are_found_or_do_no_harm(specimens, first):
    """Fails on 2968321: devices and pipes never end, nested JSON is a traceback, damaged stores are read."""
    for seed in range(first, first + 12):
        line = specimens.judged(seed)
        assert line["outcome"] in SOUND, line


@pytest.mark.parametrize("name", [subject.name for subject in format_subjects()])
def test_faults_of_each_later_format(specimens, name):
    """Fails when a damaged archive or cache, or a file of a later format, ends in one of the ways above."""
    for seed in range(EACH):
        line = specimens.judged(seed, name)
        assert line["outcome"] in SOUND, line


def replaced(file: Path, content: bytes | str) -> None:
    """Put other bytes in a file's place, a pipe, or a link to a device."""
    file.unlink()
    if content == "pipe":
        os.mkfifo(file)
    elif isinstance(content, str):
        file.symlink_to(content)
    else:
        file.write_bytes(content)


@pytest.mark.parametrize(
    "name, pattern, old, new",
    [
        ("run", "run/checkpoints/7/state/d/*", None, "pipe"),
        ("run", "run/tokenizer/sentencepiece.model", None, "/dev/zero"),
        ("run", "run/config.json", b'"num_layers": 2', b'"num_layers": ' + b"[" * 200_000),
        ("fine-tuned run", "run/task.json", None, "pipe"),
        ("fine-tuned run", "run/tokenizer/tokenizer_description.json", b'"fingerprint"', b'"fingerprins"'),
        ("SQuAD", "dev-v1.1.json", b'"answer_start": ', b'"answer_start": Infinity, "was": '),
        ("SQuAD", "train-v1.1.json", b'"context": ', b'"context": 0, "was": '),
        ("CSV", "test.csv", None, "pipe"),
        ("JSON lines", "train.jsonl", None, "/dev/zero"),
        ("store of windows", "store/tokens.bin", None, "pipe"),
        ("GPT-2 vocabulary", "vocab.bpe", None, "/dev/zero"),
        ("tokenizer.json", "tokenizer.json", b'": 65', b'": -Infinity'),
        ("unfinished store", "partial/plan.json", None, "pipe"),
        ("unfinished store", "partial/shards/2.words", None, "/dev/zero"),
    ],
)
def test_what_the_campaign_met(specimens, tmp_path, name, pattern, old, new):
    """Fails on 2968321, which waits for a pipe, reads a device until memory ends, or ends in a traceback."""
    specimen, expected = specimens.of(name)
    copy = copied(specimen, tmp_path / "copy")
    file = sorted(copy.glob(pattern))[0]
    content = file.read_bytes()
    replaced(file, new if old is None else content.replace(old, new, 1))
    assert old is None or old in content
    outcome, said = judgement(specimens.subjects[name], copy, expected, Fault("replace", pattern))
    assert outcome in ("refused", "recovered"), (outcome, said)


def test_faults_are_what_they_are_called(tmp_path):
    """A fault alters exactly one file, and a seed brings it back. Fails when the campaign damages nothing."""
    original = tmp_path / "original"
    original.mkdir()
    (original / "a.json").write_text('{"one": 1, "two": [2, 3.5, "x"]}')
    (original / "b.bin").write_bytes(bytes(range(256)) * 40)
    seen = collections.Counter()
    for seed in range(300):
        faults = []
        for name in ("first", "second"):
            copy = copied(original, tmp_path / name)
            faults.append(damage(copy, random.Random(seed)))
        assert faults[0] == faults[1]
        seen[faults[0].kind] += 1
        altered = [
            file.name
            for file in original.iterdir()
            if not (copy / file.name).is_file()
            or (copy / file.name).is_symlink()
            or (copy / file.name).read_bytes() != file.read_bytes()
        ]
        assert altered == ([] if faults[0].forbidden else [faults[0].path]), faults[0]
    assert set(seen) == set(WEIGHTS)


@pytest.mark.campaign
def test_campaign(request, capfd):
    """N seeds, every tenth of them a command. A seed that the journal has is not judged again."""
    end, directory = request.config.getoption("--campaign"), request.config.getoption("--campaign-directory").absolute()
    tests = Path(__file__).resolve().parents[1]
    program = tests / "fixtures" / "fault_campaign.py"
    environment = os.environ | {"PYTHONPATH": f"{tests.parent}:{tests}"}
    with capfd.disabled():
        while len({line["seed"] for line in journal(directory)} & set(range(end))) < end:
            ended = subprocess.run([sys.executable, program, directory, "0", str(end)], env=environment)
            doing = directory / "doing-0"
            if ended.returncode and doing.exists() and doing.read_text().isdecimal() and ended.returncode < 0:
                seed = int(doing.read_text())  # the process died of it
                died = {"subject": "?", "kind": "?", "fault": "?", "said": "", "seconds": 0.0}
                write(directory, {"seed": seed, "outcome": f"the process died of signal {-ended.returncode}"} | died)
            elif ended.returncode:
                pytest.fail(f"the campaign's process ended with {ended.returncode}")
        lines = [line for line in journal(directory) if line["seed"] < end]
        print(f"\n{table(lines)}")
    bad = [line for line in lines if line["outcome"] not in SOUND]
    assert not bad, "\n".join(
        f"seed {line['seed']}: {line['outcome']}: {line['fault']}: {line['said']}" for line in bad
    )


def table(lines) -> str:
    """The outcomes by what was damaged and by what was done."""
    rows = []
    outcomes = sorted({line["outcome"] for line in lines})
    for name in ("subject", "kind"):
        rows.append(f"{name:34}" + "".join(f"{outcome:>24}" for outcome in outcomes))
        for value in sorted({line[name] for line in lines}):
            counts = collections.Counter(line["outcome"] for line in lines if line[name] == value)
            rows.append(f"{value:34}" + "".join(f"{counts[outcome]:24}" for outcome in outcomes))
        rows.append("")
    commands = sum(line["seed"] % COMMAND_EVERY == 0 for line in lines)
    totals = collections.Counter(line["outcome"] for line in lines)
    rows.append(f"{len(lines)} faults, {commands} of them through commands: {dict(totals)}")
    return "\n".join(rows)


def altered(run: Path, name: str, old: str, new: str) -> None:
    """Change a value of a JSON file of a run, as a hand or a disk may do it."""
    file = run / name
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    "name, old, new, said",
    [
        ("config.json", '"num_heads": 2', '"num_heads": 4', "model.num_heads"),
        ("config.json", '"norm_eps": 1e-', '"norm_eps": 3e-', "model.norm_eps"),
        ("config.json", '"length": 24', '"length": 23', "length"),
        ("task.json", '"bad"', '"bat"', "it was altered: its sha256 does not match"),
    ],
)
def test_an_altered_run_is_refused(specimens, tmp_path, name, old, new, said):
    """Values that fit the parameters and mean something else. Fails on 2968321: another model answers, or misspelt.

    config.json is held against the copy in the checkpoint, which proves itself; task.json has a hash of itself.
    """
    specimen, _ = specimens.of("fine-tuned run")
    run = shutil.copytree(specimen / "run", tmp_path / "run")
    load_run(run)
    altered(run, name, old, new)
    with pytest.raises(InputError, match=re.escape(f"{run}/{name}")) as refused:
        load_run(run)
    assert said in str(refused.value) and "put it back from a copy" in str(refused.value)
    if name == "config.json":
        with pytest.raises(InputError, match=re.escape(f"{run}/config.json")):
            open_source(str(run))


def test_what_may_differ_is_no_damage(specimens, tmp_path):
    """Stores that moved, another mesh; and files from before they had hashes. Fails when old runs are refused."""
    specimen, (_, expected) = specimens.of("fine-tuned run")
    run = shutil.copytree(specimen / "run", tmp_path / "run")
    altered(run, "config.json", '"log_every": ', '"log_every": 1')
    task = json.loads((run / "task.json").read_text())
    del task["sha256"]
    (run / "task.json").write_text(json.dumps(task))
    loaded = load_run(run)
    assert loaded.task is not None and loaded.task.to_json() == expected[-1]
