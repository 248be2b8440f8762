"""The functions that train: the same runs as the commands', stopped by callbacks, without a trace in the process."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import toy_runs
from paths import REPOSITORY
from xla_flags import xla_flags

import jaxlm
from jaxlm.host import user_cache
from jaxlm.runs.metrics_log import read_metrics
from jaxlm.wording import finite

pytestmark = pytest.mark.usefixtures("two_devices")

CHANGES = {"length": 32, "log_every": 1, "optimizer.warmup": 2, "num_steps": 8, "checkpoint-every": 3}
TUNING = {"length": 16, "batch_size": 8, "num_epochs": 2, "log_every": 1, "checkpoint_every": 3}
UNEQUAL = ("tokens_per_second", "wait_share", "host_memory_gib")  # of two runs


@pytest.fixture(scope="module")
def work(folder) -> Path:
    """The folder, with a task in `task`."""
    toy_runs.make_task(folder / "task")
    return folder


def pretrain(work: Path, name: str, **more) -> dict:
    stores = {"store": work / "stores/books", "validation": [work / "stores/valid"]}
    return jaxlm.run_pretraining("debug/gpt", run=work / name, changes=CHANGES, **stores, **more)


@pytest.fixture(scope="module")
def called(work):
    """A run of the function, never stopped: its result and its records."""
    records: list[dict] = []
    return pretrain(work, "called", callbacks=[records.append]), records


def same(records, others) -> bool:
    """Compare records up to the times in them."""
    plain = [[{k: v for k, v in line.items() if k not in UNEQUAL} for line in lines] for lines in (records, others)]
    return plain[0] == plain[1]


def test_a_run_of_the_function_is_a_run_of_the_command(work, called):
    """Fails when the function trains other parameters, saves another config, or its callbacks see other records."""
    flags = [word for name, value in CHANGES.items() for word in (f"--{name.replace('_', '-')}", value)]
    stores = ["--data.store", work / "stores/books", "--data.validation", work / "stores/valid"]
    ended = toy_runs.run_here("pretrain", "debug/gpt", "--run", work / "command", *stores, *flags)
    assert ended.code == 0, ended.errors
    result, records = called
    run, command = work / "called", work / "command"
    assert result == {"run": str(run), "step": 8, "num_steps": 8, "complete": True}
    assert (run / "config.json").read_bytes() == (command / "config.json").read_bytes()
    assert toy_runs.checksums(run) == toy_runs.checksums(command)
    assert [finite(record) for record in records] == list(read_metrics(run / "metrics.jsonl"))
    assert same(list(read_metrics(run / "metrics.jsonl")), list(read_metrics(command / "metrics.jsonl")))
    again = toy_runs.run_here("pretrain", "debug/gpt", "--run", run, *stores, *flags)
    assert again.output == f"{run} is complete: 8 of 8 steps; nothing to do\n", again


def test_a_callback_stops_a_run_that_continues_with_the_same_bits(work, called):
    """Fails when a stop loses a step, when other answers than True stop it, or when the rest is not that of a run which
    was never stopped.
    """
    stopped = pretrain(work, "stopped", callbacks=[lambda record: record.clear(), lambda record: record["step"] == 5])
    assert stopped["complete"] is False and 5 <= stopped["step"] <= 6 == toy_runs.newest_step(work / "stopped"), stopped
    assert toy_runs.checkpoints(work / "stopped")[-1] == stopped["step"]
    assert pretrain(work, "stopped", callbacks=[lambda record: record["step"]])["complete"] is True
    assert toy_runs.metrics(work / "stopped") == toy_runs.metrics(work / "called")
    assert toy_runs.checksums(work / "stopped") == toy_runs.checksums(work / "called")
    assert pretrain(work, "stopped", callbacks=[pytest.fail])["complete"] is True  # nothing is left to do


def tune(work: Path, name: str, changes=TUNING, **more) -> dict:
    task = work / "task"
    custom = {part: task / f"{part}.tsv" for part in ("train", "dev", "test")} | {"text": "text", "label": "label"}
    settings = {"task": "custom", "custom": custom, "start": work / "runs/gpt", "seeds": 2}
    return jaxlm.run_finetuning("finetune/gpt1", run=work / name, changes=changes, **settings, **more)


def test_fine_tuning_by_the_function_is_that_of_the_command(work, called):
    """Fails when results or predictions differ, or when a stop by a callback changes them."""
    flags = [word for name, value in TUNING.items() for word in (f"--{name.replace('_', '-')}", value)]
    task = work / "task"
    files = [word for part in ("train", "dev", "test") for word in (f"--custom.{part}", task / f"{part}.tsv")]
    arguments = ["finetune/gpt1", "--run", work / "tuned", "--start", work / "runs/gpt", "--task", "custom", *files]
    arguments += ["--custom.text", "text", "--custom.label", "label", "--seeds", 2, *flags]
    ended = toy_runs.run_here("finetune", *arguments)
    assert ended.code == 0, ended.errors
    part = tune(work, "tuned by call", callbacks=[lambda record: record["step"] >= 4 and record["seed"] == 1])
    assert part == {"task": "custom", "complete": False}
    results = tune(work, "tuned by call")
    saved = json.loads((work / "tuned" / "results.json").read_text())
    assert results.pop("complete") and results == {name: saved[name] for name in results}
    assert results["dev"]["accuracy"].keys() == {"mean", "std"} and len(results["runs"]) == 2
    for name in ("predictions.jsonl", "config.json"):
        assert (work / "tuned" / name).read_bytes() == (work / "tuned by call" / name).read_bytes(), name
    assert tune(work, "tuned by call")["dev"] == results["dev"]


def test_calls_refuse_in_one_line(work):
    """Fails when a wrong argument ends in something else than an InputError of one line, or leaves a directory."""
    for wrong, message in (
        ({"changes": {"model.layers": 2}}, "model"),
        ({"changes": {"num_steps": "many"}}, "num_steps"),
        ({"store": work / "nowhere"}, "nowhere: no such token store"),
        ({"start": work / "nowhere"}, "nowhere"),
    ):
        arguments = {"store": work / "stores/books"} | wrong
        with pytest.raises(jaxlm.InputError, match=message) as caught:
            jaxlm.run_pretraining("debug/gpt", run=work / "refused", **arguments)
        assert "\n" not in str(caught.value)
    with pytest.raises(jaxlm.InputError, match="custom.txt"):
        jaxlm.run_finetuning("finetune/gpt1", run=work / "refused", task="custom", custom={"txt": "a"})
    assert not (work / "refused").exists()


def test_a_store_of_the_function_is_that_of_the_command(tmp_path, capsys, caplog):
    """Fails when the store has other bytes, when the function prints, or when a wrong argument is not refused."""
    (tmp_path / "a.txt").write_text("\n".join(toy_runs.sentences(12)))
    source, tokenizer = f"text:{tmp_path}/*.txt", "train-sentencepiece:300"
    with caplog.at_level(logging.INFO, "jaxlm"):
        made = jaxlm.prepare_store(source, tokenizer=tokenizer, output=tmp_path / "called")
    assert capsys.readouterr() == ("", "") and "training a SentencePiece bpe vocabulary" in caplog.text
    flags = ["--source", source, "--tokenizer", tokenizer, "--output", tmp_path / "command", "--workers", 1]
    assert toy_runs.Process("prepare", *flags, log=tmp_path / "log").ended().code == 0
    described = json.loads((tmp_path / "command" / "description.json").read_text())
    own = json.loads((tmp_path / "called" / "description.json").read_text())
    assert own["fingerprint"] == described["fingerprint"]
    assert made["store"] == str(tmp_path / "called") and made["vocabulary"] == 300 and made["documents"] == 1
    assert made["bytes"] == (tmp_path / "a.txt").stat().st_size
    with pytest.raises(jaxlm.InputError, match="made with tokenizer train-sentencepiece:300"):
        jaxlm.prepare_store(source, tokenizer="train-sentencepiece:310", output=tmp_path / "called")


TRACES = """
import logging, os, signal, sys, threading, warnings
import jaxlm
assert "jax" not in sys.modules and "numpy" not in sys.modules, "import jaxlm must be immediate"
assert set(jaxlm.__all__) <= set(dir(jaxlm))
import jax, orbax.checkpoint, grain, sentencepiece, tensorboardX, flax, optax  # their own imports are not ours

def traces():
    loggers = {name: logging.getLogger(name) for name in ("", "jaxlm", "py.warnings", "asyncio", "absl")}
    umask = os.umask(0)
    os.umask(umask)
    return {
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGABRT)],
        "loggers": {k: (v.level, v.propagate, list(v.handlers), list(v.filters)) for k, v in loggers.items()},
        "hooks": (sys.excepthook, sys.unraisablehook, threading.excepthook, warnings.formatwarning),
        "process": (umask, os.getcwd(), sys.argv, sys.path[:], sys.stdout, sys.stderr),
        "environment": dict(os.environ),
        "jax": dict(jax.config.values),
        "warnings": warnings.filters[:],
    }

said = []
class Listener(logging.Handler):
    def emit(self, record):
        said.append(record.name)

logging.getLogger().handlers = [Listener()]  # as a program of a user may do
logging.getLogger().setLevel(logging.INFO)
before = traces()
work, errors = sys.argv[1], []

def call():
    try:
        changes = {"num_steps": 2, "length": 32, "optimizer.warmup": 1}
        jaxlm.run_pretraining("debug/gpt", run=f"{work}/quiet", store=f"{work}/stores/books", changes=changes)
    except BaseException as error:
        errors.append(error)

thread = threading.Thread(target=call)  # where signal handlers cannot be set
thread.start()
thread.join()
assert not errors, errors
after = traces()
for name in before:
    assert before[name] == after[name], (name, before[name], after[name])
assert any(name.startswith("jaxlm") for name in said) and "absl" not in said, said
"""


def test_calls_leave_no_trace_in_the_process(work):
    """Fails when `import jaxlm` imports jax, or when a call, in a thread, changes signal handlers, logging, hooks,
    settings of JAX, the environment or warnings, or prints, or logs Orbax's messages among its own.
    """
    ended = subprocess.run(
        [sys.executable, "-c", TRACES, str(work)],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env=os.environ | {"JAX_COMPILATION_CACHE_DIR": str(user_cache() / "xla"), "XLA_FLAGS": xla_flags()},
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    assert (ended.stdout, ended.stderr) == ("", "")
