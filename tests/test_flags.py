"""Help texts: titles, optional flags, line breaks, and example rows that can be read."""

import dataclasses
import json
import re

import pytest
from toy_runs import run_here

from jaxlm.flags import field_help, fields_of, reflowed
from jaxlm.tasks import KINDS, CustomConfig, read_task


@pytest.fixture(scope="module")
def text():
    """The help of a fine-tuning config at 100 columns."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "100")
        ended = run_here("finetune", "debug/finetune_gpt", "--help")
    assert ended.code == 0 and not ended.errors
    return ended.output


def entry(text, flag):
    """The lines of a flag, joined."""
    lines = [line.strip(" │|") for line in text.splitlines()]
    at = next(k for k, line in enumerate(lines) if line.split()[:1] == [flag])
    end = next(k for k in range(at + 1, len(lines)) if lines[k].startswith("--") or not lines[k])
    return " ".join(lines[at:end])


def test_groups_and_optional_flags_read_well(text):
    """Fails on 2968321: `options options`, `{None}|STR`, and lines broken where the source breaks them."""
    assert "options options" not in text and "task options" in text and "{None}" not in text
    assert entry(text, "--task-dir").startswith("--task-dir STR Directory of") and "(optional)" in text
    assert entry(text, "--transfer-layers").endswith("(GPT-1's figure 2). Default: all.")
    assert "Default" in entry(text, "--start") and "(optional)" not in entry(text, "--start")
    assert "(default: 0.003)" in entry(text, "--optimizer.peak-lr")  # the config's own
    assert max(map(len, text.splitlines())) <= 100
    paragraphs = [line for line in field_help(CustomConfig)["kind"].splitlines() if line and not line.startswith(" ")]
    assert len(paragraphs) == 2 and len(paragraphs[1]) > 200


def test_every_flag_has_a_help_text():
    from jaxlm.finetuning.arguments import FinetuneArguments
    from jaxlm.training.pretraining import PretrainArguments

    for kind in (FinetuneArguments, PretrainArguments):
        hidden = {name for name, _ in fields_of(kind) if name.rpartition(".")[2] in ("kind", "layout")}
        names = {name for name, _ in fields_of(kind)} - hidden
        assert {"seed", "optimizer.beta1", "distributed.num_processes", "mesh.data"} <= names
    assert not [field.name for field in dataclasses.fields(CustomConfig) if not field_help(CustomConfig)[field.name]]


def test_without_a_config_the_help_names_one():
    """Fails on 2968321: the help without a config hid the model's flags, and nothing named `CONFIG --help`."""
    ended = run_here("pretrain", "--help")
    assert ended.code == 0 and "jaxlm.pretrain pretrain/gpt1 --help` lists all flags" in " ".join(ended.output.split())
    for words in ((), ("--run", "x")):
        ended = run_here("pretrain", *words)
        assert ended.code == 2 and "name a config, for example pretrain/gpt1" in ended.errors


def test_paragraphs_are_joined_and_examples_keep_their_lines():
    assert reflowed("One\n    two.\n\n    Three:\n      a  b\n      c\n    ") == "One two.\n\nThree:\n  a  b\n  c"


def test_the_rows_in_the_help_are_read(tmp_path):
    """Fails when an example of the help is not a row of its kind, or a kind has no example."""
    found = re.findall(r"^  (\w+) +({.*})$", field_help(CustomConfig)["kind"], flags=re.MULTILINE)
    assert {kind for kind, _ in found} == set(KINDS)
    for kind, row in found:
        other = {"label": "other"} if kind == "classification" else {"label": "b"} if kind == "choice" else {}
        rows = [json.loads(row), json.loads(row) | other]
        (tmp_path / f"{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        names = {"text": "text", "label": "label"} if "label" in rows[0] else {}
        if kind == "choice":
            names |= {"choices": ("a", "b")}
        file = str(tmp_path / f"{kind}.jsonl")
        task, data = read_task("custom", None, CustomConfig(kind=kind, train=file, dev=file, **names))
        assert task.kind == kind and len(data.splits["train"].examples) == 2
