"""The case that cross-view training is tested on: an encoder over words, modules of the head, tags. NumPy alone."""

import numpy as np

from parity import bilstm_case

SIZES = bilstm_case.Sizes(rows=5, length=7)
VIEWS = ("full", "forwards", "backwards", "future", "past")
SMOOTHING, TAGS = 0.1, 5


def make_tree(sizes: bilstm_case.Sizes, seed: int) -> dict:
    """Return float32 parameters in jaxlm's layout, all of them random."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return (0.5 * rng.standard_normal(shape)).astype(np.float32)

    hidden, head = sizes.width // 2, {}
    for name in ("primary", *VIEWS):
        of_both = name in ("primary", "full")
        leaves = {"kernel": normal(hidden, TAGS), "bias": normal(TAGS)}
        for number in range(1 + of_both):
            leaves[f"projection_{number}_kernel"] = normal(sizes.width if of_both else hidden, hidden)
            leaves[f"projection_{number}_bias"] = normal(hidden)
        head[name] = leaves
    return {"backbone": bilstm_case.make_tree(sizes, seed), "head": head}


def make_rows(sizes: bilstm_case.Sizes, seed: int) -> dict[str, np.ndarray]:
    """Return rows with the tags of their words (B, L): one of a single word, a full one, and the last all padding."""
    rows = bilstm_case.make_rows(sizes, seed)
    tags = np.random.default_rng(seed).integers(TAGS, size=rows["ids"].shape).astype(np.int32)
    tags[np.arange(sizes.length) >= rows["lengths"][:, None]] = -1
    weights = np.ones(sizes.rows, np.float32)
    weights[-1] = 0
    return rows | {"tags": tags, "weights": weights}
