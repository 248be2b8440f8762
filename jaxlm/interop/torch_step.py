"""The training step of a transformer in plain PyTorch, for comparison: its seconds on this machine.

The model has torch.nn's own layers, whose attention is `scaled_dot_product_attention`; on a GPU it is compiled by
`torch.compile` and computes in bfloat16 where the GPU has it. The step is forward, backward, clip by the global norm
and AdamW. It only serves timing: its weights are random, and it has one rate of dropout.
"""

import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


class Peer(nn.Module):
    """A GPT, or a BERT with its loss at 15 % of the positions, or with classes (B) of the first position."""

    def __init__(self, sizes: Mapping[str, Any], length: int) -> None:
        super().__init__()
        width = sizes["width"]
        self.causal, self.classes = sizes["causal"], sizes["classes"]
        self.tokens, self.positions = nn.Embedding(sizes["vocab_size"], width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width,
            sizes["num_heads"],
            4 * width,
            sizes["dropout_rate"],
            nn.GELU(approximate="tanh" if self.causal else "none"),
            batch_first=True,
            norm_first=sizes["norm"] == "pre",
        )
        self.blocks = nn.TransformerEncoder(layer, sizes["num_layers"], enable_nested_tensor=False)
        for block in self.blocks.layers:
            block.self_attn.dropout = sizes["attention_dropout_rate"]
        self.final = nn.LayerNorm(width) if sizes["norm"] == "pre" else nn.Identity()
        self.head = nn.Linear(width, 2)
        for matrix in (one for one in self.parameters() if one.dim() > 1):
            nn.init.normal_(matrix, std=0.02)

    def forward(self, ids: torch.Tensor, where: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss. ids: (B, L). where: (B, N), positions with a loss. targets: (B, N)."""
        states = self.tokens(ids) + self.positions.weight
        length = ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=ids.device) if self.causal else None
        states = self.final(self.blocks(states, mask=mask, is_causal=self.causal))
        if not self.causal:
            states = torch.gather(states, 1, where[..., None].expand(-1, -1, states.shape[-1]))
        logits = self.head(states) if self.classes else states @ self.tokens.weight.t()
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def step_of(sizes: Mapping[str, Any], batch_size: int, length: int, steps: int, warmup: int) -> dict[str, Any]:
    """Return the median seconds of a step. sizes: fields of a model config here, and `causal` and `classes`."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = Peer(sizes, length).to(device).train()
    run: Any = torch.compile(model) if device == "cuda" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=device == "cuda")
    ids = torch.randint(sizes["vocab_size"], (batch_size, length))
    count = length if sizes["causal"] else 1 if sizes["classes"] else max(1, round(0.15 * length))
    where = torch.rand(batch_size, length).argsort(1)[:, :count].contiguous()
    targets = torch.randint(2 if sizes["classes"] else sizes["vocab_size"], (batch_size, count))
    inputs = [one.to(device) for one in (ids, where, targets)]
    half = device == "cuda" and torch.cuda.get_device_capability() >= (8, 0)
    times, loss = [], torch.zeros(())
    for _ in range(warmup + steps):
        started = time.perf_counter()
        with torch.autocast(device, dtype=torch.bfloat16, enabled=half):
            loss = run(*inputs)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None
    found = {"step_seconds": round(statistics.median(times[warmup:]), 5), "loss": loss.item(), "peak_memory_gib": peak}
    return found | {"torch": torch.__version__, "dtype": "bfloat16" if half else "float32", "device": device}
