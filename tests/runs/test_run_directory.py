"""The run directory: whose it is, one writer at a time, and what it remembers of its starts.

Fails when another config trains over a run, when two programs write in one directory, or when an error is not one line.
"""

import errno
import fcntl
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from paths import REPOSITORY

from jaxlm import __version__
from jaxlm.data.plan import locked
from jaxlm.errors import InputError
from jaxlm.files import write_json
from jaxlm.runs import directory
from jaxlm.runs.config import upgraded
from jaxlm.runs.directory import RunDirectory, split_start
from jaxlm.text import load_tokenizer, train_sentencepiece

CONFIG = {"model": {"width": 32, "rates": (0.1, 0.2)}, "mesh": {"fsdp": 1}, "log_every": 10, "seed": 0}
RUN_FIELDS = ("mesh.*", "*_every")


def one_line(caught) -> str:
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_creates_and_goes_on_with_the_same_config(tmp_path):
    for _ in range(2):
        with RunDirectory(tmp_path / "a" / "run") as run:
            assert run.open(CONFIG, run_fields=RUN_FIELDS) == []
    assert json.loads((run.path / "config.json").read_text()) == {"jaxlm": __version__} | run.config
    assert run.config == json.loads(json.dumps(CONFIG))


def test_a_run_of_a_later_release_is_refused(tmp_path):
    """Fails when a config whose fields may mean something else is read, or a patch release or a damaged version is."""
    with RunDirectory(tmp_path / "run") as run:
        run.open(CONFIG)
    file = tmp_path / "run" / "config.json"
    saved = json.loads(file.read_text())
    major, minor, _ = map(int, __version__.split("."))
    for version, refused in (
        (f"{major}.{minor}.99", None),
        ("0.0.3", None),
        (f"{major}.{minor + 1}.0", f"must be a run of jaxlm {__version__} or earlier, got one of a later release"),
        (f"{major + 1}.0rc1", "install that version"),
        ("soon", "jaxlm must be a version such as"),
        (7, "got 7; put it back from a copy"),
    ):
        file.write_text(json.dumps(saved | {"jaxlm": version}))
        if refused is None:
            assert RunDirectory(tmp_path / "run").config == run.config
            continue
        with pytest.raises(InputError) as caught:
            RunDirectory(tmp_path / "run").open(CONFIG)
        assert refused in one_line(caught)
        assert json.loads(file.read_text())["jaxlm"] == version


def test_run_fields_may_change_and_identity_may_not(tmp_path):
    with RunDirectory(tmp_path) as run:
        run.open(CONFIG, run_fields=RUN_FIELDS)
    changed = CONFIG | {"mesh": {"fsdp": 4}, "log_every": 20}
    with RunDirectory(tmp_path) as run:
        assert run.open(changed, run_fields=RUN_FIELDS) == ["log_every: 10 -> 20", "mesh.fsdp: 1 -> 4"]
        assert run.config["mesh"] == {"fsdp": 4}
    other = changed | {"model": {"width": 64, "rates": (0.1, 0.3)}, "seed": 1, "length": 512}
    with pytest.raises(InputError) as caught:
        RunDirectory(tmp_path).open(other, run_fields=RUN_FIELDS)
    message = one_line(caught)
    for difference in (
        "model.width: 32 -> 64",
        "model.rates: [0.1, 0.2] -> [0.1, 0.3]",
        "seed: 0 -> 1",
        "length: absent -> 512",
    ):
        assert difference in message
    assert "log_every" not in message
    assert RunDirectory(tmp_path).config["seed"] == 0  # the refused config changed nothing


def test_other_sentinels_than_those_of_the_run_are_refused(tmp_path):
    """The fingerprint of a tokenizer leaves sentinels out. Fails when a resumed run goes on with others."""
    tokenizer = train_sentencepiece(["the cat sat on the mat"] * 9, 270)
    with RunDirectory(tmp_path) as run:
        run.open(CONFIG)
        run.save_tokenizer(tokenizer.with_sentinels(10))
        run.save_tokenizer(tokenizer.with_sentinels(10))
        with pytest.raises(
            InputError, match=rf"must have the 10 sentinels of {tmp_path}/tokenizer, got 100;"
        ) as caught:
            run.save_tokenizer(tokenizer.with_sentinels(100))
        one_line(caught)
        assert len(load_tokenizer(run.tokenizer).sentinels) == 10


def test_a_run_of_an_earlier_version_goes_on_without_the_fields_it_lacks(tmp_path):
    """Fails when a field that config.json has had since reads as another config, or is added to an old run."""
    old = json.loads(json.dumps({"kind": "finetuning"} | CONFIG))
    with RunDirectory(tmp_path) as run:
        run.open(old)
    now = old | {"special_tokens": "gpt1"}
    with RunDirectory(tmp_path) as run:
        assert run.open(now | {"log_every": 20}, run_fields=RUN_FIELDS) == ["log_every: 10 -> 20"]
        assert "special_tokens" not in run.config and run.config["log_every"] == 20
        run.check_config(now | {"log_every": 20}, "checkpoint 3", ())  # as it was saved since: fails on 1b50e09
        with pytest.raises(InputError, match="config.json: seed must be 1, as in checkpoint 3, got 0"):
            run.check_config(now | {"seed": 1}, "checkpoint 3", RUN_FIELDS)
    with pytest.raises(InputError, match='special_tokens: absent -> "end"'):
        RunDirectory(tmp_path).open(now | {"special_tokens": "end"})


def test_a_run_of_another_kind_is_refused(tmp_path):
    with RunDirectory(tmp_path) as run:
        run.open({"kind": "pretraining"} | CONFIG)
    with pytest.raises(InputError, match="holds a pretraining run, this is a finetuning run"):
        RunDirectory(tmp_path).open({"kind": "finetuning"} | CONFIG)


def test_a_directory_with_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("words")
    with pytest.raises(InputError, match="got other files .thesis.tex."):
        RunDirectory(tmp_path).open(CONFIG)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["thesis.tex"]
    with pytest.raises(InputError, match="--run must be a directory, got the file .*thesis.tex; choose another"):
        RunDirectory(tmp_path / "thesis.tex").open(CONFIG)


def test_what_an_early_kill_leaves_is_no_hindrance(tmp_path):
    for name in ("lock", "config.json.tmp", "output.log", ".DS_Store"):
        (tmp_path / name).write_text("")
    with RunDirectory(tmp_path) as run:
        run.open(CONFIG)
    assert run.config["seed"] == 0


def test_a_missing_or_damaged_config_is_one_line(tmp_path):
    with pytest.raises(InputError, match="is not a run directory"):
        RunDirectory(tmp_path).config  # noqa: B018
    (tmp_path / "config.json").write_text('{"seed": ')
    with pytest.raises(InputError, match="config.json cannot be read") as caught:
        RunDirectory(tmp_path).config  # noqa: B018
    one_line(caught)
    with pytest.raises(InputError, match="config.json cannot be read"):
        RunDirectory(tmp_path).open(CONFIG)


def test_two_programs_cannot_train_one_run(tmp_path):
    program = (
        "import sys\nfrom jaxlm.runs.directory import RunDirectory\n"
        "RunDirectory(sys.argv[1]).open({'seed': 0})\nprint('open', flush=True)\nsys.stdin.read()"
    )
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(
        [sys.executable, "-c", program, tmp_path],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "open\n"
        with pytest.raises(InputError, match=f"is in use by process {process.pid} on ") as caught:
            RunDirectory(tmp_path).open({"seed": 0})
        one_line(caught)
        assert RunDirectory(tmp_path).config == {"seed": 0}  # reading needs no lock
        process.kill()
        process.wait()
    with RunDirectory(tmp_path) as run:  # a killed program's lock is gone with it
        assert run.open({"seed": 0}) == []
        with pytest.raises(InputError, match="is in use by process"):
            RunDirectory(tmp_path).open({"seed": 0})


def test_starts_are_remembered(tmp_path):
    with RunDirectory(tmp_path) as run:
        run.open(CONFIG)
        assert run.starts() == []
        run.record_start(started_from=None)
        with (tmp_path / "starts.jsonl").open("a") as file:
            file.write('{"time": "2')  # killed while it wrote
        run.record_start(started_from="resumed at step 50", mesh={"data": 8})
        first, second = run.starts()
    assert first["started_from"] is None and second["started_from"] == "resumed at step 50"
    assert second["mesh"] == {"data": 8}
    assert first["devices"]["count"] == 8 and first["devices"]["cpu_cores"] >= 1
    assert first["versions"]["jax"] and first["versions"]["python"].startswith("3.")
    assert first["command"] == shlex.join(sys.orig_argv)
    assert set(first) >= {"time", "command", "commit", "versions", "devices", "started_from"}


def test_the_commit_says_whether_the_checkout_was_modified(tmp_path, monkeypatch):
    """Fails when a modified or a new source is not told from the commit, or an installed package has one."""
    package = tmp_path / "jaxlm"
    (package / "runs").mkdir(parents=True)
    monkeypatch.setattr(directory, "__file__", str(package / "runs" / "directory.py"))
    assert directory._commit() is None

    def git(*words):
        identity = ("-c", "user.name=one", "-c", "user.email=one@example.com", "-c", "commit.gpgsign=false")
        done = subprocess.run(["git", *identity, *words], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    source = package / "pretrain.py"
    source.write_text("one = 1\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    commit = git("rev-parse", "HEAD")
    assert directory._commit() == commit
    source.write_text("one = 2\n")
    assert directory._commit() == f"{commit}+"
    git("checkout", "-q", ".")
    assert directory._commit() == commit
    (package / "new.py").touch()
    assert directory._commit() == f"{commit}+"


@pytest.mark.parametrize("name", ["lock", "config.json", "starts.jsonl", "metrics.jsonl"])
def test_a_pipe_among_its_files_is_refused(tmp_path, name):
    """Fails on 2968321: what reads or appends to it waits for ever."""
    with RunDirectory(tmp_path) as run:
        run.open(CONFIG)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(InputError, match=rf"{name} must be a regular file"):
        RunDirectory(tmp_path).open(CONFIG)


def test_the_tokenizer_is_copied_whole_or_not_at_all(tmp_path):
    """And a copy that is damaged is written anew at the next start. Fails on 2968321: it stays, and nobody reads it."""
    sound, broken = (train_sentencepiece(["the cat sat on the mat"] * 9, 270) for _ in range(2))

    def save(directory: Path) -> None:
        directory.mkdir()
        (directory / "model").write_text("half")
        raise KeyboardInterrupt

    broken.save = save  # type: ignore[method-assign]
    with RunDirectory(tmp_path) as run:
        run.open(CONFIG)
        with pytest.raises(KeyboardInterrupt):
            run.save_tokenizer(broken)
        assert not run.tokenizer.exists()
        run.save_tokenizer(sound)
        run.save_tokenizer(broken)  # it is there: nothing is written again
        assert load_tokenizer(run.tokenizer).fingerprint == sound.fingerprint
        (run.tokenizer / "sentencepiece.model").write_bytes(b"damaged")
        run.save_tokenizer(sound)
        assert load_tokenizer(run.tokenizer).fingerprint == sound.fingerprint


def test_other_versions_than_at_the_last_start_are_told(tmp_path):
    """Fails when a run goes on with another compiler without a word, or when a package without a say is named."""
    with RunDirectory(tmp_path) as run:
        run.open(CONFIG)
        assert run.version_notes() == [], "there was no start"
        start = run.record_start(started_from=None)
        assert run.version_notes() == []
        assert start["versions"]["jax"] == jax.__version__ and start["versions"]["jaxlib"] == jax.lib.__version__
        start["versions"] |= {"jaxlib": "0.1", "grain": "0.1", "libtpu": "0.0.1", "jax-cuda13-plugin": "0.1"}
        with (run.path / "starts.jsonl").open("a") as stream:
            stream.write(json.dumps(start) + "\n")
        (said,) = run.version_notes()
    assert said.startswith(f"the versions differ from those of the last start: jaxlib 0.1 -> {jax.lib.__version__}")
    assert "last bits" in said and "grain" not in said and "cuda" not in said


def test_the_kernel_of_earlier_versions_is_that_of_today():
    """Fails when a run that named JAX's splash kernel cannot be opened."""
    found = upgraded({"execution": {"attention": "splash", "dropout_bits": "rbg", "unroll": 1}})
    assert found == {"execution": {"attention": "flash", "unroll": 1}}


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_a_run_of_an_earlier_version_says_that_its_dropout_masks_change(tmp_path, rate):
    """Fails if such a run is refused, or if one without dropout is told of masks."""
    earlier = {**CONFIG, "execution": {"dropout_bits": "rbg"}, "model": {"dropout_rate": rate}}
    with RunDirectory(tmp_path) as run:
        run.open(earlier)
        run.record_start(started_from=None)
    with RunDirectory(tmp_path) as run:
        assert run.open({**earlier, "execution": {}}) == []
        assert [note.partition(" of ")[0] for note in run.version_notes()] == ["the dropout masks"] * (rate > 0)


def test_a_start_names_a_run_and_a_step(tmp_path):
    assert split_start("runs/gpt1") == (Path("runs/gpt1"), None)
    assert split_start("runs/gpt1@2000") == (Path("runs/gpt1"), 2000)
    odd = tmp_path / "me@home"
    odd.mkdir()
    assert split_start(str(odd)) == (odd, None)
    assert split_start(f"{odd}@5") == (odd, 5)
    with pytest.raises(InputError, match="'last' is not a step"):
        split_start("runs/gpt1@last")


def test_json_is_written_whole_or_not_at_all(tmp_path):
    file = tmp_path / "result.json"
    write_json(file, {"a": 1})
    with pytest.raises(ValueError):
        write_json(file, {"a": float("nan")})
    assert json.loads(file.read_text()) == {"a": 1}


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch, caplog):
    """Lustre without flock answers ENOSYS. Fails if two programs could mix their checkpoints without a word."""
    with RunDirectory(tmp_path / "locked") as run:
        run.open(CONFIG)
    assert not caplog.records

    def no_locks(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    (tmp_path / "run").mkdir()
    with RunDirectory(tmp_path / "run") as run, locked(run.path, None):
        run.open(CONFIG)
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [line.split(" is on a file system without locks: ")[0] for line in told] == [str(run.path)] * 2
    assert "make sure that only one program trains in it" in told[1]
