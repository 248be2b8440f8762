"""Evaluate a run: `python -m jaxlm.evaluate perplexity|task|score|features|ensemble|activations|zero-shot|harness …`.

perplexity: how well a text that was prepared as a token store is predicted. task: how well a fine-tuned run labels
another labelled file. score: the log-probability of each sentence of a file, or of each choice of its rows; of an
encoder the pseudo-log-likelihood, or the best fillings of [MASK]. features: what an encoder's layers give for each
token. ensemble: several fine-tuned runs as one. activations: all layers and logits for some ids. zero-shot: tasks
without fine-tuning, with one JSON object per value. harness: tasks of the lm-evaluation-harness. A summary goes to
standard output; its last line is one JSON object with the values (nan and infinities as strings).
"""

import importlib
import sys
from typing import Annotated, Any, Union

import tyro

from jaxlm.config import command_line
from jaxlm.errors import run_command
from jaxlm.evaluation.arguments import (
    Ensemble,
    FeaturesOf,
    Harness,
    OnTask,
    Perplexity,
    Scoring,
    ZeroShot,
    ZeroShotCurve,
    harness_command_line,
)
from jaxlm.inference.arguments import Activations

# The arguments of each subcommand, and the module and the function that evaluate them.
EVALUATIONS: dict[str, tuple[type, str, str]] = {
    "perplexity": (Perplexity, "jaxlm.evaluation.perplexity", "evaluate_perplexity"),
    "task": (OnTask, "jaxlm.evaluation.fine_tuned", "evaluate_task"),
    "score": (Scoring, "jaxlm.evaluation.score", "evaluate_score"),
    "features": (FeaturesOf, "jaxlm.evaluation.features", "evaluate_features"),
    "ensemble": (Ensemble, "jaxlm.evaluation.fine_tuned", "evaluate_ensemble"),
    "activations": (Activations, "jaxlm.inference.token_outputs", "evaluate_activations"),
    "zero-shot": (ZeroShot, "jaxlm.evaluation.zero_shot", "evaluate_zero_shot"),
    "zero-shot-curve": (ZeroShotCurve, "jaxlm.evaluation.zero_shot_curve", "zero_shot_curve"),
    "harness": (Harness, "jaxlm.evaluation.harness", "evaluate_harness"),
}
Command: Any = Union[  # noqa: UP007
    tuple(Annotated[kind, tyro.conf.subcommand(name)] for name, (kind, _, _) in EVALUATIONS.items())
]
ARGUMENTS = (Command,)


def main() -> None:
    """The command."""
    if sys.argv[1:2] == ["harness"]:  # the only one that passes flags on
        arguments: Any = harness_command_line(sys.argv[2:])
    else:
        arguments, _ = command_line(Command, program="evaluate", description=__doc__)
    evaluate(arguments)


def evaluate(arguments: Any) -> None:
    """Run the evaluation that the type of the arguments names. JAX is imported here, after the command line."""
    from jaxlm.distributed.devices import prepare_process
    from jaxlm.distributed.processes import start_processes
    from jaxlm.distributed.watchdog import watching
    from jaxlm.evaluation.command import explained_memory, say, values_json

    module, function = next(place for kind, *place in EVALUATIONS.values() if kind is type(arguments))
    start_processes(arguments.distributed, saves=False)
    with watching():
        prepare_process()
        with explained_memory():
            values = getattr(importlib.import_module(module), function)(arguments)
        if values is not None:
            say(values_json(values))


if __name__ == "__main__":
    run_command(main)
