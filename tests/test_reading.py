"""Files of other programs are read within bounds: nested JSON, pipes and devices, absurd sizes.

Fails when one of them ends in a traceback, is waited for, or is read without end.
"""

import json
import os
from pathlib import Path

import pytest

from jaxlm.data.sources import read_jsonl
from jaxlm.data.store import open_store
from jaxlm.errors import InputError
from jaxlm.files import open_regular, parse_json, read_own, read_regular
from jaxlm.inference.loaded_run import saved_task
from jaxlm.inference.token_outputs import read_ids
from jaxlm.interop.files import read_object
from jaxlm.models.gpt import GPTConfig
from jaxlm.runs.directory import RunDirectory
from jaxlm.tasks import TASKS
from jaxlm.tasks.datasets.choices import read_race
from jaxlm.tasks.kinds.spans import read_questions
from jaxlm.text.bpe import read_vocabulary

NESTED = "[" * 1_000_000


def _race(path: Path):
    (path / "high").mkdir()
    (path / "high" / "1.txt").write_text(NESTED)
    return read_race(path, TASKS["race"], labelled=True)


READERS = {
    "config.json": read_object,
    "ids.json": lambda file: read_ids(file, GPTConfig()),
    "description.json": lambda file: open_store(file.parent),
    "rows.jsonl": lambda file: list(read_jsonl(file, "text")),
    "dev.json": lambda file: read_questions(file, TASKS["squad"], labelled=True),
    "RACE": lambda file: _race(file.parent),
    "encoder.json": lambda file: read_vocabulary(file.read_bytes(), str(file)),
    "config.json of a run": lambda file: RunDirectory(file.rename(file.with_name("config.json")).parent).config,
    "task.json": lambda file: saved_task(RunDirectory(file.parent)),
    "results.json": read_own,
}


@pytest.mark.parametrize("name", READERS)
def test_nested_json_is_refused_by_name(tmp_path, name):
    """Fails on 2968321: seven of the nine readers end in a RecursionError."""
    (tmp_path / name).write_text(NESTED)
    with pytest.raises(InputError, match=r"nested too deeply") as found:
        READERS[name](tmp_path / name)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("content", ["[]", "7", '"text"', "null"])
def test_json_of_another_kind_is_refused_by_name(tmp_path, content):
    """Fails on 2968321: a TypeError or an AttributeError."""
    for name, read in (("config.json", lambda run: run.config), ("task.json", saved_task)):
        (tmp_path / name).write_text(content)
        with pytest.raises(InputError, match=f"{name} cannot be read: it is not a JSON object; put it back"):
            read(RunDirectory(tmp_path))


def test_pipes_and_devices_are_not_read(tmp_path):
    """Fails on 2968321: a pipe as config.json is waited for, and /dev/zero read until the memory ends."""
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(InputError, match=r"config.json cannot be read \(not a regular file\)"):
        read_object(tmp_path / "config.json")
    for file in (tmp_path / "config.json", Path("/dev/zero"), Path("/dev/null")):
        with pytest.raises(OSError, match="not a regular file"):
            open_regular(file)


def test_a_file_larger_than_the_limit_is_not_read(tmp_path):
    file = tmp_path / "big.json"
    file.write_text(json.dumps([1] * 10))
    assert parse_json(read_regular(file)) == [1] * 10
    with pytest.raises(OSError, match="larger than 20 bytes"):
        read_regular(file, 20)
    with file.open("wb") as hole:  # no blocks on the disk
        hole.truncate(1 << 40)
    with pytest.raises(InputError, match="larger than"):
        read_object(file)
