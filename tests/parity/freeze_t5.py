"""Write tests/golden/t5_parity.npz from Hugging Face's T5: `cd tests && python -m parity.freeze_t5`.

Needs PyTorch and transformers (the extra [parity]). All numbers are made in float64 and kept as float32. The steps of
the optimizer are algorithm 4 of Shazeer and Stern (2018) in NumPy with Hugging Face's gradients.
"""

import os

import numpy as np

from parity import t5_case as case
from parity import t5_huggingface as theirs
from parity.check import freeze

GENERATED = 64


def adafactor(p: np.ndarray, gradients: list[np.ndarray], rate: float) -> np.ndarray:
    """Return a parameter after the newest of these gradients; it is too small to be factored."""
    t, v = len(gradients), 0.0
    for number, g in enumerate(gradients, start=1):
        b = 1 - number**-0.8
        v = b * v + (1 - b) * (g**2 + 1e-30)
    u = gradients[t - 1] / np.sqrt(v)
    u = u / max(1.0, np.sqrt((u**2).mean()))
    return p - rate * max(1e-3, np.sqrt((p**2).mean())) * u


def answers(sizes: case.Sizes, tree: dict, rows: dict) -> dict[str, dict[str, np.ndarray]]:
    """What jaxlm must find: groups of named arrays."""
    flat = {name: np.float64(value) for name, value in case.to_flat(tree).items()}
    model = theirs.model_of(sizes, flat)
    logits, loss = theirs.outputs(model, rows)
    found = {
        "forward": {"logits": logits.detach().numpy(), "loss": np.array(loss.item())},
        "gradient": theirs.gradient(model, rows),
        "generated": {
            "greedy": theirs.generated(model, rows, GENERATED, 1),
            "beams": theirs.generated(model, rows, GENERATED, 3),
        },
    }
    gradients: dict[str, list[np.ndarray]] = {name: [] for name in flat}
    for _ in range(case.NUM_STEPS):
        for name, gradient in theirs.gradient(theirs.model_of(sizes, flat), rows).items():
            gradients[name].append(gradient)
        flat = {name: adafactor(p, gradients[name], case.LEARNING_RATE) for name, p in flat.items()}
    return found | {"adafactor": flat}


def main() -> None:
    """Write the file."""
    groups = {}
    for name, sizes in case.CASES.items():
        tree, rows = case.make_tree(sizes, case.SEEDS[name]), case.make_rows(sizes, seed=2)
        found = {"rows": rows} | answers(sizes, tree, rows)
        groups |= {f"{name}:{group}": members for group, members in found.items()}
    freeze("t5", groups)


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    main()
