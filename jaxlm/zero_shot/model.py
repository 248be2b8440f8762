"""A language model that scores the texts of zero-shot tasks, and that continues their prompts."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jax.sharding import Mesh

from jaxlm.distributed.mesh import use_mesh
from jaxlm.errors import InputError
from jaxlm.inference.decoding import CachedModel, Prompt, filled, for_inference, prefix_token
from jaxlm.inference.generation import TextStream, collect
from jaxlm.inference.scoring import Scored, Scorer, StreamScorer, TokenScores
from jaxlm.inference.strategies import Sampler, Sampling
from jaxlm.inference.text_scoring import MaskedLMScore, MaskedText, masked_lm_scores
from jaxlm.models.model import Model
from jaxlm.progress import Progress
from jaxlm.text import Tokenizer
from jaxlm.text.tokenizer import require_forward
from jaxlm.zero_shot.task import ScoredText, Text

GREEDY = Sampling(temperature=0.0)
_BEFORE = 16  # ids of the prompt that are decoded with the new ones, for the blank between them


class ZeroShotModel:
    """A model with its tokenizer, for any number of parameters of that model: set `params` before `scores`.

    A causal model scores each token given those before it. A bidirectional one scores each token given all others of
    the text (Salazar et al., 2020); with `within_word` those of its own word that follow are masked too (Kauf and
    Ivanova, 2023), which does not favour long words.
    stream_length: tokens of a row in which `stream` reads a running text, with the state that the row before left;
    None: there is no `stream`, for a model without a state or one that was not trained on streams.
    begin_all: put the end-of-text token in front of every text, also of those with a context.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        *,
        mesh: Mesh,
        batch_size: int,
        positions: int | None = None,
        stream_length: int | None = None,
        begin_all: bool = False,
        within_word: bool = False,
        not_greedy: Sequence[int] = (),
        show_progress: bool = True,
    ) -> None:
        require_forward(tokenizer, "a zero-shot task")
        self.model, self.tokenizer, self.mesh, self.batch_size = model, tokenizer, mesh, batch_size
        self.positions = positions or model.max_length
        self.params: Any = None
        self.samplers: dict[Any, Any] = {}  # those of `Continuer`, which keep their compiled programs
        self.begin_all, self.within_word, self.show_progress = begin_all, within_word, show_progress
        self.begin = prefix_token(tokenizer) if model.is_causal else []
        self.scorer: Any = None
        self.stream: StreamScorer | None = None
        if model.family.carries and stream_length is not None:
            self.stream = StreamScorer(model, mesh=mesh, length=stream_length)
        if model.is_causal:
            self.scorer = Scorer(
                model, mesh=mesh, batch_size=batch_size, positions=self.positions, not_greedy=not_greedy
            )

    def begins(self) -> str:
        """Return the token in front of a text in words, for `left_context` of a result."""
        if not self.model.is_causal:
            return "all other tokens of the text"
        if not self.begin_all:
            return "nothing"
        if not self.begin:
            return "nothing: the vocabulary has no end-of-text token"
        return f"{self.tokenizer.pieces(self.begin)[0]}"

    def scores(self, texts: Sequence[Text]) -> list[ScoredText]:
        """Return the scores of each text, in order. See `task.TextScorer`.

        Every process must call this with the same texts.
        """
        left = self.begin if self.begin_all else []
        encoded = encode_parts(self.tokenizer, texts)
        found = []
        progress = Progress("texts", len(texts), active=self.show_progress, compiles=True)
        room = self.positions + 1 - len(left) if self.model.is_causal else self.positions - 2  # without CLS and SEP
        running = self._scores(texts, encoded, left, progress.update)
        for text, (ids, ends), scores in zip(texts, encoded, running, strict=True):
            lost = ends[-1] - (ends[text.first - 1] if text.first else 0) - len(scores.log_probs)
            found.append(ScoredText(_parts(scores, [0, *ends], text.first, lost), len(ids) > room))
        progress.update(len(found))
        progress.close()
        return found

    def _scores(self, texts, encoded, left: list[int], report: Callable[[int], None]) -> Iterator[TokenScores]:
        """Yield the scores of the scored tokens of each text, and report the number of those that are done."""
        starts = [ends[text.first - 1] if text.first else 0 for text, (_, ends) in zip(texts, encoded, strict=True)]
        if self.scorer is not None:
            sequences = (
                Scored([*left, *ids], max(len(left) + start, 1))
                for start, (ids, _) in zip(starts, encoded, strict=True)
            )
            return self.scorer.tokens(self.params, sequences, report)
        masked = (MaskedText(ids, range(start, len(ids))) for start, (ids, _) in zip(starts, encoded, strict=True))
        found = masked_lm_scores(
            self.model,
            self.params,
            masked,
            self.tokenizer,
            mesh=self.mesh,
            batch_size=self.batch_size,
            positions=self.positions,
            within_word=self.within_word,
        )
        return _reported(found, report)


def _reported(scores: Iterable[MaskedLMScore], report: Callable[[int], None]) -> Iterator[TokenScores]:
    for done, score in enumerate(scores, 1):
        report(done)
        yield score.tokens


def encode_parts(tokenizer: Tokenizer, texts: Sequence[Text]) -> list[tuple[list[int], list[int]]]:
    """Return the ids of each text, encoded as a whole, and the index after the last id of each of its parts.

    InputError for a text whose ids do not split between a context and what follows it, and for one with nothing to
    score.
    """
    prefixes = [["".join(text.parts[:end]) for end in range(1, len(text.parts) + 1)] for text in texts]
    flat = iter(tokenizer.encode_batch(list(itertools.chain.from_iterable(prefixes))))
    found = []
    for text, some in zip(texts, prefixes, strict=True):
        *before, ids = [next(flat) for _ in some]
        ends = [*map(len, before), len(ids)]
        for part, (prefix, end) in enumerate(zip(before, ends, strict=False)):
            if prefix != ids[:end]:
                raise InputError(
                    f"{text.where}: {text.parts[part + 1]!r} must be separate tokens from the text before it, got one "
                    "token across the two; fix or remove the row"
                )
        if ends[-1] == (ends[text.first - 1] if text.first else 0):
            raise InputError(f"{text.where} must have a text to score, got an empty one; fix or remove the row")
        found.append((ids, ends))
    return found


def _parts(scores: TokenScores, ends: Sequence[int], first: int, lost: int) -> tuple[TokenScores, ...]:
    """Return the scores of each part from index `first` on. ends: the index after each part, with 0 in front. lost: the
    number of tokens at the beginning that are not scored.
    """
    begin = ends[first] + lost
    bounds = [max(end - begin, 0) for end in ends[first:]]
    return tuple(
        TokenScores(scores.log_probs[start:end], scores.greedy[start:end]) for start, end in itertools.pairwise(bounds)
    )


class Query(NamedTuple):
    """A prompt to continue. document: the slice of it that loses its end if the prompt is too long for the model; None:
    the prompt loses its beginning. where: the file and row, for messages.
    """

    text: str
    where: str
    document: slice | None = None


class Continuation(NamedTuple):
    """A continuation of a prompt.

    text: the text up to a stop string. ids: the generated ids, including the end token. shortened: True if the prompt
    was too long for the model.
    """

    text: str
    prompt: list[int]
    ids: list[int]
    shortened: bool


class Continuer:
    """A generator of continuations, for any number of parameters of a model.

    model: a `ZeroShotModel`. length: the maximum number of new tokens. stop: texts that end a continuation. Results
    depend neither on the other prompts nor on the batch size, beyond rounding.
    """

    def __init__(
        self, model, *, length: int, stop: Sequence[str] = (), sampling: Sampling = GREEDY, seed: int = 0
    ) -> None:
        self.model, self.length, self.stop = model, length, tuple(stop)
        if (sampling, seed) not in model.samplers:
            specials = model.tokenizer.specials
            cached = CachedModel(
                model.model,
                model.params,
                mesh=model.mesh,
                positions=model.positions,
                forbidden=list(specials.values()),
                size=model.tokenizer.size,
                end=specials.get("end"),
            )
            model.samplers[sampling, seed] = Sampler(cached, sampling, seed=seed)
        self._sampler = model.samplers[sampling, seed]

    def __call__(self, queries: Sequence[Query]) -> list[Continuation]:
        """Return the continuation of each prompt by the model's present parameters.

        Every process must call this with the same prompts. InputError if no prompt fits together with its continuation.
        """
        model = self.model
        self._sampler.cached.params = for_inference(model.model, model.params)
        encoded = model.tokenizer.encode_batch([query.text for query in queries])
        fitted = [self._fitted(query, ids) for query, ids in zip(queries, encoded, strict=True)]
        order = sorted(range(len(queries)), key=lambda index: -len(fitted[index][0]))
        found: dict[int, Continuation] = {}
        with Progress("prompts", len(queries), active=model.show_progress, compiles=True) as progress:
            for start in range(0, len(order), model.batch_size):
                batch = order[start : start + model.batch_size]
                prompts = [Prompt(fitted[index][0], self.length, index) for index in batch]
                for index, stream in zip(batch, self._streams(prompts), strict=True):
                    ids, shortened = fitted[index]
                    new = stream.ids[len(ids[-_BEFORE:]) :]
                    found[index] = Continuation(stream.generated, ids, new, shortened)
                progress.update(len(found))
        return [found[index] for index in range(len(queries))]

    def log_probabilities(self, continuations: Sequence[Continuation]) -> list[float]:
        """Return the log-probability of each continuation's ids, in nats, those that ended it included."""
        sequences = [Scored([*one.prompt, *one.ids], len(one.prompt)) for one in continuations]
        return [score.log_probability for score in self.model.scorer(self.model.params, sequences)]

    def _fitted(self, query: Query, ids: list[int]) -> tuple[list[int], bool]:
        """Return the ids of a prompt that leave room for the continuation, and whether some were left out."""
        model = self.model
        left = model.begin if model.begin_all else []
        room = model.positions - self.length - len(left)
        if room < 1:
            raise InputError(
                f"{query.where}: a continuation of {self.length} tokens must fit in the {model.positions} positions of "
                "the model that are used, after a prompt; give another run, or --beyond-length"
            )
        if len(ids) <= room:
            return [*left, *ids], False
        if query.document is not None:
            text, span = query.text, query.document
            before, document, after = model.tokenizer.encode_batch([text[: span.start], text[span], text[span.stop :]])
            if (kept := room - len(before) - len(after)) >= 0:
                return [*left, *before, *document[:kept], *after], True
        return [*left, *ids[-room:]], True

    def _streams(self, prompts: list[Prompt]) -> list[TextStream]:
        """Return the finished text of each prompt's continuation."""
        streams = [TextStream(self.model.tokenizer, prompt.ids[-_BEFORE:], self.stop) for prompt in prompts]
        with use_mesh(self.model.mesh):
            collect(streams, self._sampler(filled(prompts, self.model.batch_size)))
        return streams
