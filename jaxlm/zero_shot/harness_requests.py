"""Requests of the lm-evaluation-harness for log-probabilities and for generated text, answered by a language model.

Contexts, truncation, arguments and stop strings follow the harness's own Hugging Face backend (EleutherAI, lm_eval
0.4.13: `TemplateLM` in api/model.py, models/huggingface.py, `normalize_gen_kwargs` in models/utils.py), so that both
give the same values for the same model. One difference: plain text never yields a special token here. This module needs
no lm_eval.
"""

import hashlib
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxlm.distributed.mesh import use_mesh
from jaxlm.distributed.processes import of_every_process
from jaxlm.errors import InputError, RunError
from jaxlm.inference.decoding import CachedModel, Prompt, filled
from jaxlm.inference.generation import TextStream, collect
from jaxlm.inference.loaded_run import LoadedRun
from jaxlm.inference.rows import default_batch_size, longest_first
from jaxlm.inference.scoring import Scored, Scorer
from jaxlm.inference.strategies import Sampler, Sampling
from jaxlm.models.family import DEFAULT_WINDOW, UNLIMITED
from jaxlm.progress import Progress
from jaxlm.ranges import checked
from jaxlm.text import Tokenizer
from jaxlm.text.tokenizer import require_forward

log = logging.getLogger(__name__)
Answered = Callable[[int, Any], None]  # (index of a request, its answer), called when an answer is known
DEFAULT_NEW_TOKENS = 256
# The names of the maximum number of new tokens, the first of which counts.
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
KNOWN = {*LENGTHS, "until", "do_sample", "temperature", "top_k", "top_p", "repetition_penalty"}
WITHOUT_EFFECT = {"num_beams": 1, "num_return_sequences": 1, "length_penalty": 1.0, "use_cache": True}


def prefix_of(tokenizer: Tokenizer) -> list[int]:
    """Return the id in front of a text without a context, as a list: `start`, else `end`; empty without both.

    They are `bos_token` and `eos_token` of an exported tokenizer.
    """
    return next(([tokenizer.specials[role]] for role in ("start", "end") if role in tokenizer.specials), [])


class HarnessRequests:
    """A causal model that answers requests for log-probabilities, in nats, at the batch size and on the mesh of a run.

    longest: the most positions in use. prefix: the id in front of a text without a context, as a list; without one the
    first token of such a text is not scored. counts: the number of requests answered, by kind.
    InputError for a model that does not predict the next token. Every process must make the same calls.
    """

    def __init__(
        self,
        run: LoadedRun,
        *,
        batch_size: int,
        beyond_length: bool = False,
        prefix: Sequence[int] | None = None,
    ) -> None:
        model = run.require_decoder("the harness", "use evaluate task or evaluate zero-shot for an encoder")
        self.run, self.tokenizer, self.batch_size = run, run.tokenizer, batch_size
        require_forward(run.tokenizer, "the harness")
        positions = run.positions(beyond=beyond_length)
        self.longest = DEFAULT_WINDOW if positions == UNLIMITED else positions
        self.prefix = list(prefix_of(self.tokenizer) if prefix is None else prefix)
        if prefix is None and run.prefix_ids and run.prefix_ids != self.prefix:
            given, trained = (self.tokenizer.pieces(ids)[0] for ids in (self.prefix, run.prefix_ids))
            log.info(
                "note: %s is in front of a text without a context, as in the exported model; training separated "
                "documents by %s: --prefix-token-id %d uses it",
                given,
                trained,
                run.prefix_ids[0],
            )
        self.counts: Counter[str] = Counter()
        self._scorer = Scorer(model, mesh=run.mesh, batch_size=batch_size, positions=self.longest)

    def log_likelihoods(
        self, pairs: Sequence[tuple[str, str]], answered: Answered | None = None
    ) -> list[tuple[float, bool]]:
        """Return (log-probability of the continuation, True if each of its tokens is the likeliest) for each pair.

        pairs: (context, continuation). White space at the end of a context belongs to the continuation. A context that
        is too long loses its beginning. InputError for a continuation without tokens, or longer than the model.
        """
        encoded = self.encode_pairs(pairs)
        if too_long := sum(len(context) + len(continuation) > self.longest + 1 for context, continuation in encoded):
            note = f"the model has {self.longest} positions{self.more_length}"
            log.info("note: %d of %d requests lost the beginning of their context: %s", too_long, len(pairs), note)
        return self.token_log_likelihoods(encoded, answered)

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
        """Return the ids of each context and continuation.

        Both are encoded together, and divided where the ids of the context alone end. Without a context the prefix
        takes its place, or the first token of the continuation if there is no prefix or the two are equal.
        """
        texts = [text for context, continuation in pairs for text in (context.rstrip(), context + continuation)]
        encoded = self.tokenizer.encode_batch(texts)
        found = []
        for (context, continuation), before, whole in zip(pairs, encoded[::2], encoded[1::2], strict=True):
            after = whole[len(before) :]
            if not before:
                begun = self.prefix and self.prefix != after[:1]
                before, after = (self.prefix, after) if begun else (after[:1], after[1:])
            if not after:
                raise InputError(
                    f"a continuation must have tokens of its own after its context, got {continuation!r} after "
                    f"{context[-40:]!r}; change the task's prompt, or leave the row out"
                )
            found.append((before, after))
        return found

    def scored(self, context: Sequence[int], continuation: Sequence[int]) -> Scored:
        """Return a continuation to score after the end of its context, at most `longest` + 1 ids."""
        if len(continuation) > self.longest:
            raise InputError(
                f"a continuation must have at most {self.longest} tokens, got {len(continuation)}; leave the row out"
                f"{self.more_length}"
            )
        ids = [*context, *continuation][-(self.longest + 1) :]
        return Scored(ids, len(ids) - len(continuation))

    def token_log_likelihoods(
        self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], answered: Answered | None = None
    ) -> list[tuple[float, bool]]:
        """Return the answers of `log_likelihoods` for pairs of ids; a context must have at least one."""
        self.counts["loglikelihood"] += len(pairs)
        return self._answers("loglikelihood", [self.scored(*pair) for pair in pairs], answered)

    def rolling(self, texts: Sequence[str], answered: Answered | None = None) -> list[float]:
        """Return the log-probability of each text after the prefix, each token once.

        A text that is too long is scored in windows of `longest` tokens, the first of which begins with the prefix.
        Each later window has one token of context in front; the last one has all that fits.
        """
        self.counts["loglikelihood_rolling"] += len(texts)
        encoded = self.tokenizer.encode_batch(texts)
        windows = [list(rolling_windows([*self.prefix, *ids], self.longest)) for ids in encoded]
        found = iter(self._answers("loglikelihood_rolling", [one for some in windows for one in some], None))
        totals = [sum((next(found)[0] for _ in some), 0.0) for some in windows]
        if answered is not None:
            for index, total in enumerate(totals):
                answered(index, total)
        return totals

    def _answers(self, kind: str, sequences: Sequence[Scored], answered: Answered | None) -> list[tuple[float, bool]]:
        """Return the answers for sequences, the longest of which run first."""
        same_everywhere(sequences)
        order = longest_first([len(sequence.ids) for sequence in sequences])
        found: list[Any] = [None] * len(sequences)
        with self.progress(kind, len(sequences)) as progress:
            in_order = (sequences[index] for index in order)
            running = self._scorer.tokens(self.run.params, in_order, progress.update)
            for index, tokens in zip(order, running, strict=True):
                found[index] = tokens.score.log_probability, bool(tokens.greedy.all())
                if answered is not None:
                    answered(index, found[index])
        return found

    def progress(self, kind: str, total: int) -> Progress:
        """Return the progress of requests, shown on process 0."""
        return Progress(f"{kind} requests", total, active=jax.process_index() == 0, compiles=True)

    @property
    def more_length(self) -> str:
        """A further remedy for a text that is too long, for messages."""
        return ", or give --beyond-length" if self.longest < min(self.run.model.max_length, DEFAULT_WINDOW) else ""


def rolling_windows(ids: Sequence[int], longest: int) -> Iterator[Scored]:
    """Yield sequences of at most `longest` + 1 ids that score each of `ids` but the first, once."""
    for begin in range(1, len(ids), longest):
        end = min(begin + longest, len(ids))
        start = max(0, end - longest - 1)
        yield Scored(ids[start:end], begin - start)


def same_everywhere(requests: Sequence[Any]) -> None:
    """Raise RunError unless all processes have the same requests, which the devices answer together."""
    if jax.process_count() == 1:
        return
    digest = hashlib.sha256(repr(list(requests)).encode()).digest()
    bits = of_every_process(np.unpackbits(np.frombuffer(digest, np.uint8)).astype(bool))
    if (bits != bits[0]).any():
        raise RunError("processes have different requests; give each the same data, the same flags and fixed seeds")


class Continuation(NamedTuple):
    """Settings of a request.

    length: the maximum number of new tokens. stop: texts that end the answer, which ends before them.
    """

    length: int
    stop: tuple[str, ...]
    sampling: Sampling
    repetition_penalty: float


def continuation(given: Mapping[str, Any]) -> Continuation:
    """Return the settings of a request's arguments. InputError for an argument that is not supported.

    Without `do_sample` a positive temperature samples; `do_sample` without a temperature samples at 1.
    """
    for name, value in given.items():
        if name not in KNOWN and (name not in WITHOUT_EFFECT or value != WITHOUT_EFFECT[name]):
            raise InputError(
                f"--gen_kwargs {name} must be one of {', '.join(sorted(KNOWN))}, got {name}={value}; leave it out"
            )
    length = next((given[name] for name in LENGTHS if given.get(name) is not None), DEFAULT_NEW_TOKENS)
    until = given.get("until") or []
    stop = [until] if isinstance(until, str) else list(until)
    temperature, sample = given.get("temperature"), given.get("do_sample")
    if sample is False or (sample is None and temperature is None):
        temperature = 0.0
    sampling = Sampling(
        1.0 if temperature is None else float(temperature), int(given.get("top_k") or 0), float(given.get("top_p") or 1)
    )
    checked(sampling)
    return Continuation(
        int(length), tuple(text for text in stop if text), sampling, float(given.get("repetition_penalty") or 1.0)
    )


class GenerationRequests:
    """A causal model that answers requests for generated text; it keeps the compiled programs.

    seed: of sampling. Samples depend on it and on the index of the prompt.
    """

    def __init__(self, requests: HarnessRequests, *, seed: int = 0) -> None:
        self._requests, self._seed = requests, seed
        self._samplers: dict[tuple[Sampling, float], Sampler] = {}

    def __call__(self, prompts: Sequence[tuple[str, Mapping[str, Any]]], answered: Answered | None = None) -> list[str]:
        """Return the text that continues each prompt, without the prompt and without its stop string.

        prompts: (context, arguments). A context that leaves no room for its maximum number of new tokens loses its
        beginning. InputError for arguments that are not supported, and for more new tokens than the model has
        positions. Every process must make the same call.
        """
        same_everywhere(prompts)
        requests, size = self._requests, self._requests.batch_size
        requests.counts["generate_until"] += len(prompts)
        groups = defaultdict(list)
        for index, (_, given) in enumerate(prompts):
            groups[continuation(given)].append(index)
        inputs = {wanted: self._prompts(prompts, some, wanted.length) for wanted, some in groups.items()}
        texts, done = [""] * len(prompts), 0
        with requests.progress("generate_until", len(prompts)) as progress:
            for wanted, some in inputs.items():
                for batch in (some[first : first + size] for first in range(0, len(some), size)):
                    for prompt, text in zip(batch, self._texts(batch, wanted), strict=True):
                        texts[prompt.number] = text
                        if answered is not None:
                            answered(prompt.number, text)
                    done += len(batch)
                    progress.update(done)
        return texts

    def _prompts(self, prompts, some: Sequence[int], length: int) -> list[Prompt]:
        """Return the prompts of some indices as ids, the longest first."""
        requests = self._requests
        room = requests.longest - length
        if room < 1 or length < 1:
            raise InputError(
                f"--gen_kwargs max_gen_toks must be from 1 to {requests.longest - 1}, below the length of the model, "
                f"got {length}; give --gen_kwargs max_gen_toks={max(1, requests.longest // 2)}{requests.more_length}"
            )
        found = []
        encoded = requests.tokenizer.encode_batch([prompts[index][0] for index in some])
        for index, ids in zip(some, encoded, strict=True):
            kept = (ids or requests.prefix)[-room:]
            if not kept:
                raise InputError(
                    "a prompt must not be empty for a model without a token that begins a text, got ''; leave it out"
                )
            found.append(Prompt(kept, length, index))
        return sorted(found, key=lambda prompt: -len(prompt.ids))

    def _texts(self, batch: Sequence[Prompt], wanted: Continuation) -> list[str]:
        """Return the text that continues each prompt of a batch."""
        mesh = self._requests.run.mesh
        rows = default_batch_size(self._requests.batch_size, mesh)
        streams = [TextStream(self._requests.tokenizer, prompt.ids, wanted.stop) for prompt in batch]
        with use_mesh(mesh):
            collect(streams, self._sampler(wanted)(filled(batch, rows)))
        return [stream.generated for stream in streams]

    def _sampler(self, wanted: Continuation) -> Sampler:
        run, specials = self._requests.run, self._requests.tokenizer.specials
        key = wanted.sampling, wanted.repetition_penalty
        if key not in self._samplers:
            cached = CachedModel(
                run.model,
                run.params,
                mesh=run.mesh,
                positions=self._requests.longest,
                forbidden=list(specials.values()),
                size=self._requests.tokenizer.size,
                end=specials.get("end"),
                repetition_penalty=wanted.repetition_penalty,
            )
            self._samplers[key] = Sampler(cached, wanted.sampling, seed=self._seed)
        return self._samplers[key]
