"""`jaxlm.doctor`: what it finds on a sound machine, and that each thing that is wrong is said and ends it with 1."""

import importlib.metadata
import socket

import jax.numpy as jnp
import pytest
import toy_run
from toy_runs import Process, run_here

from jaxlm import doctor


def lines(ended) -> dict[str, list[str]]:
    """What stands behind each check's name, its mark first."""
    found: dict[str, list[str]] = {}
    for line in ended.output.splitlines()[:-1]:
        found.setdefault(line[4:18].strip(), []).append(f"{line[:2]} {line[19:]}")
    return found


@pytest.fixture(autouse=True)
def no_compilation_cache(monkeypatch):
    monkeypatch.setattr(doctor, "prepare_process", lambda: None)


def test_a_sound_machine_is_ready(tmp_path):
    store = toy_run.toy_store(tmp_path / "store", toy_run.toy_tokenizer())
    ended = run_here("doctor", "debug/gpt", "--data.store", store.path, "--batch-size", 16, "--mesh.fsdp", 2)
    assert ended.code == 0, ended
    found = lines(ended)
    assert ended.output.splitlines()[-1] == "ready"
    assert found["devices"] == ["ok 8 x cpu (cpu), 8 of them here"] and found["interconnect"] == ["ok 8 devices add up"]
    assert "every checksum is right" in found["store"][0] and "data 4, fsdp 2, tensor 1" in found["config"][0]
    assert {"versions", "processes", "attention", "memory", "disk", "cache", "state", "host memory"} <= found.keys()


def test_a_damaged_store_and_a_batch_that_does_not_fit_are_said(tmp_path):
    store = toy_run.toy_store(tmp_path / "store", toy_run.toy_tokenizer())
    tokens = store.path / "tokens.bin"
    content = bytearray(tokens.read_bytes())
    content[7] ^= 1
    tokens.write_bytes(content)
    ended = run_here("doctor", "debug/gpt", "--data.store", store.path, "--batch-size", 16)
    assert ended.code == 1 and ended.output.splitlines()[-1] == "1 of these must be mended"
    assert lines(ended)["store"][0].startswith("!! ") and "is damaged" in lines(ended)["store"][0]
    ended = run_here("doctor", "debug/gpt", "--batch-size", 12)
    assert ended.code == 1 and "batch_size 12 is not divisible" in lines(ended)["config"][0]


def test_attention_that_is_off_is_said(monkeypatch):
    monkeypatch.setattr(doctor, "attend", lambda q, k, v, **options: jnp.zeros_like(q))
    ended = run_here("doctor")
    assert ended.code == 1 and lines(ended)["attention"][0].startswith("!! xla in float32 is ")


def test_versions_that_were_not_tested_are_said(monkeypatch):
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.4.1" if name == "optax" else real(name))
    monkeypatch.setattr(
        importlib.metadata, "requires", lambda name: ["optax>=9", "nothing-such>=1", "jax; extra == 'x'"]
    )
    ended = run_here("doctor")
    (said,) = lines(ended)["versions"]
    assert ended.code == 1 and said.startswith("!! optax 0.4.1 is not >=9; nothing-such is missing: launch/setup.sh")


def test_a_check_that_breaks_is_wrong_and_the_others_go_on(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: 1 / 0)
    ended = run_here("doctor")
    assert ended.code == 1 and lines(ended)["machine"] == ["!! ZeroDivisionError: division by zero"]
    assert lines(ended)["attention"][0].startswith("ok")


@pytest.mark.slow
def test_a_process_with_another_command_is_named(tmp_path):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    several = ["--distributed.coordinator", address, "--distributed.num-processes", 2, "--distributed.process-id"]
    processes = [
        Process("doctor", "debug/gpt", *several, k, *(["--seed", 1] if k else []), log=tmp_path / f"log-{k}", devices=4)
        for k in range(2)
    ]
    ended = [process.ended() for process in processes]
    found = lines(ended[0])
    assert found["devices"] == ["ok 8 x cpu (cpu), 4 of them here"] and found["interconnect"] == ["ok 8 devices add up"]
    assert found["processes"][0].startswith("!! process [1] has other versions or another command"), ended
    assert [one.code for one in ended] == [1, 1]
