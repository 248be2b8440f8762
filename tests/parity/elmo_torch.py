"""Training of ELMo's language model in PyTorch, float64: Conv1d, LSTM with a projection, Adagrad, a clipped norm.

As in bilm-tf (bilm/training.py:105-526, 650-700): each direction reads a stream of its own, its state continues from
batch to batch without a gradient, the loss is the mean of both directions times the words of a row, over all ids. The
forget gate has 1 added to its bias. Nothing of jaxlm is imported here.
"""

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from parity import elmo_case as case

WAYS = ("forward", "backward")


class LanguageModel(nn.Module):
    """The modules; `load` gives them tensors by bilm-tf's names."""

    def __init__(self, training: case.Training) -> None:
        super().__init__()
        sizes, p = training.sizes, training.sizes.projection
        features = sum(number for _, number in sizes.filters)
        self.characters = nn.Embedding(261, sizes.character_width)
        self.filters = nn.ModuleList(nn.Conv1d(sizes.character_width, n, width) for width, n in sizes.filters)
        self.carry, self.transform = (
            nn.ModuleList(nn.Linear(features, features) for _ in range(sizes.num_highways)) for _ in range(2)
        )
        self.projection = nn.Linear(features, p)
        self.lstms = nn.ModuleList(
            nn.ModuleList(nn.LSTM(p, sizes.units, proj_size=p, batch_first=True) for _ in range(sizes.num_layers))
            for _ in WAYS
        )
        self.softmax = nn.Linear(p, training.vocab_size)

    def states(self, ids_BLC: np.ndarray, way: int, before: list[Any]) -> tuple[torch.Tensor, list[Any]]:
        """Return the states of a direction (B, L, P), and the state of each layer after them."""
        x = self.characters(torch.tensor(ids_BLC).long().flatten(0, 1)).transpose(1, 2)
        x = torch.cat([functional.relu(filters(x).amax(dim=2)) for filters in self.filters], dim=1)
        for carry, transform in zip(self.carry, self.transform, strict=True):
            gate = torch.sigmoid(carry(x))
            x = gate * functional.relu(transform(x)) + (1 - gate) * x
        x, after = self.projection(x).unflatten(0, ids_BLC.shape[:2]), []
        for number, (lstm, state) in enumerate(zip(self.lstms[way], before, strict=True)):
            y, end = lstm(x, state)
            x = x + y if number else y
            after.append(tuple(part.detach() for part in end))
        return x, after


def pairs(model: LanguageModel, sizes: case.Sizes) -> list[tuple[torch.Tensor, str, Any]]:
    """Return each parameter, its path in jaxlm's tree, and the change of its layout, which is its own inverse."""
    same, transposed = (lambda x: x), (lambda x: x.T)
    found = [(model.characters.weight, "embeddings/table", same)]
    for number, filters in enumerate(model.filters):
        reverse = lambda x: x.transpose(2, 1, 0)  # noqa: E731
        found.append((filters.weight, f"embeddings/filters_{number}_kernel", reverse))
        found.append((filters.bias, f"embeddings/filters_{number}_bias", same))
    dense = {"projection": model.projection}
    for number in range(sizes.num_highways):
        dense |= {
            f"highway_{number}_carry": model.carry[number],
            f"highway_{number}_transform": model.transform[number],
        }
    for name, linear in dense.items():
        found.append((linear.weight, f"embeddings/{name}_kernel", transposed))
        found.append((linear.bias, f"embeddings/{name}_bias", same))
    for way, lstms in zip(WAYS, model.lstms, strict=True):
        for number, lstm in enumerate(lstms):
            path = f"layer_{number}/{way}"
            found += [
                (lstm.weight_ih_l0, f"{path}/in_kernel", transposed),
                (lstm.weight_hh_l0, f"{path}/state_kernel", transposed),
                (lstm.weight_hr_l0, f"{path}/out_kernel", transposed),
                (lstm.bias_ih_l0, f"{path}/bias", same),
            ]
    return [*found, (model.softmax.weight, "classifier/kernel", same), (model.softmax.bias, "classifier/bias", same)]


def steps(training: case.Training, leaves: dict[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    """Return the loss and the norm of the gradient of each step, and the parameters after the last one.

    leaves: the parameters by their paths in jaxlm's tree.
    """
    model = LanguageModel(training).double()
    table = pairs(model, training.sizes)
    with torch.no_grad():
        for parameter, path, change in table:
            parameter.copy_(torch.tensor(np.float64(change(leaves[path]))))
        for lstms in model.lstms:
            for lstm in lstms:  # the second bias is the forget gate's 1
                lstm.bias_hh_l0.zero_()[training.sizes.units : 2 * training.sizes.units] = 1.0
                lstm.bias_hh_l0.requires_grad_(False)
    trained = [parameter for parameter, _, _ in table]
    optimizer = torch.optim.Adagrad(trained, lr=training.learning_rate, initial_accumulator_value=1.0, eps=0.0)
    carried: list[list[Any]] = [[None] * training.sizes.num_layers for _ in WAYS]
    losses, norms = [], []
    for batch in case.make_training_batches(training, seed=6):
        total: Any = 0.0
        for way, name in enumerate(WAYS):
            states, carried[way] = model.states(batch[name], way, carried[way])
            targets = torch.tensor(batch[f"{name}_targets"]).long()
            total = total + functional.cross_entropy(model.softmax(states).flatten(0, 1), targets.flatten()) / 2
        optimizer.zero_grad()
        (training.scale * total).backward()
        norms.append(float(nn.utils.clip_grad_norm_(trained, training.clip_norm)))
        optimizer.step()
        losses.append(total.item())
    after = {path: change(parameter.detach().numpy()).copy() for parameter, path, change in table}
    return {"steps": {"loss": np.array(losses), "norm": np.array(norms)}, "after": after}


def answers(training: case.Training) -> dict[str, dict[str, np.ndarray]]:
    """Return what jaxlm must find."""
    return steps(training, case.training_leaves(training))
