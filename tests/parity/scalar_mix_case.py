"""The case that the norm and the penalty of a mix of layers are tested on: layers, a mask, weights. NumPy alone."""

import numpy as np

LAYERS, ROWS, LENGTH, WIDTH = 3, 4, 5, 6
PENALTY = 0.3


def make(seed: int) -> dict[str, np.ndarray]:
    """Return layers (N, B, L, D) of different scales, the mask (B, L), a row of which is padding, weights and gamma."""
    rng = np.random.default_rng(seed)
    lengths = np.array([LENGTH, 1, 3, 0])
    scales = np.array([0.5, 2.0, 8.0])[:, None, None, None]
    shifts = np.array([0.0, -1.0, 3.0])[:, None, None, None]
    return {
        "layers": (scales * rng.standard_normal((LAYERS, ROWS, LENGTH, WIDTH)) + shifts).astype(np.float32),
        "mask": np.arange(LENGTH) < lengths[:, None],
        "weights": np.array([0.4, -0.7, 0.2], np.float32),
        "gamma": np.float32(1.3),
        "factors": rng.standard_normal((ROWS, LENGTH, WIDTH)).astype(np.float32),
    }
