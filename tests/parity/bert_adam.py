"""The optimizer of BERT's code in plain NumPy, float64, written from google-research/bert optimization.py:31-157.

Unlike the usual Adam it corrects no bias; the decay is added to the update, not to the gradient; the rate falls
linearly from step 0 on, and a rising one stands in its place for the first steps, so that the first update has rate 0.
"""

import math
from collections.abc import Callable

import numpy as np


def rate(step: int, num_steps: int, peak_lr: float, warmup_steps: int) -> float:
    """optimization.py:31-54."""
    return peak_lr * (step / warmup_steps if step < warmup_steps else 1 - step / num_steps)


def run(
    params: dict[str, np.ndarray],
    gradient: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]],
    decayed: Callable[[str], bool],
    *,
    num_steps: int,
    peak_lr: float,
    warmup_steps: int,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.01,
    clip_norm: float = 1.0,
) -> dict[str, np.ndarray]:
    """Parameters after `num_steps` updates."""
    p = {name: np.array(value, np.float64) for name, value in params.items()}
    m, v = {name: np.zeros_like(x) for name, x in p.items()}, {name: np.zeros_like(x) for name, x in p.items()}
    for step in range(num_steps):
        g = gradient(p)
        size = math.sqrt(sum(float((x**2).sum()) for x in g.values()))
        g = {name: x * (clip_norm / max(size, clip_norm)) for name, x in g.items()}  # tf.clip_by_global_norm
        lr = rate(step, num_steps, peak_lr, warmup_steps)
        for name in p:
            m[name] = b1 * m[name] + (1 - b1) * g[name]
            v[name] = b2 * v[name] + (1 - b2) * g[name] ** 2
            update = m[name] / (np.sqrt(v[name]) + eps)
            if decayed(name):
                update = update + weight_decay * p[name]
            p[name] = p[name] - lr * update
    return p
