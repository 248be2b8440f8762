"""Time a training step of CoVe's MT-LSTM here and in PyTorch, in turn: 64 rows of 16 source and 16 target words.

`cd tests && python -m parity.mt_lstm_speed`. The published widths, 10,000 words on both sides, float32, no dropout, and
SGD with the norm clipped at 5. PyTorch's program has torch.nn.LSTM for the encoder and, as OpenNMT-py, a loop over
torch.nn.LSTMCell for the decoder, with the output of a step as a part of the next one's input.
"""

from parity.in_turn import Timed, main, time_steps, time_training, use_all_cores

ROWS, WORDS, VOCABULARY, WIDTH, WORD_WIDTH, LAYERS = 64, 16, 10_000, 600, 300, 2
RATE, CLIP_NORM = 1.0, 5.0


def in_torch(steps: int, warmup: int) -> Timed:
    """Return the median seconds of a training step of PyTorch."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.source, self.target = (nn.Embedding(VOCABULARY, WORD_WIDTH) for _ in range(2))
            self.encoder = nn.LSTM(WORD_WIDTH, WIDTH // 2, LAYERS, batch_first=True, bidirectional=True)
            self.decoder = nn.ModuleList(
                nn.LSTMCell(WORD_WIDTH + WIDTH if number == 0 else WIDTH, WIDTH) for number in range(LAYERS)
            )
            self.keys, self.joined = nn.Linear(WIDTH, WIDTH, False), nn.Linear(2 * WIDTH, WIDTH, False)
            self.scores = nn.Linear(WIDTH, VOCABULARY)

        def forward(self, source, target):
            context, ends = self.encoder(self.source(source))
            states = [
                tuple(torch.cat([*end[2 * number : 2 * number + 2]], 1) for end in ends) for number in range(LAYERS)
            ]
            fed, outputs = torch.zeros(ROWS, WIDTH), []
            for word in self.target(target).unbind(1):
                x = torch.cat([word, fed], 1)
                for number, cell in enumerate(self.decoder):
                    states[number] = cell(x, states[number])
                    x = states[number][0]
                attention = torch.softmax((context @ self.keys(x)[:, :, None])[..., 0], 1)
                fed = torch.tanh(self.joined(torch.cat([(attention[:, None] @ context)[:, 0], x], 1)))
                outputs.append(fed)
            return self.scores(torch.stack(outputs, 1))

    use_all_cores()
    model = Model()
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.1, 0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    def loss():
        source, target = torch.randint(VOCABULARY, (ROWS, WORDS)), torch.randint(VOCABULARY, (ROWS, WORDS + 1))
        scores = model(source, target[:, :-1]).reshape(-1, VOCABULARY)
        return functional.cross_entropy(scores, target[:, 1:].reshape(-1), reduction="sum") / ROWS

    return time_training(loss, optimizer, CLIP_NORM, steps, warmup)


def here(steps: int, warmup: int) -> Timed:
    """Return the median seconds of a training step of jaxlm, with the loss of `finetune/mt_lstm`."""
    import jax
    import numpy as np
    from flax import linen as nn

    from jaxlm.data.batch import Batch
    from jaxlm.models import build
    from jaxlm.models.mt_lstm import MTLSTMConfig
    from jaxlm.nn.config import Execution
    from jaxlm.objectives.language_model import language_model, with_loss_per_row
    from jaxlm.training.optimizer import OptimizerConfig, make_optimizer
    from jaxlm.training.step import make_train_step, new_state, settings_of

    sizes = MTLSTMConfig(vocab_size=VOCABULARY, num_layers=LAYERS, width=WIDTH, word_width=WORD_WIDTH, dropout_rate=0.0)
    model = build(sizes, Execution(dtype="float32"))
    plain = {"warmup": 0, "decay": "constant", "weight_decay": 0.0}
    config = OptimizerConfig(kind="sgd", peak_lr=RATE, clip_norm=CLIP_NORM, **plain)

    def init(key):
        return {"backbone": model.init(key), "head": model.output_layer.init(key)}

    optimizer = make_optimizer(config, jax.eval_shape(init, jax.random.key(0)))
    train = jax.jit(make_train_step(with_loss_per_row(language_model(model)), optimizer), donate_argnums=0)
    state, settings = new_state(nn.unbox(init(jax.random.key(0))), optimizer, 0), settings_of(config, steps)
    rng, positions = np.random.default_rng(0), np.tile(np.arange(WORDS, dtype=np.int32), (ROWS, 1))

    def step() -> None:
        nonlocal state
        source = rng.integers(VOCABULARY, size=(ROWS, WORDS), dtype=np.int32)
        target = rng.integers(VOCABULARY, size=(ROWS, WORDS + 1), dtype=np.int32)
        whole = np.ones_like(positions)
        batch = Batch(
            target[:, :-1],
            target[:, 1:],
            positions,
            None,
            whole.astype(np.float32),
            source=source,
            source_segments=whole,
        )
        state, _ = jax.block_until_ready(train(state, batch, settings))

    return time_steps(step, steps, warmup)


if __name__ == "__main__":
    main(__doc__, here, in_torch, steps=10, warmup=3)
