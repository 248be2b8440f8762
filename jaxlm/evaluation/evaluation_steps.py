"""Further steps of `evaluate perplexity`: overlapping windows, losses by position, the memory, and their speed."""

import dataclasses
import math
import time
from typing import Any

import jax
import jax.numpy as jnp

from jaxlm.data.batch import Batch
from jaxlm.data.config import MEMBERS, DataConfig, check_carries
from jaxlm.errors import InputError
from jaxlm.evaluation.arguments import MemoryOptions, Perplexity
from jaxlm.models.model import Inputs, Model
from jaxlm.objectives.language_model import reset_carry
from jaxlm.training.step import EvalStep
from jaxlm.wording import either

MOST_LINES = 16  # of a table of losses by position


def with_memory(model: Model, memory: MemoryOptions, data: DataConfig, longest: int | None = None) -> Model:
    """Return the model with the memory of an evaluation. InputError for a model, or a layout, without memory.

    longest: the tokens of a stream. A longer memory, which would never be full, is that long, with the same results.
    """
    for name in ("length", "clamp_length"):
        if (value := getattr(memory, name)) is not None and value < 0:
            raise InputError(f"memory.{name} must be at least 0, got {value}; give 0 for none")
    length = memory.length if memory.length is None or longest is None else min(memory.length, longest)
    asked = {"memory_length": length, "clamp_length": memory.clamp_length, "same_length": memory.same_length}
    given = {name: value for name, value in asked.items() if value is not None}
    if not given:
        return model
    flag = next(iter(given)).replace("memory_", "")
    if not given.keys() <= set(model.family.memory_fields):
        raise InputError(f"memory.{flag} must be left out for {model.family.title}, got {given}; it has no memory")
    check_carries(data, f"memory.{flag}")
    if "same_length" in given:
        given["same_length"] = given["same_length"] == "yes"
    config = dataclasses.replace(model.config, **given)
    config.check()
    return dataclasses.replace(model, config=config)


def check_rows(arguments: Perplexity, length: int, data: DataConfig) -> None:
    """Raise InputError for a stride outside of the rows, and for options that exclude each other."""
    stride = arguments.stride
    if arguments.cache.window and (stride is not None or arguments.by_position):
        raise InputError(
            f"cache.window must be 0 with stride or by_position, got {arguments.cache.window}; leave it out"
        )
    if stride is None:
        return
    if not 1 <= stride <= length:
        raise InputError(f"stride must be from 1 to the length {length}, got {stride}; a larger one would skip tokens")
    if not data.overlaps:
        names = either([name for name, member in MEMBERS.items() if member.overlaps])
        raise InputError(f"layout must be {names} with stride, got {data.layout}; give --layout {names}")
    if arguments.by_position:
        raise InputError("by_position must be left out with stride, got both; each window scores its end alone")


def make_sliding_step(model: Model, stride: int) -> EvalStep:
    """Return an evaluation step that scores only the last `stride` tokens of each row. See `ValidationWindows`."""

    def step(params: Any, batch: Batch, carry: Any = None) -> tuple[dict[str, Any], Any]:
        outputs = model(params, Inputs(batch.ids, batch.positions, batch.segments))
        where_BS = jnp.sum(batch.segments > 0, axis=1)[:, None] - stride + jnp.arange(stride)
        exists_BS, where_BS = where_BS >= 0, jnp.maximum(where_BS, 0)
        states_BSD = jnp.take_along_axis(outputs.states, where_BS[..., None], axis=1)
        targets_BS, weights_BS = (jnp.take_along_axis(x, where_BS, axis=1) for x in (batch.targets, batch.weights))
        weights_BS = jnp.where(exists_BS, weights_BS, 0.0)
        nll, hits = model.loss(params, states_BSD, outputs.output, targets_BS, weights_BS)
        total = jnp.sum(weights_BS)
        return {"nll": (nll, total), "accuracy": (hits, total)}, carry

    return step


def make_position_step(model: Model) -> EvalStep:
    """Return an evaluation step with a sum and a weight of the loss at each position, named by its number."""

    def step(params: Any, batch: Batch, carry: Any = None) -> tuple[dict[str, Any], Any]:
        inputs = Inputs(batch.ids, batch.positions, batch.segments)
        outputs = model(params, inputs, reset_carry(carry, batch))

        def at_position(part: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
            states_BD, targets_B, weights_B = part
            targets_B1, weights_B1 = targets_B[:, None], weights_B[:, None]
            nll, hits = model.loss(params, states_BD[:, None], outputs.output, targets_B1, weights_B1)
            return nll, hits

        by_length = [jnp.swapaxes(x, 0, 1) for x in (outputs.states, batch.targets, batch.weights)]
        nll_L, hits_L = jax.lax.map(at_position, tuple(by_length))
        weight_L = jnp.sum(batch.weights, axis=0)
        sums = {str(number): (nll_L[number], weight_L[number]) for number in range(len(nll_L))}
        total = jnp.sum(weight_L)
        return sums | {"nll": (jnp.sum(nll_L), total), "accuracy": (jnp.sum(hits_L), total)}, outputs.carry

    return step


def losses_by_position(sums: dict[str, tuple[float, float]], length: int) -> list[float]:
    """Return the mean loss at each position of a row, in nats; nan where no row has a target."""
    pairs = (sums.get(str(number), (0.0, 0.0)) for number in range(length))
    return [total / weight if weight else math.nan for total, weight in pairs]


def position_lines(sums: dict[str, tuple[float, float]], length: int) -> list[str]:
    """Return a table of the mean loss by position, of at most MOST_LINES lines of equally many positions."""
    size = -(-length // MOST_LINES)
    lines = []
    for first in range(0, length, size):
        pairs = [sums.get(str(number), (0.0, 0.0)) for number in range(first, min(first + size, length))]
        total, weight = (sum(column) for column in zip(*pairs, strict=True))
        loss = f"{total / weight:.4f}" if weight else "-"
        lines.append(f"  positions {first + 1:>5} to {first + len(pairs):>5}   {loss} nats per token")
    return lines


class Timed:
    """An evaluation step with its tokens per second. The first batch, which may compile, is not counted."""

    def __init__(self, step: EvalStep) -> None:
        self._step, self._begun, self._first = step, 0.0, math.nan

    def __call__(self, params: Any, batch: Any, carry: Any) -> Any:
        """Return the result of the step."""
        found = self._step(params, batch, carry)
        if math.isnan(self._first):
            self._first = float(jax.block_until_ready(found)[0]["nll"][1])
            self._begun = time.perf_counter()
        return found

    def tokens_per_second(self, tokens: float) -> float:
        """Return the speed, to be asked after the last result was read; nan for one batch. tokens: of all batches."""
        later = tokens - self._first
        return later / (time.perf_counter() - self._begun) if later > 0 else math.nan
