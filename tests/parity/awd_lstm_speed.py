"""Time a training step of AWD-LSTM here and with torch.nn.LSTM, in turn: `cd tests && python -m parity.awd_lstm_speed`.

WikiText-2's sizes, 20 rows of 70 tokens, float32 on the CPU: all dropout, AR and TAR, clip and SGD in both.
"""

from jaxlm.models.awd_lstm import AWD_LSTM_WT2
from parity.in_turn import Timed, main, time_bench, time_training, use_all_cores

ROWS, LENGTH = 20, 70


def in_torch(steps: int, warmup: int) -> Timed:
    """Return the median seconds of a training step of PyTorch."""
    import torch
    from torch.nn import functional

    config = AWD_LSTM_WT2
    use_all_cores()
    table = torch.nn.Parameter(torch.empty(config.vocab_size, config.width).uniform_(-0.1, 0.1))
    bias, lstms, before = torch.nn.Parameter(torch.zeros(config.vocab_size)), [], config.width
    for layer in range(config.num_layers):
        lstms.append(torch.nn.LSTM(before, config.units_of(layer), batch_first=True))
        before = config.units_of(layer)
    parameters = [table, bias, *(leaf for lstm in lstms for leaf in lstm.parameters())]
    optimizer = torch.optim.SGD(parameters, lr=30, weight_decay=1.2e-6)
    ids = torch.randint(config.vocab_size, (ROWS, LENGTH + 1))
    state = [tuple(torch.zeros(1, ROWS, lstm.hidden_size) for _ in range(2)) for lstm in lstms]

    def locked(x, rate):
        return x * functional.dropout(torch.ones(x.shape[0], 1, x.shape[2]), rate)

    def loss():
        kept = functional.dropout(torch.ones(config.vocab_size, 1), config.word_dropout_rate)
        x = locked(functional.embedding(ids[:, :-1], table * kept), config.embedding_dropout_rate)
        for number, lstm in enumerate(lstms):
            weights = dict(lstm.named_parameters())
            weights["weight_hh_l0"] = functional.dropout(weights["weight_hh_l0"], config.recurrent_dropout_rate)
            raw, end = torch.func.functional_call(lstm, weights, (x, state[number]))
            state[number] = tuple(part.detach() for part in end)
            last = number == len(lstms) - 1
            x = locked(raw, config.output_dropout_rate if last else config.dropout_rate)
        scores = functional.linear(x.reshape(-1, config.width), table, bias)
        total = functional.cross_entropy(scores, ids[:, 1:].reshape(-1))
        return total + 2 * x.pow(2).mean() + (raw[:, 1:] - raw[:, :-1]).pow(2).mean()

    return time_training(loss, optimizer, 0.25, steps, warmup)


def here(steps: int, warmup: int) -> Timed:
    """Return the median seconds of a training step of `jaxlm.bench`."""
    sizes = ["--model.vocab-size", AWD_LSTM_WT2.vocab_size, "--batch-size", ROWS, "--length", LENGTH]
    return time_bench("pretrain/awd_lstm_wt2", *sizes, steps=steps, warmup=warmup)


if __name__ == "__main__":
    main(__doc__, here, in_torch, steps=5, warmup=2)
