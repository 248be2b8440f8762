"""The learner of a run: a model, its parameters, and the objective of their training."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from jaxlm.models.family import Model
from jaxlm.objectives.objective import Objective
from jaxlm.training.parameter_groups import ParameterGroup


def no_carry(rows: int) -> None:
    """Return no carry, for models without state between batches."""
    return None


def carry_of(model: Model, layout: str, rows: int) -> Any:
    """Return a model's carry before the first row of streams, or None in other layouts, whose rows are independent."""
    return model.family.initial_carry(model.config, rows) if layout == "streams" else None


@dataclass(frozen=True, kw_only=True)
class Learner:
    """A model and its training; pretraining and fine-tuning each make one.

    init_params: a key -> parameters, boxed with their logical axes: {"backbone"} or {"backbone", "head"}. objective:
    for batches of any length. flops_per_token(length): FLOPs of a step, forward and backward. groups: parameters with a
    learning rate of their own, or frozen. carry(rows): the carry before the first batch of `rows` rows, None for most
    models.
    """

    model: Model
    init_params: Callable[[jax.Array], Any]
    objective: Objective
    flops_per_token: Callable[[int], float]
    groups: tuple[ParameterGroup, ...] = ()
    carry: Callable[[int], Any] = no_carry
