"""Pretrain, fine-tune and evaluate language models in JAX and Flax.

The names below are the Python API. They are imported on first use, so that `import jaxlm` is immediate. The import
changes no setting of the process, except those that JAX's GPU plugin needs where it is installed (`jaxlm.cuda`).
docs/python.md describes the API.
"""

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from jaxlm import cuda
from jaxlm.version import __version__ as __version__

if TYPE_CHECKING:
    from jaxlm.data.preparation import prepare_store
    from jaxlm.errors import InputError, RunError
    from jaxlm.evaluation.calls import evaluate_ensemble, evaluate_perplexity, evaluate_task, evaluate_zero_shot
    from jaxlm.finetuning.run import run_finetuning
    from jaxlm.inference.conversion import export_model
    from jaxlm.inference.loaded_model import LoadedModel, load
    from jaxlm.models.model import Inputs
    from jaxlm.training.pretraining_run import run_pretraining

__all__ = [
    "InputError",
    "Inputs",
    "LoadedModel",
    "RunError",
    "evaluate_ensemble",
    "evaluate_perplexity",
    "evaluate_task",
    "evaluate_zero_shot",
    "export_model",
    "load",
    "prepare_store",
    "run_finetuning",
    "run_pretraining",
]

_MODULES = {
    "InputError": "jaxlm.errors",
    "Inputs": "jaxlm.models.model",
    "LoadedModel": "jaxlm.inference.loaded_model",
    "RunError": "jaxlm.errors",
    "evaluate_ensemble": "jaxlm.evaluation.calls",
    "evaluate_perplexity": "jaxlm.evaluation.calls",
    "evaluate_task": "jaxlm.evaluation.calls",
    "evaluate_zero_shot": "jaxlm.evaluation.calls",
    "export_model": "jaxlm.inference.conversion",
    "load": "jaxlm.inference.loaded_model",
    "prepare_store": "jaxlm.data.preparation",
    "run_finetuning": "jaxlm.finetuning.run",
    "run_pretraining": "jaxlm.training.pretraining_run",
}


# While `python -m jaxlm.COMMAND` imports this package, the first word is -m. A command needs these packages from its
# first line on, so their absence is reported here.
if sys.argv[:1] == ["-m"]:
    for _needed in ("tyro", "numpy", "jax"):
        if importlib.util.find_spec(_needed) is None:
            print(
                f"error: the package {_needed} must be installed, got none for {sys.executable}; run launch/setup.sh, "
                "then . .venv/bin/activate",
                file=sys.stderr,
            )
            sys.exit(2)


cuda.prepare()


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module 'jaxlm' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
