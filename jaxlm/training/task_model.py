"""A model with a task's head: parameters, objective, outputs.

Causal models may have a language-model loss in addition to the task's (Radford et al. 2018, section 3.2). Encoders have
the task's loss alone (Devlin et al. 2019, section 3.2), and optionally a BiLSTM between their layers and the head
(tables 5 and 7 there).
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax

from jaxlm.data.batch import ExampleBatch
from jaxlm.errors import InputError
from jaxlm.models import build, without_dropout
from jaxlm.models.heads import make_head
from jaxlm.models.heads.head import Head
from jaxlm.nn.config import Execution
from jaxlm.nn.layers import STATISTICS
from jaxlm.objectives.cross_view import with_unlabelled
from jaxlm.objectives.objective import Objective
from jaxlm.objectives.task import (
    LOSSES,
    TaskLoss,
    outputs_and_vectors,
    task_objective,
    task_outputs,
    with_mix_penalty,
)
from jaxlm.tasks import FORMATS, Task
from jaxlm.training.config import FinetuneConfig
from jaxlm.training.learner import TaskLearner
from jaxlm.training.optimizer import ParameterGroup
from jaxlm.training.optimizer_variants import tuned_groups
from jaxlm.training.text_model import make_text_learner


@dataclass(frozen=True, kw_only=True)
class HeadLearner(TaskLearner):
    """The learner of a task with a head: a model, the head and its loss.

    Parameters: {"backbone", "head"}, and {"batch_stats"}, the running statistics of a head's batch norms.
    """

    head: Head
    loss: TaskLoss

    def outputs(self, params: Any, batch: ExampleBatch) -> Any:
        """Return the head's float32 outputs for each row, without dropout: see `task_outputs`."""
        return task_outputs(self.model, self.head, params, batch)[0]

    def outputs_and_vectors(self, params: Any, batch: ExampleBatch) -> tuple[Any, jax.Array]:
        """Return the outputs and the vector that the head reads for each row: see `outputs_and_vectors`."""
        return outputs_and_vectors(self.model, self.head, params, batch)


def make_task_learner(config: FinetuneConfig, task: Task, execution: Execution | None = None) -> TaskLearner:
    """Return the learner of a fine-tuning run. InputError if the model cannot have the task."""
    make = make_text_learner if task.generates else make_head_learner
    return make(config, task, config.execution if execution is None else execution)


def make_head_learner(config: FinetuneConfig, task: Task, execution: Execution) -> HeadLearner:
    """Return the learner of a task with a head. InputError if the model's input format has no head for the task."""
    sizes = without_dropout(config.model) if config.frozen else config.model
    model = build(sizes, execution)
    inputs = FORMATS[model.family.input_format]
    if task.of_tokens and not inputs.every_token:
        raise InputError(
            f"task {task.name} of kind {task.kind} needs an encoder, which attends to the tokens on both sides; "
            "start from one"
        )
    apart = inputs.apart and inputs.num_sequences(task) > 1
    head = make_head(task, config, pooled=not inputs.reads_last, apart=apart)

    def init_params(key: jax.Array) -> Any:
        body_key, head_key = jax.random.split(key)
        variables = dict(head.init(head_key, *head.example_inputs(sizes), train=False))
        return {"backbone": model.init(body_key), "head": variables.pop("params"), **variables}

    def flops_per_token(length: int) -> float:
        return model.flops_per_token(length, None if not model.family.is_encoder else 0.0)

    loss = LOSSES[head.loss](task.class_weights, config.label_smoothing)
    objective = task_objective(
        model,
        head,
        loss,
        auxiliary_lm=config.auxiliary_lm,
        loss_chunks=execution.loss_chunks,
        backprop_window=config.backprop_window,
    )
    if head.auxiliary:
        objective = with_unlabelled(objective, model, head, config.unlabelled_dropout_rate)
    if config.mix_penalty:
        objective = with_mix_penalty(objective, config.mix_penalty)
    family = model.family
    return HeadLearner(
        model=model,
        init_params=init_params,
        objective=with_frozen_backbone(objective) if config.frozen else objective,
        flops_per_token=flops_per_token,
        groups=_groups(config, head),
        task=task,
        fresh=("head/.*", f"{STATISTICS}/.*"),
        growing=tuple(f"backbone/{name}" for name in family.vocabulary_leaves) if inputs.roles else (),
        head=head,
        loss=loss,
    )


def _groups(config: FinetuneConfig, head: Head) -> tuple[ParameterGroup, ...]:
    """Return the parameters that are frozen or have a learning rate of their own."""
    fixed = (ParameterGroup(f"{STATISTICS}/.*", 0.0),) if head.has_statistics else ()
    if config.frozen:
        return (ParameterGroup("backbone/.*", 0.0), *fixed)
    return fixed + tuned_groups(config)


def with_frozen_backbone(objective: Objective) -> Objective:
    """Return the objective without a gradient of the backbone."""

    def sums(params: Any, *inputs: Any) -> Any:
        return objective.sums(params | {"backbone": jax.lax.stop_gradient(params["backbone"])}, *inputs)

    return dataclasses.replace(objective, sums=sums)
