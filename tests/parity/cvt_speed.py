"""Time cross-view training here and in PyTorch, in turn: a labelled and an unlabelled step on 32 sentences of 20 words.

`cd tests && python -m parity.cvt_speed`. Layers of 512 and 320 units with projections of 256, about half the published
widths, the published convolutions, 10,000 words, 23 tags, float32, no dropout, momentum, and the norm clipped at 1.
PyTorch's program has torch.nn.LSTM with proj_size. In both, the targets of an unlabelled step are those of a forward
pass of its own, as dropout is in one of the two passes alone, and a step changes the parameters that its loss reaches.
"""

from parity.in_turn import Timed, main, time_steps, use_all_cores

ROWS, WORDS, VOCABULARY, TAGS, CHARACTERS, BYTES = 32, 20, 10_000, 23, 261, 50
WIDTH, UNITS, WORD_WIDTH, CHARACTER_WIDTH = 512, (512, 320), 300, 50
FILTERS = ((2, 100), (3, 100), (4, 100))
RATE, MOMENTUM, CLIP_NORM, SMOOTHING = 0.1, 0.9, 1.0, 0.1


def in_torch(steps: int, warmup: int) -> Timed:
    """Return the median seconds of a pair of training steps of PyTorch."""
    import torch
    from torch import nn
    from torch.nn import functional

    half = WIDTH // 2

    class Module(nn.Module):
        def __init__(self, *widths: int) -> None:
            super().__init__()
            self.projections = nn.ModuleList(nn.Linear(width, half) for width in widths)
            self.scores = nn.Linear(half, TAGS)

        def forward(self, *inputs, activates=True):
            x = sum(projection(part) for projection, part in zip(self.projections, inputs, strict=True))
            return self.scores(torch.relu(x) if activates else x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.characters = (
                nn.Embedding(VOCABULARY, WORD_WIDTH),
                nn.Embedding(CHARACTERS, CHARACTER_WIDTH),
            )
            self.filters = nn.ModuleList(nn.Conv1d(CHARACTER_WIDTH, number, width) for width, number in FILTERS)
            widths = (WORD_WIDTH + sum(number for _, number in FILTERS), WIDTH)
            self.layers = nn.ModuleList(
                nn.LSTM(width, units, batch_first=True, bidirectional=True, proj_size=half)
                for width, units in zip(widths, UNITS, strict=True)
            )
            self.primary, self.full = Module(WIDTH, WIDTH), Module(WIDTH, WIDTH)
            self.forwards, self.backwards, self.future, self.past = (Module(half) for _ in range(4))

        def encode(self, ids, characters):
            x = self.characters(characters.reshape(-1, BYTES)).transpose(1, 2)
            spelled = torch.cat([functional.relu(filter(x).amax(dim=-1)) for filter in self.filters], dim=-1)
            first, _ = self.layers[0](torch.cat([self.words(ids), spelled.reshape(ROWS, WORDS, -1)], dim=-1))
            return first, self.layers[1](first)[0]

        def labelled_loss(self, ids, characters, tags):
            scores = self.primary(*self.encode(ids, characters))
            return functional.cross_entropy(scores.reshape(-1, TAGS), tags.reshape(-1), label_smoothing=SMOOTHING)

        def unlabelled_loss(self, ids, characters, tags):
            with torch.no_grad():
                targets = torch.softmax(self.primary(*self.encode(ids, characters)), dim=-1)
            first, last = self.encode(ids, characters)
            forward, backward = first.split(half, dim=-1)

            def loss(scores, targets):
                return functional.cross_entropy(scores.reshape(-1, TAGS), targets.reshape(-1, TAGS))

            return (
                loss(self.full(first, last, activates=False), targets)
                + loss(self.forwards(forward), targets)
                + loss(self.backwards(backward), targets)
                + loss(self.future(forward)[:, :-1], targets[:, 1:])
                + loss(self.past(backward)[:, 1:], targets[:, :-1])
            )

    use_all_cores()
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)

    def step() -> None:
        for of in (model.labelled_loss, model.unlabelled_loss):
            ids, tags = torch.randint(VOCABULARY, (ROWS, WORDS)), torch.randint(TAGS, (ROWS, WORDS))
            loss = of(ids, torch.randint(CHARACTERS, (ROWS, WORDS, BYTES)), tags)
            optimizer.zero_grad(set_to_none=True)  # parameters without a gradient are left out of the step
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()

    return time_steps(step, steps, warmup)


def here(steps: int, warmup: int) -> Timed:
    """Return the median seconds of a pair of training steps of jaxlm."""
    import jax
    import numpy as np
    from flax import linen as nn

    from jaxlm.data.batch import ExampleBatch, UnlabelledBatch
    from jaxlm.models import build
    from jaxlm.models.bilstm import BiLSTMConfig
    from jaxlm.models.heads.cross_view import CrossViewHead
    from jaxlm.models.views import OF_DIRECTIONS
    from jaxlm.nn.config import Execution
    from jaxlm.objectives.cross_view import with_unlabelled
    from jaxlm.objectives.task import TagLoss, task_objective
    from jaxlm.training.optimizer import OptimizerConfig, make_optimizer
    from jaxlm.training.step import make_train_step, new_state, settings_of

    sizes = BiLSTMConfig(vocab_size=VOCABULARY, width=WIDTH, units=UNITS, embedding_dropout_rate=0.0, dropout_rate=0.0)
    model, head = build(sizes, Execution(dtype="float32")), CrossViewHead(TAGS, WIDTH // 2, OF_DIRECTIONS)
    objective = task_objective(model, head, TagLoss(label_smoothing=SMOOTHING))
    objective = with_unlabelled(objective, model, head, 0.0)
    plain = {"warmup": 0, "decay": "constant", "weight_decay": 0.0}
    config = OptimizerConfig(kind="sgd", momentum=MOMENTUM, peak_lr=RATE, clip_norm=CLIP_NORM, **plain)

    def init(key):
        return {"backbone": model.init(key), "head": head.init(key, *head.example_inputs(sizes), train=False)["params"]}

    optimizer = make_optimizer(config, jax.eval_shape(init, jax.random.key(0)))
    train = jax.jit(make_train_step(objective, optimizer), donate_argnums=0)
    state, settings = new_state(nn.unbox(init(jax.random.key(0))), optimizer, 0), settings_of(config, steps)
    rng = np.random.default_rng(0)

    def step() -> None:
        nonlocal state
        for kind in (ExampleBatch, UnlabelledBatch):
            of_rows = np.full((ROWS, 1), WORDS, np.int32)
            batch = kind(
                ids=rng.integers(VOCABULARY, size=(ROWS, 1, WORDS), dtype=np.int32),
                lengths=of_rows,
                extract=0 * of_rows,
                second=of_rows,
                labels=rng.integers(TAGS, size=(ROWS, WORDS), dtype=np.int32),
                weights=np.ones(ROWS, np.float32),
                index=np.arange(ROWS, dtype=np.int32),
                characters=rng.integers(CHARACTERS, size=(ROWS, 1, WORDS, BYTES), dtype=np.int32),
            )
            state, _ = jax.block_until_ready(train(state, batch, settings))

    return time_steps(step, steps, warmup)


if __name__ == "__main__":
    main(__doc__, here, in_torch, steps=10, warmup=3)
