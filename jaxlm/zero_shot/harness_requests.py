"""Requests of the lm-evaluation-harness for log-probabilities, answered by a language model.

Contexts and truncation follow the harness's own Hugging Face backend (EleutherAI, lm_eval 0.4.13: `TemplateLM` in
api/model.py, models/huggingface.py, utils.py), so that both give the same values for the same model. One difference:
plain text never yields a special token here. This module needs no lm_eval.
"""

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxlm.distributed.agreement import of_every_process
from jaxlm.errors import InputError, RunError
from jaxlm.inference.loaded_run import LoadedRun
from jaxlm.inference.rows import longest_first
from jaxlm.inference.scoring import Scored, Scorer
from jaxlm.models.family import DEFAULT_WINDOW, UNLIMITED
from jaxlm.progress import Progress
from jaxlm.text import Tokenizer
from jaxlm.text.backward import require_forward

log = logging.getLogger(__name__)


Answered = Callable[[int, Any], None]  # (index of a request, its answer), called when an answer is known


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
        show_progress: bool = True,
    ) -> None:
        model = run.decoder("the harness", "use evaluate task or evaluate zero-shot for an encoder")
        self.run, self.tokenizer, self.batch_size = run, run.tokenizer, batch_size
        require_forward(run.tokenizer, "the harness")
        positions = run.positions(beyond=beyond_length)
        self.longest = DEFAULT_WINDOW if positions == UNLIMITED else positions
        self.prefix = list(prefix_of(self.tokenizer) if prefix is None else prefix)
        if prefix is None and run.left and run.left != self.prefix:
            given, trained = (self.tokenizer.pieces(ids)[0] for ids in (self.prefix, run.left))
            log.info(
                "note: %s is in front of a text without a context, as in the exported model; training separated "
                "documents by %s: --prefix-token-id %d uses it",
                given,
                trained,
                run.left[0],
            )
        self.counts: Counter[str] = Counter()
        self._scorer = Scorer(model, mesh=run.mesh, batch_size=batch_size, positions=self.longest)
        self._show_progress = show_progress

    def log_likelihoods(
        self, pairs: Sequence[tuple[str, str]], answered: Answered | None = None
    ) -> list[tuple[float, bool]]:
        """Return (log-probability of the continuation, True if each of its tokens is the likeliest) for each pair.

        pairs: (context, continuation). White space at the end of a context belongs to the continuation. A context that
        is too long loses its beginning. InputError for a continuation without tokens, or longer than the model.
        """
        encoded = self.encode_pairs(pairs)
        if cut := sum(len(context) + len(continuation) > self.longest + 1 for context, continuation in encoded):
            note = f"the model has {self.longest} positions{self.more_length}"
            log.info("note: %d of %d requests lost the beginning of their context: %s", cut, len(pairs), note)
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
        return Progress(
            f"{kind} requests", total, active=self._show_progress and jax.process_index() == 0, compiles=True
        )

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
