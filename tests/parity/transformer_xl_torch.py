"""Transformer-XL in PyTorch, with a loop over the queries of each row; nothing of jaxlm is imported here.

Dai et al., 2019, section 3.3. The distance of every query and key is written out, so there is no shift, and the memory
is a list of states that grows to its length, so there are no empty slots. same_length shows each token the M tokens
before it, and itself (the convention of the original's TensorFlow code; its PyTorch code shows M - 1 before it).
"""

import numpy as np
import torch

from parity import transformer_xl_case as case


class Model:
    """The language model in float64."""

    def __init__(self, sizes: case.Sizes, variant: str, tree: dict):
        self.sizes = sizes
        self.norm, self.biases, self.clamp, self.same_length = case.VARIANTS[variant]
        self.leaves = {
            name: torch.nn.Parameter(torch.tensor(value, dtype=torch.float64))
            for name, value in case.to_flat(tree).items()
        }

    def layer_norm(self, x, name: str, layer: int):
        """Return x with mean 0 and variance 1, scaled and shifted."""
        scale, bias = (self.leaves[f"blocks/{name}/{part}"][layer] for part in ("scale", "bias"))
        return torch.nn.functional.layer_norm(x, x.shape[-1:], scale, bias, eps=1e-5)

    def encoding(self, distance: int):
        """Return the encoding of a distance, (D,)."""
        d = self.sizes.width
        distance = min(distance, self.clamp) if self.clamp else distance
        angles = [distance / 10_000 ** (2 * i / d) for i in range(d // 2)]
        return torch.tensor([*np.sin(angles), *np.cos(angles)])

    def attention(self, x, memory, layer: int):
        """Return the attention of x (B, L, D) to itself and to the memory (B, M', D), both normed if norm is pre."""
        of = {name: self.leaves[f"blocks/attention/{name}"][layer] for name in NAMES}
        own = "attention_biases" if self.biases == "shared" else "blocks/attention/attention_biases"
        u, v = self.leaves[own] if self.biases == "shared" else self.leaves[own][layer]
        keys_from = torch.cat([memory, x], dim=1)
        q = torch.einsum("bld,dhk->blhk", x, of["qkv_kernel"][:, 0])
        k, value = (torch.einsum("bsd,dhk->bshk", keys_from, of["qkv_kernel"][:, part]) for part in (1, 2))
        outputs = []
        for query in range(x.shape[1]):
            at = memory.shape[1] + query
            first = max(0, at - self.sizes.memory) if self.same_length else 0
            distances = torch.stack([self.encoding(at - key) for key in range(first, at + 1)])
            r = torch.einsum("sd,dhk->shk", distances, of["relative_kernel"])
            scores = torch.einsum("bhk,bshk->bhs", q[:, query] + u, k[:, first : at + 1])
            scores = scores + torch.einsum("bhk,shk->bhs", q[:, query] + v, r)
            weights = torch.softmax(scores / self.sizes.head_width**0.5, dim=-1)
            outputs.append(torch.einsum("bhs,bshk->bhk", weights, value[:, first : at + 1]))
        return torch.einsum("blhk,hkd->bld", torch.stack(outputs, dim=1), of["out_kernel"])

    def feed_forward(self, x, layer: int):
        """Return the two layers with a ReLU."""
        of = {name: self.leaves[f"blocks/feed_forward/{name}"][layer] for name in FEED_FORWARD}
        return torch.relu(x @ of["in_kernel"] + of["in_bias"]) @ of["out_kernel"] + of["out_bias"]

    def forward(self, ids, memories):
        """Return the states (B, L, D), and the memory of each layer after them. memories: None before the first row."""
        x = self.leaves["embeddings/tokens"][ids] * self.sizes.width**0.5
        after = []
        for layer in range(self.sizes.num_layers):
            memory = x[:, :0] if memories is None else memories[layer]
            after.append(torch.cat([memory, x], dim=1)[:, -self.sizes.memory :].detach())
            if self.norm == "pre":
                normed = (self.layer_norm(part, "attention_norm", layer) for part in (x, memory))
                x = x + self.attention(*normed, layer)
                x = x + self.feed_forward(self.layer_norm(x, "feed_forward_norm", layer), layer)
            else:
                x = self.layer_norm(x + self.attention(x, memory, layer), "attention_norm", layer)
                x = self.layer_norm(x + self.feed_forward(x, layer), "feed_forward_norm", layer)
        return x, after

    def loss(self, row: np.ndarray, memories):
        """Return the mean negative log-likelihood, the states, and the memory after the row."""
        ids, targets = (torch.tensor(part).long() for part in (row[:, :-1], row[:, 1:]))
        states, after = self.forward(ids, memories)
        scores = states @ self.leaves["embeddings/tokens"].T + self.leaves["embeddings/output_bias"]
        nll = torch.nn.functional.cross_entropy(scores.reshape(-1, scores.shape[-1]), targets.reshape(-1))
        return nll, states, after

    def values(self, of) -> dict[str, np.ndarray]:
        """Return `of` of every parameter, by path."""
        return {name: of(leaf).detach().numpy().copy() for name, leaf in self.leaves.items()}


NAMES = ("qkv_kernel", "relative_kernel", "out_kernel")
FEED_FORWARD = ("in_kernel", "in_bias", "out_kernel", "out_bias")


def answers(sizes: case.Sizes, seed: int) -> dict[str, dict[str, np.ndarray]]:
    """Return the results that jaxlm must find: of the last of BATCHES rows, and after updates with a memory."""
    found, rows = {}, case.make_rows(sizes, seed)
    for variant in case.VARIANTS:
        model, memories = Model(sizes, variant, case.make_tree(sizes, variant, seed + 1)), None
        for row in rows[: case.BATCHES]:
            nll, states, memories = model.loss(row, memories)
        nll.backward()
        found[variant] = {"states": states.detach().numpy(), "nll": np.array(nll.item())}
        found[f"{variant}_gradient"] = model.values(lambda leaf: leaf.grad)
    found["steps"] = trained(Model(sizes, "post", case.make_tree(sizes, "post", seed + 1)), rows)
    return found


def trained(model: Model, rows: list[np.ndarray]) -> dict[str, np.ndarray]:
    """Return the losses of Adam over all rows, and the parameters."""
    memories, losses = None, []
    optimizer = torch.optim.Adam(list(model.leaves.values()), lr=case.RATE, eps=case.EPS)
    for row in rows:
        optimizer.zero_grad()
        loss, _, memories = model.loss(row, memories)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(model.leaves.values()), case.CLIP_NORM)
        optimizer.step()
        losses.append(loss.item())
    return model.values(lambda leaf: leaf) | {"losses": np.array(losses)}
