"""The LSTM language model in PyTorch, with torch.nn.LSTM as its layers; nothing of jaxlm is imported here.

Embedding, then per layer torch.nn.LSTM and a linear layer to the width, and scores by the embedding's table.
PyTorch has the gates in the order i, f, g, o with two biases, of which the second is 0 here.
"""

import numpy as np
import torch

from parity import lstm_case as case


class Model(torch.nn.Module):
    """The language model in float64."""

    def __init__(self, sizes: case.Sizes, tree: dict):
        super().__init__()
        d, u = sizes.width, sizes.units
        self.table = parameter(tree["embeddings"]["tokens"])
        self.layers = torch.nn.ModuleList(torch.nn.LSTM(d, u, batch_first=True) for _ in range(sizes.num_layers))
        self.outs = torch.nn.ModuleList(torch.nn.Linear(u, d) for _ in range(sizes.num_layers))
        self.double()
        for number, (lstm, out) in enumerate(zip(self.layers, self.outs, strict=True)):
            leaves = tree[f"layer_{number}"]
            lstm.weight_ih_l0 = parameter(leaves["in_kernel"].T)
            lstm.weight_hh_l0 = parameter(leaves["state_kernel"].T)
            lstm.bias_ih_l0 = parameter(leaves["bias"])
            lstm.bias_hh_l0 = torch.nn.Parameter(torch.zeros_like(lstm.bias_ih_l0), requires_grad=False)
            out.weight, out.bias = parameter(leaves["out_kernel"].T), parameter(leaves["out_bias"])

    def forward(self, ids, state):
        """Return states (B, L, D), and (h, c) of each layer after the last position."""
        x, after = self.table[ids], []
        for number, (lstm, out) in enumerate(zip(self.layers, self.outs, strict=True)):
            y, end = lstm(x, None if state is None else state[number])
            x = out(y)
            after.append(tuple(part.detach() for part in end))
        return x, after

    def loss(self, stretch: np.ndarray, state):
        """Return the mean negative log-likelihood of a stretch, the states, and the carried state."""
        ids = torch.tensor(stretch[:, :-1]).long()
        targets = torch.tensor(stretch[:, 1:]).long()
        x, after = self(ids, state)
        scores = x @ self.table.T
        loss = torch.nn.functional.cross_entropy(scores.reshape(-1, scores.shape[-1]), targets.reshape(-1))
        return loss, x, after

    def leaves(self, of) -> dict[str, np.ndarray]:
        """Return `of` of every parameter in jaxlm's layout, by path."""
        found = {"embeddings/tokens": of(self.table)}
        for number, (lstm, out) in enumerate(zip(self.layers, self.outs, strict=True)):
            found |= {
                f"layer_{number}/in_kernel": of(lstm.weight_ih_l0).T,
                f"layer_{number}/state_kernel": of(lstm.weight_hh_l0).T,
                f"layer_{number}/bias": of(lstm.bias_ih_l0),
                f"layer_{number}/out_kernel": of(out.weight).T,
                f"layer_{number}/out_bias": of(out.bias),
            }
        return {name: value.detach().numpy().copy() for name, value in found.items()}


def parameter(values: np.ndarray) -> torch.nn.Parameter:
    """Return a float64 parameter."""
    return torch.nn.Parameter(torch.tensor(np.ascontiguousarray(values), dtype=torch.float64))


def answers(sizes: case.Sizes, tree: dict, stretches: np.ndarray) -> dict[str, dict[str, np.ndarray]]:
    """Return what jaxlm must find: of the second stretch, and after ten updates with a carried state."""
    model = Model(sizes, tree)
    _, _, state = model.loss(stretches[0], None)
    loss, states, _ = model.loss(stretches[1], state)
    loss.backward()
    found = {
        "forward": {"states": states.detach().numpy(), "loss": np.array(loss.item())},
        "gradient": model.leaves(lambda leaf: leaf.grad),
    }
    decayed = [leaf for leaf in model.parameters() if leaf.requires_grad and leaf.ndim > 1]
    others = [leaf for leaf in model.parameters() if leaf.requires_grad and leaf.ndim == 1]
    groups = [{"params": decayed, "weight_decay": case.WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=case.RATE, betas=(case.BETA1, case.BETA2), eps=case.EPS)
    losses, state = [], None
    for stretch in stretches:
        optimizer.zero_grad()
        loss, _, state = model.loss(stretch, state)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    found["steps"] = model.leaves(lambda leaf: leaf) | {"losses": np.array(losses)}
    return found
