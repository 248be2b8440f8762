"""Time a training step of an ELMo here and in PyTorch, in turn: 2 x 512 units with projections of 128, 32 x 20 words.

`cd tests && python -m parity.elmo_speed`. Float32 on the CPU, all cores, no dropout, the whole softmax over 20,000
words. PyTorch's program has torch.nn.LSTM with proj_size for each direction of each layer, the convolutions, highway,
projection and residual of `pretrain/elmo_small`, and torch.optim.Adagrad with the norm clipped at 10. It has no clips
of cells and projections, which torch.nn.LSTM lacks.
"""

import numpy as np

from parity.in_turn import Timed, main, time_bench, time_training, use_all_cores

ROWS, WORDS, UNITS, PROJECTION, VOCABULARY = 32, 20, 512, 128, 20_000
FILTERS, CHARACTER_WIDTH, BYTES, CHARACTERS = ((1, 16), (2, 16), (3, 32), (4, 64)), 16, 50, 261


def in_torch(steps: int, warmup: int) -> Timed:
    """Return the median seconds of a training step."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            total = sum(number for _, number in FILTERS)
            self.characters = nn.Embedding(CHARACTERS, CHARACTER_WIDTH)
            self.filters = nn.ModuleList(nn.Conv1d(CHARACTER_WIDTH, number, width) for width, number in FILTERS)
            self.highway, self.gate = nn.Linear(total, total), nn.Linear(total, total)
            self.projection = nn.Linear(total, PROJECTION)
            self.layers = nn.ModuleList(
                nn.LSTM(PROJECTION, UNITS, batch_first=True, proj_size=PROJECTION) for _ in range(4)
            )
            self.output = nn.Linear(PROJECTION, VOCABULARY)

        def direction(self, ids, layers, state):
            x = self.characters(ids.reshape(-1, BYTES)).transpose(1, 2)
            x = torch.cat([functional.relu(filter(x).amax(dim=-1)) for filter in self.filters], dim=-1)
            gate = torch.sigmoid(self.gate(x))
            x = self.projection(gate * functional.relu(self.highway(x)) + (1 - gate) * x)
            first, one = layers[0](x.reshape(ROWS, WORDS, PROJECTION), state[0])
            second, two = layers[1](first, state[1])
            return first + second, (one, two)

        def forward(self, inputs, targets, states):
            losses, ends = [], []
            for way in range(2):
                x, end = self.direction(inputs[way], self.layers[2 * way : 2 * way + 2], states[way])
                losses.append(functional.cross_entropy(self.output(x).reshape(-1, VOCABULARY), targets[way]))
                ends.append([tuple(part.detach() for part in state) for state in end])
            return WORDS * sum(losses) / 2, ends

    use_all_cores()
    model, rng = Model(), np.random.default_rng(0)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.2, initial_accumulator_value=1.0, eps=0.0)
    zeros = (torch.zeros(1, ROWS, PROJECTION), torch.zeros(1, ROWS, UNITS))
    states = [[zeros, zeros], [zeros, zeros]]

    def loss():
        nonlocal states
        inputs = torch.tensor(rng.integers(0, CHARACTERS, (2, ROWS, WORDS, BYTES)))
        targets = torch.tensor(rng.integers(0, VOCABULARY, (2, ROWS * WORDS)))
        total, states = model(inputs, targets, states)
        return total

    return time_training(loss, optimizer, 10.0, steps, warmup)


def here(steps: int, warmup: int) -> Timed:
    """Return the median seconds of a training step of `jaxlm.bench`."""
    sizes = {"vocab-size": VOCABULARY, "width": 2 * PROJECTION, "units": UNITS, "dropout-rate": 0}
    words = [word for name, value in sizes.items() for word in (f"--model.{name}", value)]
    words += ["--batch-size", ROWS, "--length", WORDS]
    return time_bench("pretrain/elmo_small", *words, steps=steps, warmup=warmup)


if __name__ == "__main__":
    main(__doc__, here, in_torch, steps=20, warmup=5)
