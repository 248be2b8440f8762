"""The lm-evaluation-harness over a run: against the harness over Hugging Face's model of the same export.

Needs lm_eval 0.4.13 (the extra [harness]); the comparison also torch, transformers and accelerate (the extra [parity]).
Tasks are local.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import toy_gpt2
import toy_run
from toy_processes import run_several
from toy_runs import run_process

from jaxlm import evaluate
from jaxlm.distributed import devices
from jaxlm.errors import InputError
from jaxlm.evaluation.arguments import Harness, harness_command_line
from jaxlm.evaluation.harness import check_installed, evaluate_harness
from jaxlm.inference.arguments import ExportArguments
from jaxlm.inference.conversion import export_run

NEEDED = ("lm_eval", "torch", "transformers", "accelerate")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
compared = pytest.mark.skipif(
    bool(MISSING), reason=f"needs {', '.join(MISSING)}: install the extras [harness] and [parity]"
)
with_lm_eval = pytest.mark.skipif("lm_eval" in MISSING, reason="needs lm_eval, the extra [harness]")

TASKS = {
    "toy_choice": """
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: ["sat on the mat", "lay in the tree", "sang"]
doc_to_target: label
target_delimiter: " "
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "toy_pairs": """
output_type: multiple_choice
doc_to_text: ""
doc_to_choice: "{{[animal + ' sat', animal + ' sang']}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{metric: acc}]
""",
    "toy_last_word": """
output_type: loglikelihood
doc_to_text: "{{text}} and"
doc_to_target: "{{' the ' + animal}}"
target_delimiter: ""
metric_list: [{metric: perplexity}, {metric: acc}]
""",
    "toy_rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}, and {{text}}, and the {{animal}} sang."
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
    "toy_answers": """
output_type: generate_until
doc_to_text: "{{text}}:"
doc_to_target: "{{animal}}"
generation_kwargs: {until: ["e"], max_gen_toks: 7, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}
ROWS = [
    {"text": f"{article} {animal}{' in the morning' * (k % 3)}", "animal": animal, "label": k % 3}
    for k, (article, animal) in enumerate(
        (article, animal) for article in ("The", "the", "A", "and a") for animal in ("cat", "dog", "bird", "naïve fox")
    )
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return toy_gpt2.run(tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A directory of local tasks."""
    directory = tmp_path_factory.mktemp("tasks")
    rows = directory / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    for name, lines in TASKS.items():
        data = f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {rows}}}}}\ntest_split: test\n"
        (directory / f"{name}.yaml").write_text(data + lines.lstrip(), encoding="utf-8")
    return directory


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    directory = tmp_path_factory.mktemp("export") / "hf"
    export_run(ExportArguments(run=str(run), to=f"hf:{directory}"))
    return directory


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    monkeypatch.setattr(devices, "prepare_process", lambda: None)
    for name, value in {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}.items():
        monkeypatch.setenv(name, value)


def command(monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["evaluate", "harness", *map(str, flags)])
    evaluate.main()


def simple(model, tasks, names=tuple(TASKS)):
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    return lm_eval.simple_evaluate(model=model, tasks=list(names), task_manager=manager, bootstrap_iters=0)


@compared
@pytest.mark.parametrize("of", ["run", "run beyond its length", "published"])
def test_results_equal_those_over_hugging_face(run, exported, tasks, of):
    # Fails when a context, a truncation, a window, a stop string or greedy differs between the two backends.
    from lm_eval.models.huggingface import HFLM

    from jaxlm.evaluation.harness_model import HarnessModel

    length = toy_gpt2.LENGTH if of == "run" else toy_gpt2.POSITIONS
    theirs = HFLM(pretrained=str(exported), device="cpu", dtype="float32", batch_size=4, max_length=length)
    source = f"hf:{exported}" if of == "published" else str(run)
    ours = HarnessModel(source, batch_size=8, beyond_length=of == "run beyond its length")
    assert (ours.max_length, ours.prefix_token_id) == (theirs.max_length, theirs.prefix_token_id)
    found, expected = simple(ours, tasks), simple(theirs, tasks)
    for name, metrics in expected["results"].items():
        for metric, value in metrics.items():
            if isinstance(value, float):
                assert found["results"][name][metric] == pytest.approx(value, rel=1e-4, nan_ok=True), (name, metric)
    for name, samples in expected["samples"].items():
        assert len(samples) == len(ROWS)
        for one, other in zip(found["samples"][name], samples, strict=True):
            assert one["doc"] == other["doc"] and one["arguments"] == other["arguments"]
            np.testing.assert_equal(flat(one["resps"], float), pytest.approx(flat(other["resps"], float), abs=1e-4))
            assert flat(one["resps"], (bool, str)) == flat(other["resps"], (bool, str))


def flat(value, kinds):
    """The values of these kinds in nested lists."""
    if isinstance(value, list | tuple):
        return [one for part in value for one in flat(part, kinds)]
    return [value] if isinstance(value, kinds) else []


@compared
def test_a_trained_vocabulary_has_the_same_prefix(tmp_path, tasks):
    # Fails when the token in front of a text is not the one that the export names.
    from lm_eval.models.huggingface import HFLM

    from jaxlm.evaluation.harness_model import HarnessModel

    store = toy_run.toy_store(tmp_path / "store", toy_run.toy_tokenizer())
    trained = toy_run.pretrained(tmp_path / "run", store, sizes=toy_gpt2.SIZES)
    export_run(ExportArguments(run=str(trained), to=f"hf:{tmp_path / 'hf'}"))
    theirs = HFLM(pretrained=str(tmp_path / "hf"), device="cpu", dtype="float32", max_length=toy_gpt2.LENGTH)
    ours = HarnessModel(str(trained), batch_size=8)
    names = ("toy_pairs", "toy_rolling")
    found, expected = simple(ours, tasks, names), simple(theirs, tasks, names)
    for name in names:
        for one, other in zip(found["samples"][name], expected["samples"][name], strict=True):
            assert flat(one["resps"], float) == pytest.approx(flat(other["resps"], float), abs=1e-4)


def written(directory: Path) -> tuple[dict, dict]:
    """The results and the samples of each task that a command of the harness wrote."""
    (file,) = directory.glob("*/results_*.json")
    samples = {name: next(file.parent.glob(f"samples_{name}_*.jsonl")).read_text().splitlines() for name in TASKS}
    rows = {name: sorted(map(json.loads, lines), key=lambda row: row["doc_id"]) for name, lines in samples.items()}
    return json.loads(file.read_text())["results"], rows


def number(text: str) -> float | str:
    """A log-probability, which samples hold as text; other text as it is."""
    try:
        return float(text)
    except ValueError:
        return text


@compared
@pytest.mark.parity
@pytest.mark.slow
@pytest.mark.parametrize("length", [toy_gpt2.LENGTH, None], ids=["trained length", "all positions"])
def test_lm_evals_own_command_over_the_export_writes_the_same(run, exported, tasks, monkeypatch, tmp_path, length):
    """Fails when the export does not load as `lm_eval --model hf` loads it, by its directory alone, or when a result or
    a log-probability of `jaxlm.evaluate harness` on the run differs.
    """
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")  # of both: standard errors without a fork of the process that runs JAX
    settings = f"pretrained={exported}" + ("" if length is None else f",max_length={length}")
    words = ["--include_path", tasks, "--tasks", ",".join(TASKS), "--log_samples", "--output_path"]
    theirs = ["--model", "hf", "--model_args", settings, "--device", "cpu", *words, tmp_path / "theirs"]
    ended = subprocess.run(
        [sys.executable, "-m", "lm_eval", *map(str, theirs)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    beyond = [] if length else ["--beyond-length"]
    command(monkeypatch, "--run", run, "-b", 8, *beyond, *words, tmp_path / "ours")
    (expected, wanted), (results, found) = written(tmp_path / "theirs"), written(tmp_path / "ours")
    assert results.keys() == expected.keys() == set(TASKS)
    for name, metrics in expected.items():
        for metric, value in metrics.items():
            if metric.startswith(("acc", "exact_match")):
                assert results[name][metric] == value, (name, metric)
            elif isinstance(value, float):
                assert results[name][metric] == pytest.approx(value, rel=1e-4, nan_ok=True), (name, metric)
        assert len(wanted[name]) == len(ROWS)
        for one, other in zip(found[name], wanted[name], strict=True):
            assert one["doc"] == other["doc"] and one["arguments"] == other["arguments"]
            answers, given = ([number(text) for text in flat(row["resps"], (str, float, bool))] for row in (one, other))
            assert answers == [value if isinstance(value, str) else pytest.approx(value, abs=1e-4) for value in given]


@with_lm_eval
def test_the_command_writes_what_lm_eval_writes(run, tasks, monkeypatch, tmp_path, capsys):
    # Fails when a flag does not reach lm_eval, or when the command evaluates another model than the library.
    flags = ["--run", run, "--include_path", tasks, "--tasks", "toy_choice", "toy_rolling", "--limit", 5]
    command(monkeypatch, *flags, "-b", 8, "--output_path", tmp_path / "out", "--log_samples", "--num_fewshot", 0)
    output = capsys.readouterr().out
    assert "|toy_choice |" in output
    last = json.loads(output.splitlines()[-1])
    assert last == {"run": f"{run}@5", "requests": {"loglikelihood": 15, "loglikelihood_rolling": 5}}
    (file,) = (tmp_path / "out").glob("*/results_*.json")
    results = json.loads(file.read_text())
    assert results["config"]["model"] == "jaxlm" and results["config"]["model_run"] == f"{run}@5"
    assert results["config"]["batch_size"] == 8 and results["n-samples"]["toy_choice"]["effective"] == 5
    (samples,) = (tmp_path / "out").glob("*/samples_toy_choice_*.jsonl")
    assert len(samples.read_text().splitlines()) == 5


@with_lm_eval
def test_the_harness_knows_the_model_by_name(run, tasks):
    import lm_eval
    from lm_eval.tasks import TaskManager

    import jaxlm.evaluation.harness_model  # noqa: F401

    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    settings = {"tasks": ["toy_choice"], "task_manager": manager, "bootstrap_iters": 0}
    found = lm_eval.simple_evaluate(model="jaxlm", model_args=f"run={run},beyond_length=True", batch_size=8, **settings)
    assert found["config"]["max_length"] == toy_gpt2.POSITIONS
    assert 0 <= found["results"]["toy_choice"]["acc,none"] <= 1


@with_lm_eval
def test_answers_are_kept_in_the_cache(run, tasks, tmp_path, monkeypatch, capsys):
    # Fails when a second evaluation asks the model again.
    flags = ["--run", run, "--include_path", tasks, "--tasks", "toy_choice", "-b", 8, "--use_cache", tmp_path / "cache"]
    counted = []
    for _ in range(2):
        command(monkeypatch, *flags)
        counted.append(json.loads(capsys.readouterr().out.splitlines()[-1])["requests"])
    assert counted == [{"loglikelihood": 3 * len(ROWS)}, {}]


@with_lm_eval
@pytest.mark.slow
def test_two_processes_answer_together_and_one_writes(run, tasks, tmp_path):
    # Fails when a process gets a part of the requests, or when both write results.
    flags = ["--run", run, "--include_path", tasks, "--tasks", "toy_choice,toy_answers", "-b", 8, "--log_samples"]
    flags = ["harness", *flags, "--output_path"]
    one = run_process("evaluate", *flags, tmp_path / "one", log=tmp_path / "log", devices=8)
    two = run_several("evaluate", *flags, tmp_path / "two", log=tmp_path / "two_log", devices=4)
    assert [ended.code for ended in (one, *two)] == [0, 0, 0], [ended.errors for ended in (one, *two)]
    (alone,), (together,) = ((tmp_path / name).glob("*/results_*.json") for name in ("one", "two"))
    found, expected = (json.loads(file.read_text())["results"] for file in (together, alone))
    for name, metrics in expected.items():
        assert {key: found[name][key] for key in metrics} == metrics


@with_lm_eval
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tasks", "no_such_task"], "Tasks not found: no_such_task"),
        ([], "--tasks must name a task, got none"),
        (["--tasks", "toy_choice", "--model", "hf"], "--model must be left out, got hf; use --run"),
        (["--tasks", "toy_choice", "--device", "cuda"], "--device must be left out, got cuda"),
        (["--tasks", "toy_choice", "--log_samples"], "--output_path"),
        (["--tasks", "toy_choice", "--batch_size", "0"], "batch_size must be at least 1, got 0"),
        (["--tasks", "toy_choice", "--prefix-token-id", "9999"], "--prefix-token-id must be from 0 to 261, got 9999"),
        (["--tasks", "toy_choice", "--apply_chat_template"], "--apply_chat_template must be left out"),
    ],
)
def test_bad_flags_are_one_line(run, tasks, monkeypatch, flags, message):
    with pytest.raises(InputError, match=message):
        command(monkeypatch, "--run", run, "--include_path", tasks, *flags)


@with_lm_eval
def test_flags_that_lm_eval_does_not_know(run, monkeypatch, capsys):
    with pytest.raises(SystemExit) as ended:
        command(monkeypatch, "--run", run, "--tasks", "x", "--no-such-flag", 3)
    assert ended.value.code == 2 and "no-such-flag" in capsys.readouterr().err


def test_flags_are_divided_between_the_two_programs():
    # Fails when a flag of one program is taken by the other, or when its spelling changes.
    found = harness_command_line(
        "--tasks a b --run runs/x@3 --batch_size 4 --output_path out_dir -s --mesh.data 2 --gen_kwargs top_k=3".split()
    )
    assert (found.run, found.batch_size, found.mesh.data, found.beyond_length) == ("runs/x@3", 4, 2, False)
    assert found.of_lm_eval == ("--tasks", "a", "b", "--output_path", "out_dir", "-s", "--gen_kwargs", "top_k=3")
    assert harness_command_line(["--run", "r", "-b", "auto"]).batch_size == "auto"


def test_a_missing_package_is_one_line(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="harness needs the package lm_eval, .*; run launch/setup.sh cpu harness"):
        evaluate_harness(Harness(run="runs/x"))
    with pytest.raises(InputError):
        check_installed()
