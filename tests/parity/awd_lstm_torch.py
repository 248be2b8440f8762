"""AWD-LSTM in PyTorch with torch.nn.LSTM as its layers and given dropout masks; nothing of jaxlm is imported here.

Merity et al., 2018. The masks multiply where the original code drops: the rows of the embedding by word, its output,
each recurrent kernel, each layer's output. The scores use the table without the mask.
"""

import numpy as np
import torch

from parity import awd_lstm_case as case


class Model:
    """The language model in float64. masks: as `make_masks`, or None for no dropout."""

    def __init__(self, sizes: case.Sizes, tree: dict, masks: list[np.ndarray] | None):
        self.sizes = sizes
        self.leaves = {name: parameter(value) for name, value in case.to_flat(tree).items()}
        self.masks = None if masks is None else [torch.tensor(mask, dtype=torch.float64) for mask in masks]
        self.layers, before = [], sizes.width
        for number in range(sizes.num_layers):
            units = sizes.units_of(number)
            self.layers.append(torch.nn.LSTM(before, units, batch_first=True).double())
            before = units

    def mask(self, number: int):
        """Return mask `number`, or 1 without dropout."""
        return 1.0 if self.masks is None else self.masks[number]

    def forward(self, ids, state):
        """Return the last layer's output after and before its dropout (B, L, D), and the detached end of each layer."""
        table = self.leaves["embeddings/tokens"]
        x, ends = (table * self.mask(0))[ids] * self.mask(1), []
        raw = x
        for number, lstm in enumerate(self.layers):
            of_layer = {name: self.leaves[f"layer_{number}/{name}"] for name in NAMES}
            weights = {
                "weight_ih_l0": of_layer["in_kernel"].T,
                "weight_hh_l0": (of_layer["state_kernel"] * self.mask(2 + 2 * number)).T,
                "bias_ih_l0": of_layer["in_bias"],
                "bias_hh_l0": of_layer["state_bias"],
            }
            raw, end = torch.func.functional_call(lstm, weights, (x, None if state is None else state[number]))
            x = raw * self.mask(3 + 2 * number)
            ends.append(tuple(part.detach() for part in end))
        return x, raw, ends

    def loss(self, window: np.ndarray, state):
        """Return the training loss, its negative log-likelihood alone, the states, and the carried state."""
        ids, targets = (torch.tensor(part).long() for part in (window[:, :-1], window[:, 1:]))
        x, raw, ends = self.forward(ids, state)
        scores = x @ self.leaves["embeddings/tokens"].T + self.leaves["embeddings/output_bias"]
        nll = torch.nn.functional.cross_entropy(scores.reshape(-1, scores.shape[-1]), targets.reshape(-1))
        activation = case.ALPHA * x.pow(2).mean()
        temporal = case.BETA * (raw[:, 1:] - raw[:, :-1]).pow(2).mean()
        return nll + activation + temporal, nll, x, ends

    def values(self, of) -> dict[str, np.ndarray]:
        """Return `of` of every parameter, by path."""
        return {name: of(leaf).detach().numpy().copy() for name, leaf in self.leaves.items()}


NAMES = ("in_kernel", "state_kernel", "in_bias", "state_bias")


def parameter(values: np.ndarray) -> torch.nn.Parameter:
    """Return a float64 parameter."""
    return torch.nn.Parameter(torch.tensor(np.ascontiguousarray(values), dtype=torch.float64))


def answers(sizes: case.Sizes, tree: dict, masks: list, windows: list) -> dict[str, dict[str, np.ndarray]]:
    """Return the results that jaxlm must find: of the second window, and after updates with a carried state."""
    found = {}
    for name, of in (("plain", None), ("dropped", masks)):
        model = Model(sizes, tree, of)
        _, _, _, state = model.loss(windows[0], None)
        loss, nll, states, _ = model.loss(windows[1], state)
        loss.backward()
        found[name] = {"states": states.detach().numpy(), "loss": np.array(loss.item()), "nll": np.array(nll.item())}
        found[f"{name}_gradient"] = model.values(lambda leaf: leaf.grad)
    found["steps"] = trained(sizes, tree, masks, windows)
    return found


def trained(sizes: case.Sizes, tree: dict, masks: list, windows: list) -> dict[str, np.ndarray]:
    """Return the losses of SGD with rates scaled by the windows' lengths, the parameters, and the mean of iterates."""
    model, state, losses, iterates = Model(sizes, tree, masks), None, [], []
    matrices = [leaf for leaf in model.leaves.values() if leaf.ndim > 1]
    others = [leaf for leaf in model.leaves.values() if leaf.ndim == 1]
    groups = [{"params": matrices, "weight_decay": case.WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=case.RATE)
    for number, window in enumerate(windows):
        for group in optimizer.param_groups:
            group["lr"] = case.RATE * (window.shape[1] - 1) / sizes.length
        optimizer.zero_grad()
        loss, _, _, state = model.loss(window, state)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(model.leaves.values()), case.CLIP_NORM)
        optimizer.step()
        losses.append(loss.item())
        if number >= case.BEGIN:
            iterates.append(model.values(lambda leaf: leaf))
    mean = {f"mean/{name}": np.mean([iterate[name] for iterate in iterates], axis=0) for name in iterates[0]}
    return model.values(lambda leaf: leaf) | mean | {"losses": np.array(losses)}
