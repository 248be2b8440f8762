"""View of a config without its data: its fields, parameters, tokens of the whole run and learning rates."""

from collections.abc import Iterator
from dataclasses import replace

import jax

from jaxlm.config import to_json
from jaxlm.data.loader import phases
from jaxlm.models import build
from jaxlm.runs.config import flat, shown
from jaxlm.training.config import FinetuneConfig, PretrainConfig
from jaxlm.training.optimizer import learning_rate, schedule_of
from jaxlm.training.optimizer_config import OptimizerConfig
from jaxlm.training.pretraining import make_pretraining
from jaxlm.training.program import with_published_vocabulary


def config_lines(config: PretrainConfig | FinetuneConfig) -> Iterator[str]:
    """Yield every field of a config, then its parameters, its tokens and its learning rates. Nothing is allocated.

    A vocabulary that comes from a store or a start is counted at its published size.
    """
    config.check()
    fields = flat(to_json(config))
    width = max(map(len, fields))
    yield from (f"{name:<{width}}  {shown(fields, name)}" for name in fields)
    yield ""
    sized = replace(config, model=with_published_vocabulary(config.model))
    vocabulary = f"a vocabulary of {sized.model.vocab_size:,} ids"
    if not config.model.vocab_size:
        vocabulary += ", the published size; training takes the store's or the start's"
    yield f"parameters: {_parameters(sized):,} with {vocabulary}"
    yield _duration(config)
    yield _schedule(config.optimizer, config.num_steps)


def _parameters(config: PretrainConfig | FinetuneConfig) -> int:
    """Return the number of parameters, for fine-tuning without the head, whose size depends on the task."""
    init = (
        make_pretraining(config, None).init_params if isinstance(config, PretrainConfig) else build(config.model).init
    )
    leaves = jax.tree.leaves(jax.eval_shape(lambda: init(jax.random.key(0))))
    return sum(leaf.size for leaf in leaves)


def _duration(config: PretrainConfig | FinetuneConfig) -> str:
    """Return a line about the tokens of the whole run."""
    if config.num_steps is None:
        data = "of the store" if isinstance(config, PretrainConfig) else "of the task's training rows"
        passes = "as many passes as the task's paper" if config.num_epochs is None else f"{config.num_epochs:g} passes"
        return f"tokens of the whole run: {passes} {data}; --num-steps gives a number of steps"
    if isinstance(config, FinetuneConfig):
        return f"steps of the whole run: {config.num_steps:,}; the lengths of their rows depend on the task"
    parts = phases(config.data, length=config.length, num_steps=config.num_steps)
    counts = [(part.end_step - part.first_step, part.length) for part in parts]
    total = sum(steps * length for steps, length in counts) * config.batch_size
    said = " + ".join(f"{steps:,} steps x {config.batch_size} x {length}" for steps, length in counts)
    return f"tokens of the whole run: {total:,} = {said}, padding included"


def _schedule(config: OptimizerConfig, num_steps: int | None) -> str:
    """Return a line about the learning rates."""
    peak = "the task's" if config.peak_lr is None else f"{config.peak_lr:g}"
    if config.peak_lr is None or num_steps is None:
        warmup = f"{config.warmup:.3g} of the steps" if config.warmup < 1 else f"{config.warmup:,g} steps"
        said = f" after a warmup of {warmup}" if config.warmup else ""
        return f"learning rate: peak {peak}{said}, decay {config.decay}"
    top = min(int(config.warmup_steps(num_steps)), num_steps - 1)
    at = sorted({0, top, (top + num_steps) // 2, num_steps - 1})
    schedule = schedule_of(config, num_steps)
    rates = ", ".join(f"{float(learning_rate(config, step, schedule)):.3g} at step {step:,}" for step in at)
    return f"learning rate ({config.decay}): {rates}"
