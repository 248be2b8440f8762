"""Continuations of texts with a trained language model: one path for the command, for Python and for pretraining.

A `Generator` yields the samples of each prompt, in order, and keeps the compiled programs for further prompts. Prompts
are run in batches; neither the batch nor the number of samples changes a sample beyond rounding. A `TextStream` decodes
ids that arrive one by one: whole characters only, up to a stop string. `during_pretraining` gives the samples
of `--sample-every` and `--sample-prompt`.
"""

import dataclasses
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxlm.distributed.mesh import make_mesh, use_mesh
from jaxlm.errors import InputError
from jaxlm.inference.arguments import GenerationSettings
from jaxlm.inference.decoding import CachedModel, Prompt, filled, for_inference, length_bucket
from jaxlm.inference.loaded_run import LoadedRun, for_reading
from jaxlm.inference.rows import default_batch_size
from jaxlm.inference.scoring import Scored, Scorer
from jaxlm.inference.strategies import ENDED, BeamSearch, Sampler
from jaxlm.models import ModelConfig, build, family_of
from jaxlm.text import Tokenizer
from jaxlm.text.tokenizer import require_forward
from jaxlm.training.loop import ScheduledEvaluation
from jaxlm.training.pretraining import Plan
from jaxlm.training.pretraining_run import TrainingContext
from jaxlm.training.start import trained_length
from jaxlm.training.step import TrainState

_PARTIAL_CHARACTERS = 3  # bytes of an incomplete UTF-8 character, each of which may decode to one U+FFFD
log = logging.getLogger(__name__)
DEFAULT_LENGTH = 100


class TextStream:
    """Decoder of ids that arrive one by one into text; text already returned never changes.

    A character whose bytes have not all arrived is held back, and so is the beginning of a stop string. The ids are
    decoded together with the prompt, as some tokenizers write the blank between two tokens only if both are present.

    given: the text so far, prompt included. stopped: the stop string after the prompt that completed first, if any; the
    text ends before it, wherever the borders of the tokens are. Of two that complete at once, it is the longer one.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self.tokenizer = tokenizer
        self.ids = list(prompt)
        self.stop = tuple(stop)
        self.given = ""
        self.stopped: str | None = None
        self._start = len(tokenizer.decode(self.ids))

    @property
    def generated(self) -> str:
        """The text so far, without the prompt."""
        return self.given[self._start :]

    def push(self, *ids: int) -> str:
        """Add ids; return the new text that further ids cannot change. Ids after a stop string have no effect."""
        if self.stopped is not None:
            return ""
        self.ids.extend(ids)
        text = self.tokenizer.decode(self.ids)
        end = self._end(text, len(text) - _unfinished(text))
        return self._give(text, end if self.stopped is not None else end - _held(text[self._start : end], self.stop))

    def finish(self) -> str:
        """Return the rest of the text, with incomplete characters as U+FFFD."""
        if self.stopped is not None:
            return ""
        text = self.tokenizer.decode(self.ids)
        return self._give(text, self._end(text, len(text)))

    def _end(self, text: str, end: int) -> int:
        """Return the first index, up to `end`, that is not part of the output, and keep the stop string there."""
        found = first_stop(text[self._start : end], self.stop)
        if found is None:
            return end
        at, self.stopped = found
        return self._start + at

    def _give(self, text: str, end: int) -> str:
        if end <= len(self.given) or not text.startswith(self.given):
            return ""
        fresh, self.given = text[len(self.given) : end], text[:end]
        return fresh


def collect(
    streams: Sequence[TextStream], steps: Iterable[np.ndarray], on_text: Callable[[str], None] | None = None
) -> None:
    """Add the new ids of each step to streams until all are complete, and finish the streams.

    steps: of a `Sampler`, ids (prompts, samples), which may have further rows at the end; they are not read further
    than needed. on_text: called with each piece of the first stream's text, prompt included.
    """
    if on_text is not None:
        on_text(streams[0].push())
    for new in steps:
        ids = new.reshape(-1).tolist()[: len(streams)]
        for stream, i in zip(streams, ids, strict=True):
            if i == ENDED:
                continue
            if on_text is None and not stream.stop:
                stream.ids.append(i)  # decoded once, at the end
            elif (fresh := stream.push(i)) and on_text is not None:
                on_text(fresh)
        if all(i == ENDED or stream.stopped is not None for stream, i in zip(streams, ids, strict=True)):
            break
    rest = [stream.finish() for stream in streams]
    if on_text is not None:
        on_text(rest[0])


def first_stop(text: str, stop: Sequence[str]) -> tuple[int, str] | None:
    """Return the index and the stop string that a reader of `text` completes first, the longer of two; or None."""
    found = [(at + len(word), at, word) for word in stop if (at := text.find(word)) >= 0]
    return min(found)[1:] if found else None


@dataclass(frozen=True)
class Sample:
    """A continuation of a prompt; its fields are those of a line of output.

    sample: its index among those of the prompt. text: the decoded prompt and the output. generated: the output alone.
    tokens: the ids generated, those of the end and of a stop string included. ended: the last id ends a text. stop: the
    stop string that ended it, if any. score: of a beam search. log_probabilities: of the tokens, in nats, if asked for.
    """

    prompt: str
    sample: int
    text: str
    generated: str
    tokens: list[int]
    ended: bool
    stop: str | None
    score: float | None
    log_probabilities: list[float] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields that apply."""
        return {name: value for name, value in vars(self).items() if value is not None}


class Generator:
    """A run that continues texts with the same settings; it keeps the compiled programs.

    InputError for a model that does not predict the next token, and for settings that are out of range.
    """

    def __init__(self, run: LoadedRun, settings: GenerationSettings) -> None:
        settings.check()
        self.run, self.settings, self.tokenizer = run, settings, run.tokenizer
        require_forward(run.tokenizer, "generate")
        specials = self.tokenizer.specials
        self._cached = CachedModel(
            run.require_decoder("generate", "give the run of a decoder or of a BERT"),
            run.params,
            mesh=run.mesh,
            positions=None if run.model.has_source else run.trained_length,
            sliding=settings.beyond_length,
            forbidden=list(specials.values()),
            size=self.tokenizer.size,
            end=specials.get("end"),
            repetition_penalty=settings.repetition_penalty,
            min_length=settings.min_length,
        )
        self._sampler = Sampler(self._cached, settings.sampling, seed=settings.seed)
        self._search = BeamSearch(self._cached, settings.beams, length_penalty=settings.length_penalty)
        self._scorer = Scorer(
            run.model,
            mesh=run.mesh,
            batch_size=default_batch_size(settings.num_samples, run.mesh),
            positions=run.trained_length,
        )
        self._noted = False

    def read(self, run: LoadedRun) -> None:
        """Continue texts with the parameters of another step of the run from here on; None: hold none."""
        self.run = run
        self._cached.params = None if run.params is None else for_inference(run.model, run.params)

    def __call__(
        self, prompts: Sequence[str], *, number: int = 0, done: int = 0, on_text: Callable[[str], None] | None = None
    ) -> Iterator[list[Sample]]:
        """Yield the samples of each prompt, in order.

        number: the index of the first prompt, a seed of the sampling. done: the number of prompts to leave out from the
        beginning; the others have the same samples. on_text: called with each new piece of the text, prompt included,
        of a lone sample of a lone prompt.
        InputError if a prompt is empty and the model cannot begin a text, or if a continuation has no room, before
        anything is generated.
        """
        inputs = self._inputs(prompts, number)
        return self._batches(prompts, inputs, done, on_text if len(prompts) == self.settings.num_samples == 1 else None)

    def _batches(self, prompts, inputs, done: int, say) -> Iterator[list[Sample]]:
        size = self.settings.batch_size
        rows = length_bucket(min(len(prompts), size), size, smallest=1)
        rows = default_batch_size(rows, self.run.mesh)
        for first in range(0, len(prompts), size):
            batch = inputs[first : first + size]
            if first + len(batch) <= done:
                continue
            with use_mesh(self.run.mesh):
                found = (self._sampled if self.settings.beams == 1 else self._searched)(batch, rows, say)
            for index in range(max(first, done), first + len(batch)):
                samples = enumerate(found[index - first])
                made = [self._sample(prompts[index], inputs[index], k, *one) for k, one in samples]
                yield self._scored(inputs[index], made) if self.settings.log_probabilities else made

    def _inputs(self, prompts: Sequence[str], number: int) -> list[Prompt]:
        """Return the prompts as ids, each with the maximum length of its continuation."""
        run, inputs = self.run, []
        for index, ids in enumerate(self.tokenizer.encode_batch(list(prompts))):
            name = "a prompt" if len(prompts) == 1 else f"prompt {index + 1}"
            ids, source = run.prompt_of(ids)
            if not ids:
                raise InputError(
                    f"{name} must not be empty for this model, which was trained without a token that begins a text; "
                    "give some text"
                )
            prompt = Prompt(ids, self._length(ids), number + index, source)
            self._cached.check(prompt, name)
            inputs.append(prompt)
        return inputs

    def _length(self, ids: Sequence[int]) -> int:
        if self.settings.length is not None:
            return self.settings.length
        if self.settings.beyond_length:
            return DEFAULT_LENGTH
        length = max(1, min(DEFAULT_LENGTH, self._cached.room(ids)))
        if not self._noted and self._cached.positions < min(len(ids) + DEFAULT_LENGTH, self.run.model.max_length):
            log.info("note: at most %d new tokens: %s", length, self.run.limit)
            self._noted = True
        return length

    def _sampled(self, batch: Sequence[Prompt], rows: int, say) -> list[list[tuple[TextStream, None]]]:
        """Return the finished streams of all samples of each prompt, without scores. rows: with those of padding."""
        count = self.settings.num_samples
        streams = [self._stream(prompt) for prompt in batch for _ in range(count)]
        collect(streams, self._sampler(filled(batch, rows), samples=count), say)
        return [[(stream, None) for stream in streams[k : k + count]] for k in range(0, len(streams), count)]

    def _searched(self, batch: Sequence[Prompt], rows: int, say) -> list[list[tuple[TextStream, float]]]:
        """Return the finished streams of the best hypotheses of each prompt, with their scores."""

        def stream_of(row: int, tokens: list[int]) -> TextStream:
            stream = self._stream(batch[row])
            stream.push(*tokens)
            return stream

        def stopped(row: int, tokens: list[int]) -> bool:
            return row < len(batch) and stream_of(row, tokens).stopped is not None

        found = self._search(filled(batch, rows), stopped=stopped if self.settings.stop else None)
        results = []
        for row in range(len(batch)):
            best = found[row][: self.settings.num_samples]
            results.append([(stream_of(row, one.tokens), one.score) for one in best])
            for stream, _ in results[-1]:
                stream.finish()
        if say is not None:
            say(results[0][0][0].given)
        return results

    def _scored(self, prompt: Prompt, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples of a prompt with the log-probabilities of their tokens."""
        sequences = [Scored([*prompt.ids, *sample.tokens], len(prompt.ids), prompt.source) for sample in samples]
        found = self._scorer.tokens(self.run.params, sequences)
        pairs = zip(samples, found, strict=True)
        return [dataclasses.replace(sample, log_probabilities=one.log_probs.tolist()) for sample, one in pairs]

    def _stream(self, prompt: Prompt) -> TextStream:
        return TextStream(self.tokenizer, prompt.ids, self.settings.stop)

    def _sample(self, text: str, prompt: Prompt, number: int, stream: TextStream, score: float | None) -> Sample:
        tokens = stream.ids[len(prompt.ids) :]
        ended = bool(tokens) and tokens[-1] == self._cached.end
        return Sample(text, number, stream.given, stream.generated, tokens, ended, stream.stopped, score)


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
        raise _without_prompts(model, every)
    return [lambda context: _evaluation(context, _distinct(prompts), every)] if every else []


def check_prompts(prompts: Sequence[str], every: int, planned: Plan) -> None:
    """Raise InputError, before anything is compiled, for a model that cannot continue a prompt from the first step on.

    prompts, every: as in `during_pretraining`.
    """
    if not every:
        return
    config, tokenizer = planned.config, planned.tokenizer
    model = build(config.model, for_reading(config.execution))
    if not model.is_causal:
        raise _without_prompts(config.model, every)
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


def _held(text: str, stop: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that begins a stop string."""
    longest = max((len(word) - 1 for word in stop), default=0)
    for size in range(min(longest, len(text)), 0, -1):
        if any(word.startswith(text[-size:]) for word in stop):
            return size
    return 0


def _unfinished(text: str) -> int:
    """Return the number of characters at the end that further ids may change."""
    return next((k for k in range(_PARTIAL_CHARACTERS) if not text[: len(text) - k].endswith("\ufffd")), 3)


def _without_prompts(model: ModelConfig, every: int) -> InputError:
    return InputError(f"--sample-every must be 0 for {family_of(model).title}, got {every}; leave it out")


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
