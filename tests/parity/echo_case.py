"""The parameters that echo's parity is tested on; its sizes and texts are those of the LSTM. NumPy alone."""

import numpy as np

from parity import lstm_case as case


def make_tree(sizes: case.Sizes, seed: int) -> dict:
    """Return float32 parameters of the backbone in jaxlm's layout, all of them random."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return (0.4 * rng.standard_normal(shape)).astype(np.float32)

    layers = {
        f"layer_{number}": {"kernel": normal(sizes.width, sizes.width), "bias": normal(sizes.width)}
        for number in range(sizes.num_layers)
    }
    return {"embeddings": {"tokens": normal(sizes.vocab_size, sizes.width)}, **layers}
