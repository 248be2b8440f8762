"""Output files that are continued: for every byte at which a process may have been killed."""

import json

import pytest

from jaxlm.errors import InputError
from jaxlm.inference.answers import ResumableOutput, settings_file

PROMPTS = ["The cat", "naïve", "The cat"]
SETTINGS = {"run": "/r@7", "temperature": 0.5, "stop": ["a"]}


def answers(prompt):
    return [{"prompt": prompt, "sample": k, "text": f"{prompt} \u2028 {k}"} for k in range(2)]


def answered(path, prompts=PROMPTS, settings=SETTINGS):
    """The prompts that were answered now."""
    with ResumableOutput(path, prompts, settings, per_prompt=2) as output:
        missing = list(prompts)[output.done :]
        for prompt in missing:
            output.write(answers(prompt))
    return missing


def test_a_file_is_continued_from_every_byte(tmp_path):
    """Fails when a line or a sample is lost or comes twice, or when a whole answer is made again."""
    path = tmp_path / "out.jsonl"
    assert answered(path) == PROMPTS
    whole = path.read_bytes()
    lines = whole.decode().split("\n")[:-1]
    assert [json.loads(line) for line in lines] == [answer for prompt in PROMPTS for answer in answers(prompt)]
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        assert answered(path) == PROMPTS[whole[:size].count(b"\n") // 2 :]
        assert path.read_bytes() == whole


def test_further_prompts_are_added(tmp_path):
    """Fails when a longer file of prompts counts as another one."""
    answered(tmp_path / "out.jsonl", PROMPTS[:2])
    assert answered(tmp_path / "out.jsonl") == PROMPTS[2:]


@pytest.mark.parametrize(
    ("prompts", "settings", "rule"),
    [
        (PROMPTS, SETTINGS | {"temperature": 1.0}, "made with --temperature 0.5 instead of 1.0; name another file"),
        (PROMPTS, SETTINGS | {"seed": 1}, "made with --seed null instead of 1; name another file"),
        (PROMPTS, {"run": "/r@7"}, r"made with --temperature 0.5 instead of null; name another file"),
        (PROMPTS[:2], SETTINGS, "--prompts must begin with the prompts of .*out.jsonl, got 2 and the file has more"),
        (["The cat", "The dog", "The cat"], SETTINGS, "line 3 must be of prompt 2 of --prompts, got another"),
    ],
)
def test_the_file_of_other_settings_or_prompts_is_refused(tmp_path, prompts, settings, rule):
    """Fails when samples of two settings end up in one file, or the refused file is changed."""
    path = tmp_path / "out.jsonl"
    answered(path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(InputError, match=rule):
        answered(path, prompts, settings)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_file_of_something_else_is_refused(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text("my notes\n")
    with pytest.raises(InputError, match=r"must be a new file or .* without a readable out.jsonl.settings"):
        answered(path)
    settings_file(path).write_text(json.dumps(SETTINGS))
    with pytest.raises(InputError, match="line 1 must be of prompt 1"):
        answered(path)
    assert path.read_text() == "my notes\n"
    with pytest.raises(InputError, match=r"--output .*No such file or directory"):
        answered(tmp_path / "none" / "out.jsonl")
