"""The losses of cross-view training in PyTorch, after the original's tagging_module.py and model_helpers.py.

As there, a sentence stands between a place for its beginning and one for its end, which the mask leaves out, and labels
and mask are rolled.
"""

import numpy as np
import torch

from parity import bilstm_case, bilstm_torch
from parity import cross_view_case as case


def answers(sizes: bilstm_case.Sizes, tree: dict, rows: dict[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    """Return the losses of the primary module and of each view, and the gradients of both kinds of steps."""
    losses, gradients = {}, {}
    for step in ("labelled", "unlabelled"):
        leaves = bilstm_torch.leaves_of(tree)
        encoder = {name.removeprefix("backbone/"): leaf for name, leaf in leaves.items() if name.startswith("backbone")}
        layers = [framed(x) for x in bilstm_torch.layers_of(sizes, encoder, rows)]
        found = step_losses(step, layers, leaves, rows)
        sum(found.values()).backward()
        losses |= {name: loss.detach().numpy() for name, loss in found.items()}
        grads = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}
        gradients[step] = {name: grad.numpy() for name, grad in grads.items()}
    return {"losses": losses, **gradients}


def step_losses(step: str, layers: list, leaves: dict, rows: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Return the losses of a step by the names of the modules that it trains."""
    uni, bi = layers[0], layers[-1]
    half = uni.shape[-1] // 2
    uni_fw, uni_bw = uni[..., :half], uni[..., half:]
    tags = torch.tensor(rows["tags"]).long()
    mask = framed(((tags >= 0) * torch.tensor(rows["weights"])[:, None])[..., None])[..., 0].double()

    def logits(name: str, inputs: list, activate: bool = True) -> torch.Tensor:
        own = {
            key.removeprefix(f"head/{name}/"): leaf for key, leaf in leaves.items() if key.startswith(f"head/{name}/")
        }
        projected = sum(
            torch.nn.functional.linear(x, own[f"projection_{k}_kernel"].T, own[f"projection_{k}_bias"])
            for k, x in enumerate(inputs)
        )
        projected = torch.relu(projected) if activate else projected
        return torch.nn.functional.linear(projected, own["kernel"].T, own["bias"])

    primary = logits("primary", [uni, bi])
    if step == "labelled":
        targets = torch.nn.functional.one_hot(framed(tags.clamp(min=0)[..., None])[..., 0], case.TAGS).double()
        targets = targets * (1 - case.SMOOTHING) + case.SMOOTHING / case.TAGS
        return {"primary": masked_loss(primary, targets, mask)}
    targets = torch.softmax(primary, dim=-1).detach()
    return {
        "full": masked_loss(logits("full", [uni, bi], activate=False), targets, mask),
        "forwards": masked_loss(logits("forwards", [uni_fw]), targets, mask),
        "backwards": masked_loss(logits("backwards", [uni_bw]), targets, mask),
        "future": masked_loss(logits("future", [uni_fw]), targets, mask, roll=1),
        "past": masked_loss(logits("past", [uni_bw]), targets, mask, roll=-1),
    }


def framed(x: torch.Tensor) -> torch.Tensor:
    """Return (B, L, …) with a place of zeros before and after."""
    return torch.nn.functional.pad(x, (0, 0, 1, 1))


def masked_loss(logits: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor, roll: int = 0) -> torch.Tensor:
    """Return the mean cross-entropy over the places of the mask, with the targets of the place `roll` further on."""
    targets, mask = targets.roll(-roll, dims=1), mask * mask.roll(-roll, dims=1)
    each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets.transpose(1, 2), reduction="none")
    return torch.sum(mask * each) / torch.sum(mask)
