"""The run of an evaluation on its mesh, and the length and number of its rows."""

from typing import Any

from jaxlm.distributed.config import check_batch
from jaxlm.distributed.mesh import make_mesh
from jaxlm.inference.loaded_run import LoadedRun, load_model
from jaxlm.inference.rows import default_batch_size
from jaxlm.training.config import check_sizes
from jaxlm.training.start import check_trained

DEFAULT_BATCH_SIZE = 32


def opened(arguments: Any, **options: Any) -> LoadedRun:
    """Return the run or the published weights of the arguments, on their mesh. options: of `load_model`."""
    return load_model(arguments.run, mesh=make_mesh(arguments.mesh), weights=arguments.weights, **options)


def length_for(arguments: Any, run: LoadedRun, default: int) -> int:
    """Return the length of the arguments, or the default. InputError unless the model has been trained on it."""
    length = default if arguments.length is None else arguments.length
    check_sizes(length, 1, run.model.config)
    check_trained("--length", length, run.trained_length, run.name, beyond=arguments.beyond_length)
    return int(length)


def batch_size_for(given: int | None, run: LoadedRun) -> int:
    """Return the given batch size, or the default of the run, rounded for its mesh."""
    if given is not None:
        check_batch(given, 1, run.mesh)
        return given
    config = run.config
    return default_batch_size(config.eval_batch_size or config.batch_size or DEFAULT_BATCH_SIZE, run.mesh)
