"""Optimizers and their schedules, through optax.

`adamw` is Adam with decoupled decay (Kingma and Ba, 2015; Loshchilov and Hutter, 2019), which GPT-1's paper describes.
`openai_adam` is the variant that its code has (openai/finetune-transformer-lm, opt.py:5-49). Which leaves are decayed
goes by their logical axes: matrices and tables have a `width`, biases and norms have none.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from jaxlm.errors import InputError


@dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer and its schedule. The defaults are GPT-1's pretraining (section 4.1)."""

    kind: Literal["adamw", "openai_adam"] = "adamw"
    """adamw: bias-corrected, decoupled decay. openai_adam: as GPT-1's code (first update has rate 0)."""
    peak_lr: float = 2.5e-4
    warmup: float = 2000.0
    """Linear warmup: steps from 1 on, below 1 a share of the run. adamw rounds it up to whole steps."""
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    """From the peak to 0 at the last step; constant: no decay."""
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    """Largest global norm of the gradient; 0: no clipping."""

    def check(self) -> None:
        """Refuse values that cannot be meant."""
        if not self.peak_lr >= 0.0:
            raise InputError(f"optimizer.peak_lr {self.peak_lr}: a number from 0 on")
        if self.warmup < 0:
            raise InputError(f"optimizer.warmup {self.warmup}: steps from 1 on, or a share of the run below 1")

    def warmup_steps(self, num_steps: int) -> float:
        """The warmup in steps of a run of `num_steps`; adamw's is whole."""
        steps = self.warmup * num_steps if self.warmup < 1 else self.warmup
        return math.ceil(steps - 1e-9) if self.kind == "adamw" else steps

    def depends_on_num_steps(self) -> bool:
        """Whether another length of the run would change the rate of a step."""
        return self.kind == "openai_adam" or self.decay != "constant" or 0 < self.warmup < 1


def learning_rate(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """The rate of update t = 0, 1, … of `num_steps`.

    adamw, w warmup steps: peak (t + 1) / w up to the peak, then down to 0 over what is left of the run (the update
    after the last would have rate 0). openai_adam: with x = t / T and w as a share, peak (x / w or 1) (1 - x) for
    linear, and for cosine (1 + cos(pi x)) / 2 after the warmup, x measured from the start of the run (opt.py:5-15).
    """
    total, warmup = max(1, num_steps), config.warmup_steps(num_steps)

    def adamw_rate(t):
        t = jnp.asarray(t, jnp.float32)
        rise = jnp.minimum(1.0, (t + 1) / max(1.0, warmup))
        x = jnp.clip((t - warmup) / max(1.0, total - warmup), 0.0, 1.0)
        return config.peak_lr * jnp.where(t < warmup, rise, _fall(config.decay, x))

    def openai_rate(t):
        x = jnp.asarray(t, jnp.float32) / total
        share = warmup / total
        warming = (x <= share) & (share > 0)
        rise = jnp.where(warming, x / (share or 1.0), 1.0)
        fall = _fall(config.decay, x)
        if config.decay == "cosine":
            fall = jnp.where(warming, 1.0, fall)
        return config.peak_lr * rise * fall

    return openai_rate if config.kind == "openai_adam" else adamw_rate


def _fall(decay: str, x):
    if decay == "constant":
        return jnp.ones_like(x)
    return 1.0 - x if decay == "linear" else 0.5 * (1.0 + jnp.cos(jnp.pi * x))


def decay_mask(boxed_params: Any) -> Any:
    """True for leaves that are decayed: those with a `width` among their logical axes."""
    is_box = lambda leaf: isinstance(leaf, nn.LogicallyPartitioned)  # noqa: E731
    return jax.tree.map(lambda leaf: "width" in leaf.names, boxed_params, is_leaf=is_box)


class Optimizer(NamedTuple):
    """An optax transformation, and the rate of each update for the log."""

    init: optax.TransformInitFn
    update: optax.TransformUpdateFn
    rate: optax.Schedule


def make_optimizer(config: OptimizerConfig, num_steps: int, mask: Any) -> Optimizer:
    """Clip by the global norm, Adam, decay where `mask` is true, the scheduled rate; updates are added."""
    rate = learning_rate(config, num_steps)
    clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm > 0 else optax.identity()
    if config.kind == "openai_adam":
        transform = optax.chain(clip, openai_adam(config, rate, mask))
    else:
        adam = optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.eps)
        decay = optax.add_decayed_weights(config.weight_decay, mask=mask) if config.weight_decay else optax.identity()
        transform = optax.chain(clip, adam, decay, optax.scale_by_learning_rate(rate))
    return Optimizer(transform.init, transform.update, rate)


def openai_adam(config: OptimizerConfig, rate: optax.Schedule, mask: Any) -> optax.GradientTransformation:
    """Adam as in opt.py:23-49: eps is added to the uncorrected root; the decay is scaled by the bias correction too.

    With t counted from 1: rate = schedule((t - 1) / T) sqrt(1 - b2^t) / (1 - b1^t);
    p <- p - rate (m / (sqrt(v) + eps) + decay p).
    """

    def init(params):
        zeros = lambda: jax.tree.map(jnp.zeros_like, params)  # noqa: E731
        return optax.ScaleByAdamState(count=jnp.zeros([], jnp.int32), mu=zeros(), nu=zeros())

    def update(grads, state, params):
        b1, b2, count = config.beta1, config.beta2, state.count + 1
        mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, grads)
        nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state.nu, grads)
        t = count.astype(jnp.float32)
        step = rate(state.count) * jnp.sqrt(1 - b2**t) / (1 - b1**t)
        decayed = lambda p, on: config.weight_decay * p if on else 0.0  # noqa: E731
        updates = jax.tree.map(
            lambda m, v, p, on: -step * (m / (jnp.sqrt(v) + config.eps) + decayed(p, on)), mu, nu, params, mask
        )
        return updates, optax.ScaleByAdamState(count=count, mu=mu, nu=nu)

    return optax.GradientTransformation(init, update)
