"""The command `jaxlm.generate`: files of prompts, an output that is continued, streaming, names of other programs."""

import io
import json

import pytest
import toy_encoder
import toy_run
from toy_runs import assert_one_line, run_here

from jaxlm import generate
from jaxlm.distributed import devices
from jaxlm.inference.strategies import Sampler

pytestmark = pytest.mark.usefixtures("two_devices")

PROMPTS = ["The cat", "naïve", "A", "In the tree", "on"]
SETTINGS = ["--length", 6, "--num-samples", 2, "--batch-size", 2, "--repetition-penalty", 1.3, "--seed", 3]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    return toy_run.pretrained(directory / "r", toy_run.toy_store(directory / "s", toy_run.toy_tokenizer()))


@pytest.fixture(autouse=True)
def no_compilation_cache(monkeypatch):
    """Nothing is written to the user's cache folder."""
    monkeypatch.setattr(devices, "prepare_process", lambda: None)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The prompts as lines of text, and as JSONL."""
    directory = tmp_path_factory.mktemp("prompts")
    (directory / "p.txt").write_text("\n".join(PROMPTS[:2]) + "\n\n" + "\n".join(PROMPTS[2:]), encoding="utf-8")
    (directory / "p.jsonl").write_text("".join(json.dumps({"id": 1, "prompt": one}) + "\n" for one in PROMPTS))
    return directory


def test_a_killed_command_continues_its_output(run, files, tmp_path, monkeypatch):
    """Fails when a sample depends on where a run was killed, or when what is complete is generated again."""
    out = tmp_path / "out.jsonl"
    words = ["--run", run, "--output", out, *SETTINGS]
    ended = run_here("generate", *words, "--prompts", files / "p.txt")
    assert ended.code == 0 and not ended.output, ended.errors
    whole = out.read_bytes()
    samples = [json.loads(line) for line in whole.decode().splitlines()]
    assert [(one["prompt"], one["sample"]) for one in samples] == [(one, k) for one in PROMPTS for k in range(2)]
    assert all(one["text"].endswith(one["generated"]) and len(one["tokens"]) <= 6 for one in samples)
    out.write_bytes(whole[: len(b"".join(whole.splitlines(keepends=True)[:7])) + 9])  # three prompts, one and a half
    assert run_here("generate", *words, "--prompts", files / "p.jsonl").code == 0
    assert out.read_bytes() == whole
    with monkeypatch.context() as patched:
        patched.setattr(Sampler, "_tokens", lambda *_: pytest.fail("generated again"))
        assert run_here("generate", *words, "--prompts", files / "p.jsonl").code == 0
    refused = run_here("generate", *words, "--prompts", files / "p.txt", "--top-k", 4)
    assert_one_line(refused, 2, "--output must be a file of the same settings", "--top-k 0 instead of 4")
    assert out.read_bytes() == whole
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("\n".join(PROMPTS).encode())))
    assert run_here("generate", *words).code == 0  # one at a time, and the file is made anew
    assert [json.loads(line)["tokens"] for line in out.read_text().splitlines()] == [one["tokens"] for one in samples]
    assert [file.name for file in tmp_path.iterdir()] == ["out.jsonl"]


class Terminal(io.StringIO):
    """Standard output that is a terminal, or not, and keeps each write."""

    def __init__(self, *, isatty: bool) -> None:
        super().__init__()
        self.writes: list[str] = []
        self.isatty = lambda: isatty

    def write(self, text: str) -> int:
        self.writes.append(text)
        return super().write(text)


def test_a_terminal_shows_the_text_while_it_is_generated(run, monkeypatch):
    """Fails when a terminal waits for the whole text, or a file gets it in parts."""
    shown = {}
    for name, isatty, words in (("terminal", True, []), ("file", False, []), ("asked", False, ["--stream"])):
        shown[name] = Terminal(isatty=isatty)
        monkeypatch.setattr("sys.stdout", shown[name])
        monkeypatch.setattr("sys.argv", ["program", "--run", str(run), "--prompt", "The cat", "--length", "10", *words])
        generate.main()
    assert shown["file"].writes[1:] == ["\n"] and len(shown["terminal"].writes) > 6
    assert shown["terminal"].getvalue() == shown["file"].getvalue() == shown["asked"].getvalue()
    assert shown["asked"].writes == shown["terminal"].writes


def test_an_encoder_fills_a_file(tmp_path):
    """Fails when the blanks of a later prompt depend on where a command was killed."""
    run = toy_encoder.pretrained(tmp_path / "run", toy_encoder.write_vocabulary(tmp_path))
    (tmp_path / "p.txt").write_text("ba [MASK] bi.\n[MASK] bo\n")
    words = ["--run", run, "--prompts", tmp_path / "p.txt", "--output", tmp_path / "out.jsonl", "--top", 2]
    assert run_here("generate", *words).code == 0
    whole = (tmp_path / "out.jsonl").read_text()
    assert [len(json.loads(line)["fillings"][0]) for line in whole.splitlines()] == [2, 2]
    (tmp_path / "out.jsonl").write_text(whole[:-9])
    assert run_here("generate", *words).code == 0 and (tmp_path / "out.jsonl").read_text() == whole


@pytest.mark.parametrize(
    ("words", "fragment"),
    [
        (["--max-new-tokens", 5], "--max-new-tokens is not an option; did you mean --length?"),
        (["--max_length=5"], "--max_length is not an option; did you mean --length, the number of new tokens?"),
        (["--num-beams", 5], "did you mean --beams?"),
        (["--do-sample"], "did you mean --temperature, which is 0 without sampling?"),
        (["--prompt", "a", "--prompts", "b.txt"], "--prompts must be given without --prompt"),
        (["--stream", "--prompts", "b.txt"], "--stream must be given without --prompts"),
        (["--stream", "--num-samples", 2], "--stream must be given without --prompts and with one sample"),
        (["--stream", "--beams", 2], "--stream must be given without --beams, got --beams 2"),
        (["--prompts", "b.csv"], "--prompts must be a .txt or .jsonl file, got b.csv"),
        (["--prompts", "none.txt"], "none.txt cannot be read: No such file or directory"),
        (["--prompts", "empty.txt"], "--prompts must have at least one prompt, got none in empty.txt"),
        (["--prompts", "bad.jsonl"], "bad.jsonl line 1 has no field 'prompt'; its fields are text; add it"),
    ],
)
def test_wrong_usage_is_one_line(words, fragment, tmp_path, monkeypatch):
    """Fails when the error comes after the run was opened (there is none), or is not one line."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n')
    assert_one_line(run_here("generate", "--run", "none", *words), 2, fragment)
