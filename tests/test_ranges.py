"""The ranges of the fields of every config and command: each number outside is refused, wherever it comes from."""

import dataclasses
import importlib
import math
import os
import subprocess
import sys
import typing
from pathlib import Path

import pytest
from paths import REPOSITORY

import jaxlm
from jaxlm.__main__ import COMMANDS
from jaxlm.errors import InputError
from jaxlm.evaluation.arguments import Harness
from jaxlm.flags import unmarked
from jaxlm.inference.arguments import GenerationSettings
from jaxlm.ranges import checked, ranges_of, typed_fields
from jaxlm.training.config import PretrainConfig

GOLDEN = Path(__file__).parent / "golden" / "ranges.txt"


def dataclasses_in(kind: typing.Any) -> list[type]:
    """All dataclasses in a type: itself, members of its unions, and those of its fields."""
    kind = unmarked(kind)
    if not dataclasses.is_dataclass(kind):
        return [found for part in typing.get_args(kind) for found in dataclasses_in(part)]
    return [kind, *(found for _, hint in typed_fields(kind) for found in dataclasses_in(hint))]


def _all() -> list[type]:
    commands = [importlib.import_module(f"jaxlm.{name}") for name in COMMANDS]
    kinds = [kind for command in commands for kind in getattr(command, "ARGUMENTS", ())]
    return list(dict.fromkeys(found for kind in [*kinds, Harness] for found in dataclasses_in(kind)))


# (dataclass, field, range)
RANGES = [(kind, name, limits) for kind in _all() for name, hint in typed_fields(kind) for limits in ranges_of(hint)]


def with_value(kind: type, name: str, value) -> typing.Any:
    """A dataclass with a value of one field, in a tuple if the field is one; its required fields have no number."""
    hint = unmarked(dict(typed_fields(kind))[name])
    required = [
        field.name
        for field in dataclasses.fields(kind)
        if field.default is field.default_factory is dataclasses.MISSING
    ]
    given = (value,) if typing.get_origin(hint) is tuple else value
    return kind(**dict.fromkeys(required, "") | {name: given})


def test_the_ranges_are_those_of_the_table(update_golden):
    """Fails when a field loses its range, or another range would refuse the config of a run."""
    found = "".join(sorted({f"{kind.__name__}.{name}: {limits}\n" for kind, name, limits in RANGES}))
    if update_golden:
        GOLDEN.write_text(found)
    assert found == GOLDEN.read_text(), "run with --update-golden"


@pytest.mark.parametrize(("kind", "name", "limits"), RANGES, ids=lambda one: getattr(one, "__name__", str(one)))
def test_numbers_outside_of_a_range_are_refused(kind, name, limits):
    """Fails when a number beyond a bound, or one that is not finite, is accepted, or a bound itself is refused."""
    step = 1 if "int" in str(unmarked(dict(typed_fields(kind))[name])) else 1e-6
    outside = [limits.least - step if limits.least is not None else limits.above, math.nan, math.inf, -math.inf]
    outside += [limits.most + step] if limits.most is not None else []
    outside += [limits.below] if limits.below is not None else []
    inside = [limits.above + step if limits.least is None else limits.least]
    inside += [bound for bound in (limits.most, limits.below and limits.below - step) if bound is not None]
    for value in inside:
        checked(with_value(kind, name, value))
    for value in outside:
        rule = f" must be {limits}, got " if math.isfinite(value) else " must be finite, got "
        with pytest.raises(InputError) as caught:
            checked(with_value(kind, name, value), "part")
        assert rule in str(caught.value) and "; " in str(caught.value) and "\n" not in str(caught.value)
        assert str(caught.value).startswith("part.") and name in str(caught.value)


def test_floats_without_a_range_are_finite():
    for settings in (GenerationSettings(length_penalty=math.nan, beams=2), PretrainConfig(spike_factor=math.inf)):
        with pytest.raises(InputError, match="must be finite"):
            settings.check()
    assert checked(GenerationSettings(stop=("a",))).stop == ("a",)


REFUSED = [
    ("prepare --source text:x --tokenizer bytes --output o --unit-bytes 0", "--unit-bytes must be at least 1, got 0"),
    ("pretrain debug/gpt --run r --optimizer.beta2 1", "--optimizer.beta2 must be at least 0 and below 1, got 1.0"),
    ("pretrain debug/gpt --run r --data.weights 0", "--data.weights must be above 0, got 0.0; leave out a store"),
    (
        "pretrain debug/bert --run r --objective.masking.rate 0",
        "--objective.masking.rate must be above 0 and at most 1",
    ),
    ("pretrain zero.py --run r", "--batch-size must be at least 1, got 0"),
    ("finetune debug/finetune_gpt --run r --task cola --learning-rates -1", "--learning-rates must be at least 0, got"),
    ("finetune debug/finetune_bert --run r --task cola --seed -1", "--seed must be from 0 to 4294967295, got -1"),
    ("generate --run r --top-p 2", "--top-p must be above 0 and at most 1, got 2.0; give 1 for all tokens"),
    ("evaluate perplexity --run r --cache.window -1", "--cache.window must be at least 0, got -1; give 0 for no cache"),
    ("evaluate zero-shot --run r --task cola:x --sample 0", "--sample must be at least 1, got 0"),
    ("evaluate harness --run r --batch-size 0", "--batch-size must be at least 1, got 0"),
    ("show --task cola --options.stride 0", "--options.stride must be at least 1, got 0"),
    ("predict --run r --input x --top-k 0", "--top-k must be at least 1, got 0"),
    ("aot debug/gpt --slices 0", "--slices must be at least 1, got 0"),
    ("bench debug/gpt --warmup -1", "--warmup must be at least 0, got -1"),
]
WITHOUT_JAX = """
import importlib, sys
sys.modules["jax"] = None
from jaxlm.errors import run_command
for words in sys.argv[1:]:
    sys.argv = words.split()
    try:
        run_command(importlib.import_module(f"jaxlm.{sys.argv[0]}").main)
    except SystemExit as end:
        print("exit", end.code, file=sys.stderr)
"""
CONFIG = """
import dataclasses
from jaxlm.config import load_config


def config():
    return dataclasses.replace(load_config("debug/gpt", object), batch_size=0)
"""


def test_a_command_refuses_them_before_jax_is_imported(tmp_path):
    """Fails when a flag or a value of a config file is checked after seconds of imports, or by no name or code."""
    (tmp_path / "zero.py").write_text(CONFIG)
    words = [sys.executable, "-c", WITHOUT_JAX, *(line for line, _ in REFUSED)]
    path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    ended = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path})
    lines = ended.stderr.splitlines()
    assert len(lines) == 2 * len(REFUSED), ended.stderr
    for (line, said), error, code in zip(REFUSED, lines[::2], lines[1::2], strict=True):
        assert error.startswith(f"error: {said}") and code == "exit 2", (line, error, code)
    assert [path.name for path in tmp_path.iterdir()] == ["zero.py"]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: jaxlm.run_pretraining("debug/gpt", run="r", changes={"batch_size": 0}),
            "batch_size must be at least 1",
        ),
        (lambda: jaxlm.prepare_store("text:*", tokenizer="bytes", output="o", weights=[0]), "weights must be above 0"),
        (
            lambda: jaxlm.run_finetuning("finetune/gpt1", run="r", task="cola", seeds=0),
            "seeds must be at least 1, got",
        ),
        (lambda: jaxlm.evaluate_perplexity("r", changes={"cache.theta": -1}), "cache.theta must be at least 0, got -1"),
        (
            lambda: jaxlm.evaluate_zero_shot("r", task="cola:x", changes={"sample": 0}),
            "sample must be at least 1, got 0",
        ),
    ],
)
def test_a_call_refuses_them(call, said, tmp_path, monkeypatch):
    """Fails when a function begins its work with a number that its command would refuse."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=f"^{said}"):
        call()
    assert not list(tmp_path.iterdir())
