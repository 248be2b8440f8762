"""GPT-1 in PyTorch, written from the equations of the paper (Radford et al., 2018) and the layout of its code.

Parameters are the flat dict of `gpt_case.to_flat`. It follows openai/finetune-transformer-lm train.py:22-178, one
array operation after the other, and PyTorch differentiates it. Nothing of jaxlm is imported here.
"""

import math

import numpy as np
import torch

from parity import gpt_case as case


def gelu(x):
    """The tanh form (train.py:22)."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def norm(x, g, b, eps=1e-5):
    """Layer normalisation with a biased variance (train.py:25-44)."""
    u = x.mean(-1, keepdim=True)
    s = ((x - u) ** 2).mean(-1, keepdim=True)
    return (x - u) / torch.sqrt(s + eps) * g + b


def allowed(segments: np.ndarray) -> np.ndarray:
    """b[row, query, key]: 1 where the key is not later and of the same document, spelt out as loops."""
    rows, length = segments.shape
    b = np.zeros((rows, length, length))
    for row in range(rows):
        for query in range(length):
            for key in range(query + 1):
                b[row, query, key] = segments[row, query] == segments[row, key]
    return b


def states(p: dict, rows: dict, num_heads: int):
    """The states of the last layer (rows, length, width)."""
    ids, positions = torch.tensor(rows["ids"]).long(), torch.tensor(rows["positions"]).long()
    h = p["we"][ids] + p["wpe"][positions]
    b = torch.tensor(allowed(rows["segments"]), dtype=h.dtype)[:, None]
    n, length, d = h.shape
    num_layers = sum(name.endswith("c_attn.w") for name in p)
    for layer in range(num_layers):
        w = {name.split(".", 1)[1]: value for name, value in p.items() if name.startswith(f"h{layer}.")}
        c = h @ w["c_attn.w"] + w["c_attn.b"]
        q, k, v = (x.reshape(n, length, num_heads, -1).permute(0, 2, 1, 3) for x in torch.split(c, d, dim=2))
        scores = q @ k.transpose(-1, -2) / math.sqrt(d // num_heads)
        scores = scores * b + -1e9 * (1 - b)
        a = (torch.softmax(scores, -1) @ v).permute(0, 2, 1, 3).reshape(n, length, d)
        a = a @ w["c_proj.w"] + w["c_proj.b"]
        m_in = norm(h + a, w["ln_1.g"], w["ln_1.b"])
        m = gelu(m_in @ w["mlp.c_fc.w"] + w["mlp.c_fc.b"]) @ w["mlp.c_proj.w"] + w["mlp.c_proj.b"]
        h = norm(m_in + m, w["ln_2.g"], w["ln_2.b"])
    return h


def loss(p: dict, rows: dict, num_heads: int):
    """Weighted mean of the negative log-likelihoods, the output tied to the token table (train.py:171-178)."""
    logits = states(p, rows, num_heads) @ p["we"].T
    nll = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.tensor(rows["targets"]).long().flatten(), reduction="none"
    )
    weights = torch.tensor(rows["weights"], dtype=nll.dtype).flatten()
    return (nll * weights).sum() / weights.sum()


def loss_and_gradient(flat: dict[str, np.ndarray], rows: dict, num_heads: int) -> tuple[float, dict[str, np.ndarray]]:
    """float64 in, float64 out."""
    p = {name: torch.tensor(value, dtype=torch.float64, requires_grad=True) for name, value in flat.items()}
    value = loss(p, rows, num_heads)
    value.backward()
    return float(value.detach()), {name: x.grad.numpy() for name, x in p.items()}


def adamw_steps(flat: dict[str, np.ndarray], rows: dict, num_heads: int) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses and parameters of NUM_STEPS steps of torch.optim.AdamW: clip, warmup, cosine to 0, matrices decayed."""
    p = {name: torch.tensor(value, dtype=torch.float64, requires_grad=True) for name, value in flat.items()}
    matrices, vectors = [x for x in p.values() if x.ndim > 1], [x for x in p.values() if x.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": case.WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}],
        betas=(case.BETA1, case.BETA2),
        eps=case.EPS,
    )
    losses = []
    for t in range(case.NUM_STEPS):
        optimizer.zero_grad()
        value = loss(p, rows, num_heads)
        value.backward()
        losses.append(float(value.detach()))
        size = math.sqrt(sum(float((x.grad**2).sum()) for x in p.values()))
        for x in p.values():
            x.grad *= min(1.0, case.CLIP_NORM / size)
        if t < case.WARMUP_STEPS:
            rate = case.PEAK_LR * (t + 1) / case.WARMUP_STEPS
        else:
            x = (t - case.WARMUP_STEPS) / (case.NUM_STEPS - case.WARMUP_STEPS)
            rate = case.PEAK_LR * (1 + math.cos(math.pi * x)) / 2
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    return losses, {name: x.detach().numpy() for name, x in p.items()}
