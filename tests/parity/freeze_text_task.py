"""Write tests/golden/text_task_parity.npz from Hugging Face: `cd tests && python -m parity.freeze_text_task`.

Needs PyTorch and transformers (the extra [parity]). Labels of -100 leave the prompts out of GPT2LMHeadModel's loss;
the smoothed loss is that of transformers' LabelSmoother.
"""

import numpy as np
import torch
from transformers.trainer_pt_utils import LabelSmoother

from parity import generate_case, published_torch
from parity import text_task_case as case
from parity.check import Groups, freeze


def answers() -> Groups:
    """The losses, the gradients of the two tables, and the norm of the whole gradient."""
    found = published_torch.model(case.NAME, case.SIZES, generate_case.tensor).double()
    longest = max(len(prompt) + len(target) for prompt, target in case.rows())
    ids, labels = (torch.full((len(case.rows()), longest), fill) for fill in (0, -100))
    for row, (prompt, target) in enumerate(case.rows()):
        ids[row, : len(prompt) + len(target)] = torch.tensor([*prompt, *target])
        labels[row, len(prompt) : len(prompt) + len(target)] = torch.tensor(target)
    groups: Groups = {}
    for name in ("plain", "smoothed"):
        found.zero_grad()
        outputs = found(input_ids=ids, labels=labels)
        smoothed = LabelSmoother(epsilon=case.SMOOTHING)(outputs, labels, shift_labels=True)
        loss = outputs.loss if name == "plain" else smoothed
        loss.backward()
        gradient = {key: one.grad.numpy() for key, one in found.named_parameters()}
        norm = np.sqrt(sum(np.sum(one**2) for one in gradient.values()))
        watched = {key.split(".")[1]: gradient[key] for key in case.WATCHED}
        groups[name] = {"loss": np.array(loss.item()), "norm": np.array(norm)} | watched
    return groups


def main() -> None:
    """Write the file."""
    freeze("text_task", answers())


if __name__ == "__main__":
    main()
