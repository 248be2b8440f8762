"""Write tests/golden/bert_parity.npz from Hugging Face's BERT and NumPy: `cd tests && python -m parity.freeze_bert`.

Needs PyTorch and transformers (the extra [parity]). All numbers are made in float64 and kept as float32.
"""

from pathlib import Path

import numpy as np

from parity import bert_case as case
from parity import bert_torch

FILE = Path(__file__).resolve().parent.parent / "golden" / "bert_parity.npz"
CASES = {"tanh": case.Sizes(), "erf": case.Sizes(activation="gelu_erf")}


def answers(sizes: case.Sizes, tree: dict, batch: dict, seed: int) -> dict[str, dict[str, np.ndarray]]:
    """What jaxlm must find: groups of named arrays."""
    flat = case.to_flat(tree)
    losses, after = bert_torch.adamw_steps(sizes, flat, batch)
    found = {
        "forward": bert_torch.forward(sizes, flat, batch) | {"adamw_losses": np.array(losses)},
        "gradient": bert_torch.gradient(sizes, flat, batch),
        "adamw": after,
        "bert_adamw": bert_torch.bert_adamw_steps(sizes, flat, batch),
    }
    for kind in case.TASKS:
        found[kind] = bert_torch.task(sizes, flat, kind, *case.make_task(sizes, kind, seed))
    return found


def main() -> None:
    """Write the file."""
    arrays: dict[str, np.ndarray] = {}
    for name, sizes in CASES.items():
        tree, batch = case.make_tree(sizes, seed=1), case.make_pairs(sizes, seed=2)
        groups = {"params": case.to_flat(tree), "batch": batch} | answers(sizes, tree, batch, seed=3)
        if name == "erf":  # what the activation reaches and no more
            groups = {"forward": groups["forward"], "gradient": groups["gradient"]}
        for group, members in groups.items():
            for key, value in members.items():
                arrays[f"{name}/{group}/{key}"] = value if group == "batch" else np.asarray(value).astype(np.float32)
    arrays |= {f"lstm/lstm/{key}": np.float32(value) for key, value in bert_torch.lstm(case.make_lstm(seed=4)).items()}
    np.savez_compressed(FILE, **arrays)
    print(f"{FILE.name}: {FILE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
