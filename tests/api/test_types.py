"""The public names as a type checker sees them in a program of a user."""

import subprocess
import sys
import textwrap

from paths import REPOSITORY

PROGRAM = """
    import jaxlm

    model = jaxlm.load("runs/gpt")
    reveal_type(model)
    reveal_type(model.logits(["a"]))
    reveal_type(model.embed([[1, 2]], pooling="mean"))
    reveal_type(model.generate(["a"], length=5))
    reveal_type(model.predict([{"text": "a"}]))
    reveal_type(jaxlm.run_pretraining("debug/gpt", run="runs/new", callbacks=[lambda record: record["loss"] < 1]))
    model.embed(["a"], pooling="max")
    model.generate("a", lenght=5)
    jaxlm.run_finetuning("finetune/gpt1", run="runs/new")
    """
# Libraries that no public name mentions are left out: reading jax alone takes ten seconds.
SETTINGS = """
[mypy]
ignore_missing_imports = true
follow_imports = silent
[mypy-jax.*,jaxlib.*,flax.*,optax.*,orbax.*,scipy.*,sklearn.*,grain.*,tensorboardX.*,tyro.*,etils.*,tokenizers.*]
follow_imports = skip
"""
REVEALED = [
    "jaxlm.inference.loaded_model.LoadedModel",
    "list[numpy.ndarray",
    "numpy.ndarray",
    "list[str]",
    "list[dict[str, Any]]",
    "dict[str, Any]",
]
ERRORS = ['"pooling"', '"lenght"', 'Missing named argument "task"']


def test_a_program_is_checked_against_the_public_names(tmp_path):
    """Fails when a public name is untyped, or a wrong argument passes a type checker."""
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent(PROGRAM))
    (tmp_path / "mypy.ini").write_text(SETTINGS)
    flags = ["--config-file", tmp_path / "mypy.ini", "--cache-dir", tmp_path / "cache"]
    ended = subprocess.run(
        [sys.executable, "-m", "mypy", *map(str, flags), str(file)],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        timeout=300,
    )
    lines = ended.stdout.splitlines()
    revealed = [line for line in lines if "Revealed type" in line]
    assert len(revealed) == len(REVEALED), ended.stdout + ended.stderr
    assert all(wanted in line for wanted, line in zip(REVEALED, revealed, strict=True)), revealed
    errors = [line for line in lines if ": error:" in line]
    assert len(errors) == len(ERRORS), errors
    assert all(wanted in line for wanted, line in zip(ERRORS, errors, strict=True)), errors
    assert (REPOSITORY / "jaxlm" / "py.typed").is_file()
