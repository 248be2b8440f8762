"""`evaluate harness`: EleutherAI's lm-evaluation-harness over a run or published weights.

The command line is that of the harness (`python -m lm_eval run --help`) without the flags that select a model, and with
those of `Harness`. Tasks, metrics, tables and the files under --output_path are the harness's own.
"""

import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from jaxlm.distributed.mesh import make_mesh
from jaxlm.errors import InputError
from jaxlm.evaluation.arguments import Harness

# Flags of the harness that select a model or its devices.
NOT_OURS = {
    "model": "--run",
    "model_args": "--run, --beyond-length and --mesh.*",
    "device": "JAX_PLATFORMS",
    "max_batch_size": "--batch-size",
}
DEFAULT_SEEDS = (0, 1234, 1234, 1234)  # lm_eval 0.4.13: of random, numpy, torch and the examples in a prompt


def evaluate_harness(arguments: Harness) -> dict[str, Any]:
    """Run lm_eval's own command over a run, and return the number of requests that were answered, by kind."""
    check_installed()
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # bootstraps would fork this process, with JAX's threads in it
    with _command_line_of(arguments.of_lm_eval):
        from lm_eval._cli import HarnessCLI
        from lm_eval.utils import setup_logging

        setup_logging()
        command = HarnessCLI()
        options = command.parse_args()
        _check(options)
        from jaxlm.evaluation.harness_model import HarnessModel

        model = HarnessModel(
            arguments.run,
            mesh=make_mesh(arguments.mesh),
            batch_size=arguments.batch_size,
            beyond_length=arguments.beyond_length,
            prefix_token_id=arguments.prefix_token_id,
            seed=(options.seed or DEFAULT_SEEDS)[2] or 0,
        )
        options.model, options.batch_size = model, model.batch_size
        options.model_args = {"model": model.run.name, "beyond_length": arguments.beyond_length}
        command.execute(options)
    return {"run": model.run.name, "requests": dict(model.requests.counts)}


def check_installed() -> None:
    """Raise InputError without the package lm_eval."""
    if importlib.util.find_spec("lm_eval") is None:
        raise InputError(
            "harness needs the package lm_eval, which is not installed; run launch/setup.sh cpu harness, or pip "
            "install 'jaxlm[harness]'"
        )


def _check(options: Any) -> None:
    """Raise InputError for flags of lm_eval that are wrong or not ours, before the run is loaded."""
    from lm_eval.config.evaluate_config import EvaluatorConfig

    for name, instead in NOT_OURS.items():
        if getattr(options, name, None) is not None:
            raise InputError(f"--{name} must be left out, got {getattr(options, name)}; use {instead}")
    if jax.process_count() > 1 and options.use_cache:
        raise InputError(f"--use_cache must be left out with several processes, got {options.use_cache}; leave it out")
    try:
        config = EvaluatorConfig.from_cli(options)
        if not config.tasks:
            raise InputError("--tasks must name a task, got none; lm_eval lists them with python -m lm_eval ls tasks")
        config.process_tasks()
    except (ValueError, TypeError, OSError) as error:
        raise InputError(f"--tasks and the other flags of lm_eval must be valid, got: {error}; fix them") from error


@contextlib.contextmanager
def _command_line_of(flags: Sequence[str]) -> Iterator[None]:
    """Set the process's command line, which lm_eval reads, while the block runs."""
    before = sys.argv
    sys.argv = ["lm_eval", "run", *flags]
    try:
        yield
    finally:
        sys.argv = before
