"""Samples of text during pretraining: `--sample-every` and `--sample-prompt`."""

import dataclasses
import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxlm.distributed.mesh import make_mesh
from jaxlm.errors import InputError
from jaxlm.inference.arguments import GenerationSettings
from jaxlm.inference.generation import Generator
from jaxlm.inference.loaded_run import LoadedRun, for_reading
from jaxlm.models import ModelConfig, build
from jaxlm.text.tokenizer import require_forward
from jaxlm.training.loop import ScheduledEvaluation
from jaxlm.training.pretraining import Plan
from jaxlm.training.pretraining_run import TrainingContext
from jaxlm.training.start import trained_length
from jaxlm.training.step import TrainState

log = logging.getLogger(__name__)


def during_pretraining(
    prompts: Sequence[str], every: int, model: ModelConfig | None = None
) -> list[Callable[[TrainingContext], ScheduledEvaluation]]:
    """Return the sampling of a continuation of each prompt, every `every` steps of pretraining; none if `every` is 0.

    A sample is that of `jaxlm.generate` with its defaults at the same step. It is printed and is a line of
    metrics.jsonl. Without prompts the model begins a text of its own.
    model: its config, where it is known before training begins.
    InputError for an interval that does not fit, and for an encoder that is known.
    """
    if prompts and not every:
        raise InputError("--sample-every must be above 0 with --sample-prompt, got 0; give the steps between samples")
    if every and model is not None and not build(model).is_causal:
        raise _of_an_encoder(every)
    return [lambda context: _evaluation(context, _distinct(prompts), every)] if every else []


def check_prompts(prompts: Sequence[str], every: int, planned: Plan) -> None:
    """Raise InputError, before anything is compiled, for a model that cannot continue a prompt from the first step on.

    prompts, every: as in `during_pretraining`.
    """
    if not every:
        return
    config, tokenizer = planned.config, planned.stores[0].tokenizer()
    model = build(config.model, for_reading(config.execution))
    if not model.is_causal:
        raise _of_an_encoder(every)
    require_forward(tokenizer, "--sample-every")
    longest = model.max_length
    if model.family.positions is not None:
        of_source = 0 if planned.source is None else planned.source.trained_length
        longest = min(longest, max(planned.phases[0].length, of_source))
    mesh = make_mesh(config.mesh)
    run = LoadedRun(config, model, None, tokenizer, 0, "", mesh, longest)
    distinct = _distinct(prompts)
    for prompt, ids in zip(distinct, tokenizer.encode_batch(distinct), strict=True):
        tokens = len(run.with_prefix(ids))
        if not 0 < tokens < longest:
            raise InputError(
                f"--sample-prompt must have from 1 to {longest - 1} tokens for this model, got {tokens}: "
                f"{json.dumps(prompt, ensure_ascii=False)}; give another"
            )


def _of_an_encoder(every: int) -> InputError:
    return InputError(f"--sample-every must be 0 for an encoder, got {every}; leave it out")


def _distinct(prompts: Sequence[str]) -> list[str]:
    """Return the prompts, each once; one that begins a text if there is none."""
    return list(dict.fromkeys(prompts)) or [""]


def _evaluation(context: TrainingContext, prompts: Sequence[str], every: int) -> ScheduledEvaluation:
    config, generators = context.config, dict[int, Generator]()
    model = build(config.model, for_reading(config.execution))

    def run_at(step: int, params: Any) -> LoadedRun:
        length, path = trained_length(context.run, step), context.run.path
        return LoadedRun(config, model, params, context.tokenizer, step, path, context.mesh, length)

    def evaluate(step: int, state: TrainState) -> None:
        run = run_at(step, state.weights)
        generator = generators.get(run.trained_length)
        if generator is None:
            generator = generators[run.trained_length] = Generator(run, GenerationSettings())
        generator.read(run)
        for prompt in prompts:
            ((sample,),) = generator([prompt])
            context.log.write(step, {"sample": {"prompt": prompt, "text": sample.text}})
            if jax.process_index() == 0:
                log.info("step %d: sample: %s", step, json.dumps(sample.text, ensure_ascii=False))
        generator.read(dataclasses.replace(run, params=None))  # training donates these parameters

    return ScheduledEvaluation(evaluate, every, first=True)
