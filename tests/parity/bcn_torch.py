"""The biattentive classification network of McCann et al. (2017), section 5, in PyTorch; nothing of jaxlm.

The LSTMs are torch.nn.LSTM on packed rows, with the second of its two biases 0, and the batch norm is BatchNorm1d. Each
example is read alone, without padding, up to its pools. The attention is written as the paper has it: A = X Y^T,
softmax by column, and a product with the transposed weights.
"""

import numpy as np
import torch

from parity import bcn_case as case

SUFFIXES = {"forward": "", "backward": "_reverse"}


def answers(sizes: case.Sizes, tree: dict, rows: dict[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    """Return scores in evaluation; the loss in training, its gradients, and the running statistics after it; float64.

    Rows of weight 0 are left out.
    """
    variables = {name: torch.tensor(leaf).double() for name, leaf in case.to_flat(tree).items()}
    leaves = {name: leaf.requires_grad_() for name, leaf in variables.items() if not name.startswith("batch_stats")}
    real = rows["weights"] > 0
    texts = list(zip(rows["ids"][real], rows["lengths"][real], strict=True))
    pools = torch.stack([pools_of(sizes, leaves, ids, lengths) for ids, lengths in texts])
    norms = norms_of(sizes, variables)
    with torch.no_grad():
        scores = maxout(leaves, norms, pools, train=False)
    labels = torch.tensor(rows["labels"][real]).long()
    loss = torch.nn.functional.cross_entropy(maxout(leaves, norms, pools, train=True), labels)
    loss.backward()
    after = {f"{number}_mean": norm.running_mean.numpy() for number, norm in enumerate(norms)}
    after |= {f"{number}_variance": norm.running_var.numpy() for number, norm in enumerate(norms)}
    forward = {"pools": pools.detach().numpy(), "scores": scores.numpy(), "loss": loss.detach().numpy()}
    return {"forward": forward, "gradient": {name: x.grad.numpy() for name, x in leaves.items()}, "statistics": after}


def pools_of(sizes: case.Sizes, leaves: dict[str, torch.Tensor], ids: np.ndarray, lengths: np.ndarray) -> torch.Tensor:
    """Return the pools of both sides of an example. ids: (C, L); a single text is duplicated."""
    encoded = []
    for text, length in zip(ids, lengths, strict=True):
        words = torch.nn.functional.embedding(torch.tensor(text[:length]).long(), leaves["backbone/embeddings/tokens"])
        kernel, bias = (leaves[f"backbone/embeddings/feed_forward_{name}"] for name in ("kernel", "bias"))
        hidden = torch.relu(torch.nn.functional.linear(words, kernel.T, bias))
        encoded.append(bilstm(sizes, leaves, "backbone/layer_0", hidden))
    x, y = encoded[0], encoded[-1]
    a = x @ y.T
    a_x, a_y = torch.softmax(a, dim=0), torch.softmax(a.T, dim=0)  # by column
    c_x, c_y = a_x.T @ x, a_y.T @ y
    found = []
    for side, own, context in (("first", x, c_y), ("second", y, c_x)):
        joined = torch.cat([own, own - context, own * context], dim=1)
        h = bilstm(sizes, leaves, f"head/{side}/integrator", joined)
        weights = torch.softmax(h @ leaves[f"head/{side}/pool_kernel"], dim=0)
        found += [h.amax(dim=0), h.amin(dim=0), h.mean(dim=0), h.T @ weights]
    return torch.cat(found)


def bilstm(sizes: case.Sizes, leaves: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    """Return the states of one sequence (L, 2 units)."""
    lstm = torch.nn.LSTM(x.shape[1], sizes.units, bidirectional=True).double()
    own = {}
    for way, suffix in SUFFIXES.items():
        of = f"{name}/layer_0_{way}_"
        own[f"weight_ih_l0{suffix}"], own[f"weight_hh_l0{suffix}"] = (
            leaves[f"{of}in_kernel"].T,
            leaves[f"{of}state_kernel"].T,
        )
        own[f"bias_ih_l0{suffix}"], own[f"bias_hh_l0{suffix}"] = (
            leaves[f"{of}bias"],
            torch.zeros(4 * sizes.units).double(),
        )
    states, _ = torch.func.functional_call(lstm, own, (x,))
    return states


def norms_of(sizes: case.Sizes, variables: dict[str, torch.Tensor]) -> list[torch.nn.BatchNorm1d]:
    """Return the batch norms with their running statistics; scale and shift are those of `maxout`."""
    found = []
    for number, (_, size) in enumerate(case.maxout_sizes(sizes, 2)):
        norm = torch.nn.BatchNorm1d(case.POOL * size).double()
        norm.running_mean.data = variables[f"batch_stats/maxout/norm_{number}/mean"].clone()
        norm.running_var.data = variables[f"batch_stats/maxout/norm_{number}/variance"].clone()
        found.append(norm)
    return found


def maxout(
    leaves: dict[str, torch.Tensor], norms: list[torch.nn.BatchNorm1d], x: torch.Tensor, train: bool
) -> torch.Tensor:
    """Return the scores (E, classes) of three batch-normalised maxout layers, without dropout."""
    for number, norm in enumerate(norms):
        y = x @ leaves[f"head/maxout/kernel_{number}"]
        own = {"weight": leaves[f"head/maxout/norm_{number}/scale"], "bias": leaves[f"head/maxout/norm_{number}/bias"]}
        y = torch.func.functional_call(norm.train(train), own, (y,))
        x = y.unflatten(1, (-1, case.POOL)).amax(dim=2)
    return x
