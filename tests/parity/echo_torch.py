"""Echo in PyTorch, as a loop over the tokens of a row; nothing of jaxlm is imported here.

Each layer keeps the sum and the number of the states that it has seen, and adds tanh(W^T mean + b) to the next one.
"""

import numpy as np
import torch

from parity import lstm_case as case


def loss_of(leaves: dict, num_layers: int, stretch: np.ndarray, carry: tuple[list, int]):
    """Return the mean negative log-likelihood of a stretch, its states (B, L, D), and the carry after it."""
    ids, targets = torch.tensor(stretch[:, :-1]).long(), torch.tensor(stretch[:, 1:]).long()
    (sums, count), states = carry, []
    for t in range(ids.shape[1]):
        x, count, after = leaves["embeddings/tokens"][ids[:, t]], count + 1, []
        for number in range(num_layers):
            after.append(sums[number] + x)
            x = x + torch.tanh(after[-1] / count @ leaves[f"layer_{number}/kernel"] + leaves[f"layer_{number}/bias"])
        sums = after
        states.append(x)
    found = torch.stack(states, 1)
    scores = found @ leaves["embeddings/tokens"].T
    loss = torch.nn.functional.cross_entropy(scores.reshape(-1, scores.shape[-1]), targets.reshape(-1))
    return loss, found, ([x.detach() for x in sums], count)


def answers(sizes: case.Sizes, tree: dict, stretches: np.ndarray) -> dict[str, dict[str, np.ndarray]]:
    """Return what jaxlm must find: of the second stretch, and after ten updates with a carried state."""
    leaves = {name: torch.tensor(np.float64(x), requires_grad=True) for name, x in case.to_flat(tree).items()}
    nothing: tuple = ([0.0] * sizes.num_layers, 0)
    _, _, carry = loss_of(leaves, sizes.num_layers, stretches[0], nothing)
    loss, states, _ = loss_of(leaves, sizes.num_layers, stretches[1], carry)
    loss.backward()
    found = {
        "forward": {"states": states.detach().numpy(), "loss": np.array(loss.item())},
        "gradient": {name: leaf.grad.numpy().copy() for name, leaf in leaves.items()},
    }
    groups = [
        {"params": [leaf for leaf in leaves.values() if leaf.ndim == 2], "weight_decay": case.WEIGHT_DECAY},
        {"params": [leaf for leaf in leaves.values() if leaf.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=case.RATE, betas=(case.BETA1, case.BETA2), eps=case.EPS)
    losses, carry = [], nothing
    for stretch in stretches:
        optimizer.zero_grad()
        loss, _, carry = loss_of(leaves, sizes.num_layers, stretch, carry)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    steps = {name: leaf.detach().numpy().copy() for name, leaf in leaves.items()}
    found["steps"] = steps | {"losses": np.array(losses)}
    return found
