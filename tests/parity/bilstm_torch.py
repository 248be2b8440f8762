"""The BiLSTM over words in PyTorch: torch.nn.Embedding, Conv1d and packed bidirectional LSTMs; nothing of jaxlm.

PyTorch has the gates in the order i, f, g, o with two biases, of which the second is 0 here.
"""

import numpy as np
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from parity import bilstm_case as case

SUFFIXES = {"forward": "", "backward": "_reverse"}


def answers(sizes: case.Sizes, tree: dict, rows: dict[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    """Return the layers of the rows, and the gradient of the sum of the states times their factors, in float64."""
    leaves = leaves_of(tree)
    layers = layers_of(sizes, leaves, rows)
    torch.sum(layers[-1] * torch.tensor(rows["factors"])).backward()
    found = {f"layer_{number}": x.detach().numpy() for number, x in enumerate(layers)}
    return {"states": found, "gradient": {name: leaf.grad.numpy() for name, leaf in leaves.items()}}


def leaves_of(tree: dict) -> dict[str, torch.Tensor]:
    """Return the parameters by their path, in float64, for gradients."""
    return {name: torch.tensor(leaf).double().requires_grad_() for name, leaf in case.to_flat(tree).items()}


def layers_of(sizes: case.Sizes, leaves: dict[str, torch.Tensor], rows: dict[str, np.ndarray]) -> list[torch.Tensor]:
    """Return the states of each layer of LSTMs (B, L, width)."""
    ids, characters = torch.tensor(rows["ids"]).long(), torch.tensor(rows["characters"]).long()
    features = []
    vectors = torch.nn.functional.embedding(characters, leaves["embeddings/characters/table"]).flatten(0, 1)
    for number in range(len(sizes.filters)):
        kernel = leaves[f"embeddings/characters/filters_{number}_kernel"].permute(2, 1, 0)
        bias = leaves[f"embeddings/characters/filters_{number}_bias"]
        convolved = torch.nn.functional.conv1d(vectors.transpose(1, 2), kernel, bias)
        features.append(torch.relu(convolved).amax(dim=2))
    spelled = torch.cat(features, dim=1).reshape(*ids.shape, -1)
    x = torch.cat([torch.nn.functional.embedding(ids, leaves["embeddings/tokens"]), spelled], dim=2)
    found = []
    for layer, units in enumerate(sizes.units):
        lstm = torch.nn.LSTM(
            x.shape[2], units, batch_first=True, bidirectional=True, proj_size=sizes.width // 2 * sizes.projected
        ).double()
        own = {}
        for way, suffix in SUFFIXES.items():
            of = f"layer_{layer}/layer_0_{way}_"
            own[f"weight_ih_l0{suffix}"] = leaves[f"{of}in_kernel"].T
            own[f"weight_hh_l0{suffix}"] = leaves[f"{of}state_kernel"].T
            own[f"bias_ih_l0{suffix}"] = leaves[f"{of}bias"]
            own[f"bias_hh_l0{suffix}"] = torch.zeros_like(leaves[f"{of}bias"])
            if sizes.projected:
                own[f"weight_hr_l0{suffix}"] = leaves[f"{of}out_kernel"].T
        packed = pack_padded_sequence(x, torch.tensor(rows["lengths"]).long(), batch_first=True, enforce_sorted=False)
        y, _ = torch.func.functional_call(lstm, own, (packed,))
        x, _ = pad_packed_sequence(y, batch_first=True, total_length=sizes.length)
        found.append(x)
    return found
