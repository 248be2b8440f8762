"""Write tests/golden/gpt_parity.npz from the PyTorch and NumPy statements: `cd tests && python -m parity.freeze_gpt`.

Needs PyTorch (the extra [parity]). All numbers are made in float64 and kept as float32.
"""

import numpy as np
import torch

from parity import gpt_case as case
from parity import gpt_torch, openai_adam
from parity.check import freeze


def answers(sizes: case.Sizes, tree: dict, rows: dict) -> dict[str, dict[str, np.ndarray]]:
    """What jaxlm must find: groups of named arrays."""
    flat, heads = case.to_flat(tree), sizes.num_heads
    with torch.no_grad():
        h = gpt_torch.states({name: torch.tensor(value) for name, value in flat.items()}, rows, heads).numpy()
    loss, gradient = gpt_torch.loss_and_gradient(flat, rows, heads)
    losses, after = gpt_torch.adamw_steps(flat, rows, heads)
    found = {
        "forward": {"states": h, "loss": np.array(loss), "adamw_losses": np.array(losses)},
        "gradient": gradient,
        "adamw": after,
    }
    for schedule in openai_adam.SCHEDULES:
        found[f"openai_{schedule}"] = openai_adam.run(
            flat,
            lambda p, _: gpt_torch.loss_and_gradient(p, rows, heads)[1],
            num_steps=case.NUM_STEPS,
            peak_lr=case.PEAK_LR,
            schedule=schedule,
            warmup=case.WARMUP_STEPS / case.NUM_STEPS,
            b1=case.BETA1,
            b2=case.BETA2,
            e=case.EPS,
            l2=case.WEIGHT_DECAY,
            max_grad_norm=case.CLIP_NORM,
        )
    return found


def main() -> None:
    """Write the file."""
    sizes = case.Sizes()
    tree, rows = case.make_tree(sizes, seed=1), case.make_rows(sizes, seed=2)
    groups = {"params": case.to_flat(tree), "rows": rows} | answers(sizes, tree, rows)
    freeze("gpt", groups)


if __name__ == "__main__":
    main()
