"""Time BERT-Base here and with Hugging Face's classes, in turn: a training step, and a forward pass with its losses.

`cd tests && python -m parity.bert_speed`

8 rows of 128 tokens, float32 on the CPU, all cores, no dropout. Both programs gather the 20 masked positions of a row
before the output layer, have the next-sentence loss, clip the norm at 1 and use AdamW. `jaxlm.bench` also draws masks.
"""

from parity.in_turn import Timed, in_turn, make_parser, time_bench, time_steps, time_training, use_all_cores

ROWS, LENGTH, MASKED = 8, 128, 20
BENCH = ("--model", "bert-base", "--batch-size", ROWS, "--length", LENGTH)


def in_torch():
    """Return BERT-Base in PyTorch, and a function that returns its loss."""
    import torch
    from torch.nn import functional
    from transformers import BertConfig, BertForPreTraining

    use_all_cores()
    config = BertConfig(hidden_act="gelu_pytorch_tanh")  # the library's defaults are the sizes of BERT-Base
    model = BertForPreTraining(config).eval()
    ids = torch.randint(config.vocab_size, (ROWS, LENGTH))
    types = torch.arange(LENGTH).ge(LENGTH // 2).long().expand(ROWS, -1)
    places = torch.stack([torch.randperm(LENGTH)[:MASKED] for _ in range(ROWS)])
    targets, following = ids.gather(1, places), torch.randint(2, (ROWS,))

    def loss():
        read = model.bert(input_ids=ids, token_type_ids=types)
        masked = read.last_hidden_state.gather(1, places[..., None].expand(-1, -1, config.hidden_size))
        scores, pair = model.cls(masked, read.pooler_output)
        return functional.cross_entropy(scores.flatten(0, 1), targets.flatten()) + functional.cross_entropy(
            pair, following
        )

    return model, loss


def train_in_torch(steps: int, warmup: int) -> Timed:
    """Return the seconds of a training step."""
    import torch

    model, loss = in_torch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
    return time_training(loss, optimizer, 1.0, steps, warmup)


def forward_in_torch(steps: int, warmup: int) -> Timed:
    """Return the seconds of a forward pass with its losses."""
    import torch

    _, loss = in_torch()
    with torch.inference_mode():
        return time_steps(lambda: loss().item(), steps, warmup)


def train_here(steps: int, warmup: int) -> Timed:
    """Return the seconds of a training step."""
    return time_bench(*BENCH, steps=steps, warmup=warmup)


def forward_here(steps: int, warmup: int) -> Timed:
    """Return the seconds of a forward pass with its losses."""
    return time_bench(*BENCH, "--forward", steps=steps, warmup=warmup)


if __name__ == "__main__":
    arguments = make_parser(__doc__, steps=5, warmup=2).parse_args()
    in_turn(arguments, "training", train_here, train_in_torch)
    in_turn(arguments, "forward", forward_here, forward_in_torch)
