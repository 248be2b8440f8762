"""A model with a task's head on it, GPT's and BERT's behind one face: parameters, objective, outputs.

Decoders keep a language-model loss beside the task's (Radford et al. 2018, section 3.2); encoders have the task's alone
(Devlin et al. 2019, section 3.2), and on request a BiLSTM between their layers and the head (tables 5 and 7 there).
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxlm.data.batch import ExampleBatch
from jaxlm.errors import InputError
from jaxlm.models import bert, gpt
from jaxlm.models.bert import Bert, BertConfig
from jaxlm.models.gpt import GPT, GPTConfig
from jaxlm.models.heads import EncoderHead, LSTMHead, PooledHead, SequenceHead, SpanHead, TaggingHead
from jaxlm.nn.execution import Execution
from jaxlm.objectives.objective import Objective
from jaxlm.objectives.task import encoder_outputs, encoder_task, sequence_outputs, sequence_task, tag_weights
from jaxlm.tasks import Task
from jaxlm.training.config import FinetuneConfig
from jaxlm.training.optimizer import Optimizer, OptimizerConfig, make_optimizer
from jaxlm.training.parameter_groups import ParameterGroup

NO_DROPOUT = {"dropout_rate": 0.0, "embedding_dropout_rate": 0.0, "attention_dropout_rate": 0.0}


@dataclass(frozen=True)
class Network:
    """A model and a head. Parameters: {"backbone", "head"}."""

    model: GPT | Bert
    head: SequenceHead | EncoderHead | LSTMHead
    frozen: bool = False
    """Whether the backbone gets no gradient, and no dropout."""
    auxiliary_lm: float = 0.0
    loss_chunks: int = 0

    @property
    def is_encoder(self) -> bool:
        """Whether the model is a BERT."""
        return isinstance(self.model, Bert)

    def init(self, key: jax.Array) -> Any:
        """Fresh parameters, boxed with their logical axes."""
        body_key, head_key = jax.random.split(key)
        ids, width = jnp.zeros((1, 1), jnp.int32), self.model.config.width
        inputs: tuple[jax.Array, ...] = (jnp.zeros((1, 1, width)),)
        if isinstance(self.head, LSTMHead):
            inputs = (jnp.zeros((self.model.config.num_layers + 1, 1, 1, width)), jnp.ones((1, 1), jnp.int32))
        return {
            "backbone": self.model.init(body_key, ids, ids)["params"],
            "head": self.head.init(head_key, *inputs, train=False)["params"],
        }

    def objective(self) -> Objective:
        """What fine-tuning minimises."""
        if isinstance(self.model, Bert):
            assert not isinstance(self.head, SequenceHead)
            found = encoder_task(self.model, self.head)
        else:
            found = sequence_task(self.model, self.head, auxiliary_lm=self.auxiliary_lm, loss_chunks=self.loss_chunks)
        if not self.frozen:
            return found
        sums = found.sums
        still = lambda params: params | {"backbone": jax.lax.stop_gradient(params["backbone"])}  # noqa: E731
        return dataclasses.replace(found, sums=lambda params, batch, key: sums(still(params), batch, key))

    def outputs(self, params: Any, batch: ExampleBatch) -> jax.Array:
        """The head's numbers for each row, float32, without dropout: see `encoder_outputs`."""
        if isinstance(self.model, Bert):
            assert not isinstance(self.head, SequenceHead)
            return encoder_outputs(self.model, self.head, params, batch)
        outputs, _, _ = sequence_outputs(self.model, self.head, params, batch)
        return outputs

    def loss_weight(self, batch: ExampleBatch) -> jax.Array:
        """What the task's loss of a batch is a sum over: rows, or tokens that have a tag."""
        return jnp.sum(tag_weights(batch) if self.head.kind == "tagging" else batch.weights)

    def optimizer(self, config: OptimizerConfig) -> Optimizer:
        """Return the optimizer of the parameters, or of the head alone where the backbone is frozen."""
        groups = (ParameterGroup("backbone/.*", frozen=True),) if self.frozen else ()
        return make_optimizer(config, jax.eval_shape(self.init, jax.random.key(0)), groups)

    def flops_per_token(self, length: int) -> float:
        """FLOPs of a training step per token."""
        config = self.model.config
        if isinstance(config, BertConfig):
            return bert.model_flops_per_token(config, length, predicted=0.0)
        return gpt.model_flops_per_token(config, length)


def make_network(config: FinetuneConfig, task: Task, execution: Execution | None = None) -> Network:
    """The network of a fine-tuning run. InputError for a task of spans or tags and a decoder."""
    execution = config.execution if execution is None else execution
    sizes: Any = config.model
    if config.frozen:
        sizes = dataclasses.replace(sizes, **NO_DROPOUT)
    if isinstance(sizes, BertConfig):
        head: Any = encoder_head(task, config.head_dropout_rate, sizes.init_std)
        if config.head == "bilstm":
            head = LSTMHead(head, features=config.features, frozen=config.frozen)
        return Network(Bert(sizes, execution), head, frozen=config.frozen)
    return Network(
        GPT(sizes, execution),
        make_head(task, config.head_dropout_rate, sizes.init_std),
        frozen=config.frozen,
        auxiliary_lm=config.auxiliary_lm,
        loss_chunks=execution.loss_chunks,
    )


def make_head(task: Task, dropout_rate: float, init_std: float) -> SequenceHead:
    """The head that a task asks for on a decoder."""
    if task.kind in ("span", "tagging"):
        raise InputError(f"task {task.name}: a task of kind {task.kind} needs an encoder; start from a BERT")
    return SequenceHead(task.kind, task.num_outputs, dropout_rate, init_std)  # type: ignore[arg-type]


def encoder_head(task: Task, dropout_rate: float, init_std: float) -> EncoderHead:
    """The head that a task asks for on an encoder."""
    if task.kind == "span":
        return SpanHead(init_std)
    if task.kind == "tagging":
        return TaggingHead(task.num_outputs, dropout_rate, init_std)
    return PooledHead(task.kind, task.num_outputs, dropout_rate, init_std)


def empty_model(config: GPTConfig | BertConfig, execution: Execution | None = None) -> GPT | Bert:
    """The module of a model's config."""
    execution = Execution() if execution is None else execution
    return Bert(config, execution) if isinstance(config, BertConfig) else GPT(config, execution)
