"""Models by name: a download, an upload and what goes wrong, over HTTP against a stand-in of the Hugging Face Hub.

The commands that ask it run as processes of their own: huggingface_hub reads its settings when it is imported.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import toy_encoder
from huggingface_hub import ModelCard
from stand_in_hub import environment, stand_in_hub
from toy_runs import checksums, run_here

from jaxlm.files import write_json

pytestmark = pytest.mark.usefixtures("two_devices")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A fine-tuned run, with a results.json as the command writes it."""
    directory = tmp_path_factory.mktemp("run")
    vocabulary, run = toy_encoder.write_vocabulary(directory), directory / "tuned"
    files = toy_encoder.make_files(directory / "task", "classification")
    toy_encoder.finetuned(run, vocabulary, files, "classification")
    rows = [{"seed": seed, "learning_rate": 1e-3, "dev": {"accuracy": seed / 4}} for seed in (1, 2)]
    results = {"task": "custom", "metric": "accuracy", "learning_rate": 1e-3, "runs": rows}
    write_json(run / "results.json", results | {"dev": {"accuracy": {"mean": 0.375, "std": 0.125}}}, signed=True)
    return run


def command(name, *words, **variables):
    names = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    program = [sys.executable, "-m", f"jaxlm.{name}", *map(str, words)]
    return subprocess.run(program, capture_output=True, text=True, env=names, check=False)


@pytest.mark.slow
def test_a_run_goes_to_the_hub_and_comes_back(tuned, tmp_path):
    """Fails when an upload lacks a file, when a download takes files of other programs, when the parameters that come
    back are others, when the offline cache is not used, or when the card has other figures than the run."""
    with stand_in_hub() as hub:
        variables = environment(hub, tmp_path / "home")
        words = ["export", tuned, "--to", f"hf:{tmp_path / 'out'}", "--push", "someone/toy", "--private"]
        words += ["--license", "mit", "--language", "no", "en", "--datasets", "glue"]
        ended = command("convert", *words, **variables, HF_TOKEN="hf_x")
        assert ended.returncode == 0, ended.stderr
        assert f"uploaded: {hub.endpoint}/someone/toy/commit/" in ended.stdout and hub.private == {"someone/toy"}
        written = {path.name: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
        uploaded = {Path(name).name: content for name, content in hub.models["someone/toy"].items()}
        assert uploaded == written
        hub.models["someone/toy"]["onnx/model.safetensors"] = b"of another program"
        runs = [tmp_path / "back", tmp_path / "offline", tmp_path / "direct"]
        for run, more in ((runs[0], {}), (runs[1], {"HF_HUB_OFFLINE": "1"})):
            ended = command("convert", "import", "hf:someone/toy", "--run", run, **variables | more)
            assert ended.returncode == 0, ended.stderr
        assert not any("onnx" in call for call in hub.calls)
        assert checksums(runs[0]) == checksums(runs[1])
        direct = run_here("convert", "import", f"hf:{tmp_path / 'out'}", "--run", runs[2])
        assert direct.code == 0 and checksums(runs[2]) == checksums(runs[0])

        missing = command("convert", "import", "hf:someone/none", "--run", tmp_path / "none", **variables)
        assert missing.returncode == 2 and len(missing.stderr.splitlines()) == 1
        assert "hf:someone/none must be a directory, or a model that the Hugging Face Hub has, got" in missing.stderr
        assert not (tmp_path / "none").exists()
        hub.refuses = True
        words[3:6] = [f"hf:{tmp_path / 'again'}", "--push", "someone/toy"]
        refused = command("convert", *words, **variables, HF_TOKEN="hf_x")
        assert refused.returncode == 1 and "is exported but not uploaded" in refused.stderr.splitlines()[-1]
        assert (tmp_path / "again" / "model.safetensors").exists()
    card = ModelCard(written["README.md"].decode())
    assert (card.data.license, card.data.language, card.data.datasets) == ("mit", ["no", "en"], ["glue"])
    (figure,) = card.data.eval_results
    assert (figure.metric_type, figure.metric_value, figure.dataset_split) == ("accuracy", 0.375, "dev")


def test_an_upload_without_a_login_is_one_line(tmp_path):
    """Fails when the export begins before the login is checked."""
    variables = {"HF_HOME": str(tmp_path / "home"), "HF_TOKEN": ""}
    words = ["export", tmp_path / "run", "--to", f"hf:{tmp_path / 'out'}"]
    for more, message in (
        (["--push", "toy"], "--push must be given with a login, got none; run hf auth login"),
        (["--push", "a/b/c"], "--push must be NAME or OWNER/NAME, got a/b/c"),
        (["--private"], "--private must be given with --push"),
    ):
        ended = command("convert", *words, *more, **variables)
        assert ended.returncode == 2 and message in ended.stderr and len(ended.stderr.splitlines()) == 1
