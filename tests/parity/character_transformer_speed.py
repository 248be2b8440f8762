"""Time a training step of the character Transformer T12 here and in PyTorch, in turn.

`cd tests && python -m parity.character_transformer_speed`

4 rows of 512 bytes, float32 on the CPU, without dropout, with the losses of all layers and of the second target, as at
the beginning of a training, and SGD with momentum. PyTorch's program has its own fused attention.
"""

from jaxlm.models.character_transformer import T12
from parity.in_turn import Timed, main, time_bench, time_training, use_all_cores

ROWS, LENGTH, VOCABULARY = 4, 512, 256


def in_torch(steps: int, warmup: int) -> Timed:
    """Return the seconds of a training step of PyTorch."""
    import torch
    from torch import nn
    from torch.nn import functional

    use_all_cores()
    d, h, f = T12.width, T12.num_heads, T12.feed_forward_width

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, d))
            self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(3))
            self.qkv, self.out, self.wide, self.back = (
                nn.Linear(d, 3 * d),
                nn.Linear(d, d),
                nn.Linear(d, f),
                nn.Linear(f, d),
            )
            self.classifiers = nn.ModuleList(nn.Linear(d, VOCABULARY, bias=False) for _ in range(2))

        def forward(self, x):
            x = x + self.positions
            heads = (
                part.unflatten(-1, (h, d // h)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1)
            )
            read = functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
            x = x + self.out(read)
            return x + self.back(torch.relu(self.wide(self.norms[1](x))))

    table, layers = nn.Embedding(VOCABULARY, d), nn.ModuleList(Layer() for _ in range(T12.num_layers))
    parameters = [*table.parameters(), *layers.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.003, momentum=0.99)
    ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 2))

    def loss():
        x, total = table(ids[:, :LENGTH]), torch.zeros(())
        for layer in layers:
            x = layer(x)
            state = layer.norms[2](x)
            for ahead, (classifier, weight) in enumerate(zip(layer.classifiers, (1.0, 0.5), strict=True), start=1):
                targets = ids[:, ahead : ahead + LENGTH].flatten()
                total = total + weight * functional.cross_entropy(classifier(state).flatten(0, 1), targets)
        return total

    return time_training(loss, optimizer, None, steps, warmup)


def here(steps: int, warmup: int) -> Timed:
    """Return the seconds of a training step of `jaxlm.bench`."""
    rates = ["--model.attention-dropout-rate", 0, "--model.relu-dropout-rate", 0]
    sizes = [*rates, "--model.vocab-size", VOCABULARY, "--batch-size", ROWS, "--length", LENGTH]
    return time_bench("pretrain/t12_enwik8", *sizes, steps=steps, warmup=warmup)


if __name__ == "__main__":
    main(__doc__, here, in_torch, steps=3, warmup=1)
