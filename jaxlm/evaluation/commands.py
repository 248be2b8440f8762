"""The table of the evaluations: the function of each type of arguments."""

from collections.abc import Callable
from typing import Any

from jaxlm.evaluation.arguments import (
    Ensemble,
    FeaturesOf,
    Harness,
    OnTask,
    Perplexity,
    Scoring,
    ZeroShot,
    ZeroShotCurve,
)
from jaxlm.evaluation.features import evaluate_features
from jaxlm.evaluation.fine_tuned import evaluate_ensemble, evaluate_task
from jaxlm.evaluation.harness import evaluate_harness
from jaxlm.evaluation.perplexity import evaluate_perplexity
from jaxlm.evaluation.score import evaluate_score
from jaxlm.evaluation.zero_shot import evaluate_zero_shot
from jaxlm.evaluation.zero_shot_curve import zero_shot_curve
from jaxlm.inference.activations import evaluate_activations
from jaxlm.inference.arguments import Activations

EVALUATIONS: dict[type, Callable[[Any], dict[str, Any] | None]] = {
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


def evaluation_of(arguments: Any) -> Callable[[Any], dict[str, Any] | None]:
    """Return the function that runs the evaluation of some arguments and returns its figures."""
    return EVALUATIONS[type(arguments)]
