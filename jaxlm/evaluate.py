"""Evaluate a run: `python -m jaxlm.evaluate perplexity|task|score|features|ensemble|activations|zero-shot|harness …`.

perplexity: how well a text that was prepared as a token store is predicted. task: how well a fine-tuned run labels
another labelled file. score: the log-probability of each sentence of a file, or of each choice of its rows; of an
encoder the pseudo-log-likelihood, or the best fillings of [MASK]. features: what an encoder's layers give for each
token. ensemble: several fine-tuned runs as one. activations: all layers and logits for some ids. zero-shot: tasks
without fine-tuning, with one JSON object per value. harness: tasks of the lm-evaluation-harness. A summary goes to
standard output; its last line is one JSON object with the figures (nan and infinities as strings).
"""

import sys
from collections.abc import Callable
from typing import Annotated, Any

import tyro

from jaxlm.config import command_line
from jaxlm.distributed.devices import prepare_process
from jaxlm.distributed.processes import start_processes
from jaxlm.distributed.watchdog import watching
from jaxlm.errors import run_command
from jaxlm.evaluation.command import figures_json, say
from jaxlm.evaluation.ensemble import Ensemble, evaluate_ensemble
from jaxlm.evaluation.features import FeaturesOf, evaluate_features
from jaxlm.evaluation.harness import Harness, evaluate_harness, harness_command_line
from jaxlm.evaluation.on_task import OnTask, evaluate_task
from jaxlm.evaluation.perplexity import Perplexity, evaluate_perplexity
from jaxlm.evaluation.score import Scoring, evaluate_score
from jaxlm.evaluation.zero_shot import ZeroShot, evaluate_zero_shot
from jaxlm.evaluation.zero_shot_curve import ZeroShotCurve, zero_shot_curve
from jaxlm.inference.activations import Activations, evaluate_activations

Command = (
    Annotated[Perplexity, tyro.conf.subcommand("perplexity")]
    | Annotated[OnTask, tyro.conf.subcommand("task")]
    | Annotated[Scoring, tyro.conf.subcommand("score")]
    | Annotated[FeaturesOf, tyro.conf.subcommand("features")]
    | Annotated[Ensemble, tyro.conf.subcommand("ensemble")]
    | Annotated[Activations, tyro.conf.subcommand("activations")]
    | Annotated[ZeroShot, tyro.conf.subcommand("zero-shot")]
    | Annotated[ZeroShotCurve, tyro.conf.subcommand("zero-shot-curve")]
    | Annotated[Harness, tyro.conf.subcommand("harness")]
)


def main() -> None:
    """The command."""
    kind: Any = Command  # a union: one subcommand each
    if sys.argv[1:2] == ["harness"]:  # the only one that passes flags on
        arguments: Any = harness_command_line(sys.argv[2:])
    else:
        arguments, _ = command_line(kind, program="evaluate", description=__doc__)
    start_processes(arguments.distributed, saves=False)
    commands: dict[type, Callable[[Any], dict[str, Any] | None]] = {
        Perplexity: evaluate_perplexity,
        OnTask: evaluate_task,
        Scoring: evaluate_score,
        FeaturesOf: evaluate_features,
        Ensemble: evaluate_ensemble,
        Activations: evaluate_activations,
        ZeroShot: evaluate_zero_shot,
        ZeroShotCurve: zero_shot_curve,
        Harness: evaluate_harness,
    }
    with watching():
        prepare_process()
        if (figures := commands[type(arguments)](arguments)) is not None:
            say(figures_json(figures))


if __name__ == "__main__":
    run_command(main)
