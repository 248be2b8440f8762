"""Write tests/golden/published.npz and .json from Hugging Face: `cd tests && python -m parity.freeze_published`.

Needs PyTorch and transformers (the extra [parity]).
"""

import json
import tempfile
from pathlib import Path

import numpy as np
from safetensors import safe_open

from parity import published_case as case
from parity import published_torch

GOLDEN = Path(__file__).resolve().parent.parent / "golden"


def main() -> None:
    """Write the files: configs and the shapes of tensors as the library saved them, and what the models give."""
    listed, arrays = {}, {}
    for name in case.CASES:
        with tempfile.TemporaryDirectory() as directory:
            published_torch.save(name, case.Sizes(), Path(directory))
            config = json.loads((Path(directory) / "config.json").read_text())
            with safe_open(Path(directory) / "model.safetensors", "numpy") as file:
                shapes = {key: file.get_slice(key).get_shape() for key in sorted(file.keys())}  # noqa: SIM118
        config.pop("transformers_version")
        listed[name] = {"config": config, "tensors": shapes}
        for key, value in published_torch.answers(name, case.Sizes()).items():
            kept = case.summary(key, value) if key.startswith("gradient/") else value
            arrays[f"{name}/{key}"] = np.asarray(kept, np.float32)
    for name in case.CASES:
        if name != "bert":  # which has nothing to learn
            arrays[f"{name}/losses"] = published_torch.losses(name, case.Sizes())
    for name in case.DECODERS:
        arrays[f"{name}/greedy"] = published_torch.greedy(name)
    (GOLDEN / "published.json").write_text(json.dumps(listed, indent=1) + "\n")
    np.savez_compressed(GOLDEN / "published.npz", **arrays)
    print(f"{(GOLDEN / 'published.npz').stat().st_size} bytes")


if __name__ == "__main__":
    main()
