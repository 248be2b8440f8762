"""Time a training step of GPT-1's LSTM here and with torch.nn.LSTM, in turn: `cd tests && python -m parity.lstm_speed`.

One layer of 2,048 units between embeddings of 768 and GPT-1's vocabulary, 4 rows of 256 tokens, float32 on the CPU, no
dropout: clip and AdamW in both.
"""

from parity.in_turn import Timed, main, time_bench, time_training, use_all_cores

ROWS, LENGTH = 4, 256


def in_torch(steps: int, warmup: int) -> Timed:
    """Return the seconds of a training step of PyTorch."""
    import torch
    from torch.nn import functional

    from jaxlm.models import SIZES

    use_all_cores()
    config = SIZES["lstm"]
    table = torch.nn.Parameter(0.02 * torch.randn(config.vocab_size, config.width))
    lstm = torch.nn.LSTM(config.width, config.units, config.num_layers, batch_first=True)
    out = torch.nn.Linear(config.units, config.width)
    parameters = [table, *lstm.parameters(), *out.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=2.5e-4, weight_decay=0.01)
    ids = torch.randint(config.vocab_size, (ROWS, LENGTH + 1))

    def loss():
        states, _ = lstm(functional.embedding(ids[:, :-1], table))
        scores = functional.linear(out(states), table)
        return functional.cross_entropy(scores.flatten(0, 1), ids[:, 1:].flatten())

    return time_training(loss, optimizer, 1.0, steps, warmup)


def here(steps: int, warmup: int) -> Timed:
    """Return the seconds of a training step of `jaxlm.bench`."""
    return time_bench("--model", "lstm", "--batch-size", ROWS, "--length", LENGTH, steps=steps, warmup=warmup)


if __name__ == "__main__":
    main(__doc__, here, in_torch, steps=5, warmup=2)
