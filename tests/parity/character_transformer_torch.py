"""The character Transformer in PyTorch, with its losses written out; nothing of jaxlm is imported here.

Al-Rfou et al., 2019. Norms before each branch. Float64.
"""

import math

import numpy as np
import torch
from torch.nn import functional

from parity import character_transformer_case as case


class Model:
    """The language model and its auxiliary classifiers, from parameters by path."""

    def __init__(self, sizes: case.Sizes, tree: dict[str, np.ndarray]):
        self.sizes = sizes
        self.leaves = {name: torch.nn.Parameter(torch.tensor(np.float64(value))) for name, value in tree.items()}

    def norm(self, x, path: str, layer: int | None = None):
        """Return the norm of x with the scale and bias at `path`."""
        scale, bias = (self.leaves[f"{path}/{part}"] for part in ("scale", "bias"))
        if layer is not None:
            scale, bias = scale[layer], bias[layer]
        return functional.layer_norm(x, x.shape[-1:], scale, bias, eps=1e-5)

    def states(self, batch: dict[str, np.ndarray]):
        """Return the residual stream after each layer, a list of (B, L, D)."""
        ids, positions, segments = (torch.tensor(batch[name]).long() for name in ("ids", "positions", "segments"))
        x, found = self.leaves["backbone/embeddings/tokens"][ids], []
        sees = torch.ones(ids.shape[1], ids.shape[1]).tril().bool()[None] & (segments[:, :, None] == segments[:, None])
        for layer in range(self.sizes.num_layers):
            own = {name: leaf[layer] for name, leaf in self.leaves.items() if name.startswith("backbone/blocks/")}
            own = {name.removeprefix("backbone/blocks/"): leaf for name, leaf in own.items()}
            x = x + own["positions"][positions]
            normed = self.norm(x, "backbone/blocks/attention_norm", layer)
            kernel, bias = own["attention/qkv_kernel"], own["attention/qkv_bias"]
            q, k, v = (
                torch.einsum("bld,dhk->bhlk", normed, kernel[:, part]) + bias[part][None, :, None] for part in range(3)
            )
            scores = torch.einsum("bhlk,bhsk->bhls", q, k) / math.sqrt(self.sizes.head_width)
            weights = scores.masked_fill(~sees[:, None], -1e30).softmax(-1)
            read = torch.einsum("bhls,bhsk->blhk", weights, v)
            x = x + torch.einsum("blhk,hkd->bld", read, own["attention/out_kernel"]) + own["attention/out_bias"]
            normed = self.norm(x, "backbone/blocks/feed_forward_norm", layer)
            hidden = (normed @ own["feed_forward/in_kernel"] + own["feed_forward/in_bias"]).relu()
            x = x + hidden @ own["feed_forward/out_kernel"] + own["feed_forward/out_bias"]
            found.append(x)
        return found

    def loss(self, batch: dict[str, np.ndarray], step: int, num_steps: int):
        """Return the loss of an update, its terms, and the scores of the next token (B, L, V)."""
        *below, top = self.states(batch)
        top = self.norm(top, "backbone/final_norm")
        heads = "head/auxiliary/"
        terms = {
            "nll": self.nll(top, self.leaves["head/classifier/kernel"], batch, 1),
            "second_nll": self.nll(top, self.leaves[f"{heads}second_nll/kernel"], batch, 2),
        }
        total = terms["nll"] + case.SECOND * terms["second_nll"]
        for layer, x in enumerate(below):
            x = self.norm(x, f"{heads}norm", layer)
            first = self.nll(x, self.leaves[f"{heads}layer_nll/kernel"][layer], batch, 1)
            second = self.nll(x, self.leaves[f"{heads}layer_second_nll/kernel"][layer], batch, 2)
            terms[f"layer_nll/{layer}"], terms[f"layer_second_nll/{layer}"] = first, second
            if step / num_steps < (layer + 1) / (2 * self.sizes.num_layers) - 1e-12:
                total = total + case.INTERMEDIATE * (first + case.SECOND * second)
        return total, terms, top @ self.leaves["head/classifier/kernel"].T

    def nll(self, x, kernel, batch: dict[str, np.ndarray], ahead: int):
        """Return the mean loss of the token `ahead` of each position, of those in the position's own segment."""
        losses = []
        log_probabilities = (x @ kernel.T).log_softmax(-1)
        for row in range(self.sizes.rows):
            for position in range(self.sizes.length - ahead + 1):
                at = position + ahead - 1
                if batch["weights"][row, at] and batch["segments"][row, position] == batch["segments"][row, at]:
                    losses.append(-log_probabilities[row, position, int(batch["targets"][row, at])])
        return torch.stack(losses).mean() if losses else torch.zeros((), dtype=torch.float64)

    def values(self, of) -> dict[str, np.ndarray]:
        """Return `of` of every parameter, by path."""
        return {name: of(leaf).detach().numpy().copy() for name, leaf in self.leaves.items()}


def answers(sizes: case.Sizes, tree: dict, batches: list) -> dict[str, dict[str, np.ndarray]]:
    """Return the results that jaxlm must find: of the first update, and after NUM_STEPS updates of momentum SGD."""
    model = Model(sizes, tree)
    total, terms, scores = model.loss(batches[0], 0, case.NUM_STEPS)
    total.backward()
    first = {"loss": np.array(total.item()), "scores": scores.detach().numpy()}
    first |= {name: np.array(value.item()) for name, value in terms.items()}
    gradient = model.values(lambda leaf: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
    model, losses = Model(sizes, tree), []
    optimizer = torch.optim.SGD(model.leaves.values(), lr=case.RATE, momentum=case.MOMENTUM)
    for step, batch in enumerate(batches):
        for leaf in model.leaves.values():
            leaf.grad = torch.zeros_like(leaf)  # None would also stop the momentum of a layer that has no loss
        total, _, _ = model.loss(batch, step, case.NUM_STEPS)
        total.backward()
        optimizer.step()
        losses.append(total.item())
    return {
        "first": first,
        "gradient": gradient,
        "steps": model.values(lambda leaf: leaf) | {"losses": np.array(losses)},
    }
