"""The Adam of GPT-1's code in plain NumPy, float64, written from openai/finetune-transformer-lm opt.py:5-49.

Unlike the usual Adam, eps is added to the root of the uncorrected second moment, the schedule is read before the step
is counted (the first update of a warmup has rate 0), and the decay is scaled by the bias correction too.
"""

import math
from collections.abc import Callable

import numpy as np


def warmup_linear(x: float, warmup: float) -> float:
    """opt.py:13-15; `s` is 1 up to the warmup's share, and the whole is multiplied by 1 - x."""
    s = 1.0 if x <= warmup else 0.0
    return (s * (x / warmup if warmup else 0.0) + (1 - s)) * (1 - x)


def warmup_cosine(x: float, warmup: float) -> float:
    """opt.py:5-7; the cosine is measured from the start of the run."""
    s = 1.0 if x <= warmup else 0.0
    return s * (x / warmup if warmup else 0.0) + (1 - s) * (0.5 * (1 + math.cos(math.pi * x)))


SCHEDULES = {"linear": warmup_linear, "cosine": warmup_cosine}


def run(
    params: dict[str, np.ndarray],
    gradient: Callable[[dict[str, np.ndarray], int], dict[str, np.ndarray]],
    *,
    num_steps: int,
    peak_lr: float,
    schedule: str,
    warmup: float,
    b1: float = 0.9,
    b2: float = 0.999,
    e: float = 1e-8,
    l2: float = 0.01,
    max_grad_norm: float = 1.0,
) -> dict[str, np.ndarray]:
    """Parameters after `num_steps` updates; rank 1 is not decayed. gradient(params, t): of update t = 0, 1, …"""
    p = {name: np.array(value, np.float64) for name, value in params.items()}
    m, v = {name: np.zeros_like(x) for name, x in p.items()}, {name: np.zeros_like(x) for name, x in p.items()}
    for t_prev in range(num_steps):
        g = gradient(p, t_prev)
        if max_grad_norm > 0:  # tf.clip_by_global_norm
            size = math.sqrt(sum(float((x**2).sum()) for x in g.values()))
            g = {name: x * (max_grad_norm / max(size, max_grad_norm)) for name, x in g.items()}
        t = t_prev + 1
        lrt = peak_lr * math.sqrt(1 - b2**t) / (1 - b1**t) * SCHEDULES[schedule](t_prev / num_steps, warmup)
        for name in p:
            m[name] = b1 * m[name] + (1 - b1) * g[name]
            v[name] = b2 * v[name] + (1 - b2) * g[name] * g[name]
            pt = lrt * m[name] / (np.sqrt(v[name]) + e)
            if p[name].ndim > 1:
                pt = pt + lrt * l2 * p[name]
            p[name] = p[name] - pt
    return p
