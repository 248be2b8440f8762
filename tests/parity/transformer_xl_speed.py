"""Time a training step of Transformer-XL here and in PyTorch, in turn.

`cd tests && python -m parity.transformer_xl_speed`

The base model for enwik8, 2 rows of 512 tokens with a memory of 512, float32 on the CPU: dropout, clip and Adam in
both. PyTorch's statement has batched products and the shift by padding.
"""

from jaxlm.models.transformer_xl import ENWIK8
from parity.in_turn import Timed, main, time_bench, time_training, use_all_cores

ROWS, LENGTH = 2, 512


def in_torch(steps: int, warmup: int) -> Timed:
    """Return the median seconds of a training step of PyTorch."""
    import torch
    from torch.nn import functional

    use_all_cores()
    config = ENWIK8
    v, d, h, f = config.vocab_size, config.width, config.num_heads, config.feed_forward_width
    k, slots = d // h, config.memory_length

    def normal(*shape: int):
        return torch.nn.Parameter(0.02 * torch.randn(*shape))

    table, bias, u, w = normal(v, d), normal(v), normal(h, 1, k), normal(h, 1, k)
    stack = [
        {
            "qkv": normal(3 * d, d),
            "relative": normal(d, d),
            "out": normal(d, d),
            "in": torch.nn.Linear(d, f),
            "back": torch.nn.Linear(f, d),
            "norms": torch.nn.ModuleList([torch.nn.LayerNorm(d), torch.nn.LayerNorm(d)]),
        }
        for _ in range(config.num_layers)
    ]
    parameters = [table, bias, u, w]
    for layer in stack:
        for part in layer.values():
            parameters += [part] if isinstance(part, torch.nn.Parameter) else list(part.parameters())
    optimizer = torch.optim.Adam(parameters, lr=2.5e-4)
    keys = slots + LENGTH
    angles = torch.arange(keys - 1, -1, -1.0)[:, None] * 10_000.0 ** (-torch.arange(0, d, 2.0) / d)
    encodings = torch.cat([angles.sin(), angles.cos()], dim=1)
    hidden = torch.triu(torch.ones(LENGTH, keys, dtype=torch.bool), diagonal=slots + 1)
    ids = torch.randint(v, (ROWS, LENGTH + 1))
    memories = [torch.zeros(ROWS, slots, d) for _ in range(config.num_layers)]

    def drop(x):
        return functional.dropout(x, config.dropout_rate)

    def heads(x):
        return x.reshape(*x.shape[:-1], h, k).transpose(-3, -2)

    def shifted(x):
        padded = functional.pad(x, (1, 0)).reshape(ROWS, h, keys + 1, LENGTH)
        return padded[:, :, 1:].reshape(ROWS, h, LENGTH, keys)

    def loss():
        x, relative = drop(functional.embedding(ids[:, :-1], table) * d**0.5), drop(encodings)
        for number, layer in enumerate(stack):
            source = torch.cat([memories[number], x], dim=1)
            memories[number] = source[:, -slots:].detach()
            q = heads(functional.linear(x, layer["qkv"][:d]))
            key, value = (heads(part) for part in functional.linear(source, layer["qkv"][d:]).chunk(2, dim=-1))
            r = heads(functional.linear(relative, layer["relative"]))
            scores = (q + u) @ key.transpose(-1, -2) + shifted((q + w) @ r.transpose(-1, -2))
            weights = torch.softmax((scores * k**-0.5).masked_fill(hidden, -1e30), dim=-1)
            attended = functional.linear((weights @ value).transpose(1, 2).reshape(ROWS, LENGTH, d), layer["out"])
            x = layer["norms"][0](x + drop(attended))
            x = layer["norms"][1](x + drop(layer["back"](drop(torch.relu(layer["in"](x))))))
        scores = functional.linear(drop(x).reshape(-1, d), table, bias)
        return functional.cross_entropy(scores, ids[:, 1:].reshape(-1))

    return time_training(loss, optimizer, 0.25, steps, warmup)


def here(steps: int, warmup: int) -> Timed:
    """Return the median seconds of a training step of `jaxlm.bench`."""
    sizes = ["--model.vocab-size", ENWIK8.vocab_size, "--batch-size", ROWS, "--length", LENGTH]
    return time_bench("pretrain/transformer_xl_enwik8", *sizes, steps=steps, warmup=warmup)


if __name__ == "__main__":
    main(__doc__, here, in_torch, steps=5, warmup=2)
