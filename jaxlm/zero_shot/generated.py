"""Prompts of tasks whose answers are generated, and their continuations in batches, in the order of the prompts.

A prompt file is a text with a field in braces for each part of a row. `{answer}` is the last field. A row as an example
is the whole file; a row to answer is the file up to `{answer}`. A prompt is shortened to fit the model.
"""

import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from jaxlm.distributed.mesh import use_mesh
from jaxlm.errors import InputError
from jaxlm.inference.decoding import CachedModel, Prompt, for_inference
from jaxlm.inference.generation import TextStream, collect
from jaxlm.inference.scoring import Scored
from jaxlm.inference.strategies import Sampler, Sampling
from jaxlm.progress import Progress
from jaxlm.reading.lines import Lines

_FIELD = re.compile(r"\{(\w+)\}")
GREEDY = Sampling(temperature=0.0)
_BEFORE = 16  # ids of the prompt that are decoded with the new ones, for the blank between them


class Query(NamedTuple):
    """A prompt to continue. document: the slice of it that loses its end if the prompt is too long for the model; None:
    the prompt loses its beginning. where: the file and row, for messages.
    """

    text: str
    where: str
    document: slice | None = None


class Template(NamedTuple):
    """A prompt file. name: its path, or that of the task's own file within the package."""

    name: str
    text: str

    def example(self, fields: Mapping[str, str]) -> str:
        """Return the text of a row with its answer."""
        return _FIELD.sub(lambda found: fields[found[1]], self.text)

    def query(self, fields: Mapping[str, str]) -> str:
        """Return the text of a row up to its answer, without a blank at its end, which the answer's token holds."""
        return self.question(fields).rstrip(" ")

    def question(self, fields: Mapping[str, str]) -> str:
        """Return the text of a row up to its answer."""
        return _FIELD.sub(lambda found: fields[found[1]], self.text[: self.text.index("{answer}")])

    def turns(self) -> tuple["Template", "Template"]:
        """Return the part for a document, and the part for each of several questions about it, from the line with
        `{question}` on.
        """
        begin = self.text.rfind("\n", 0, self.text.index("{question}")) + 1
        return Template(self.name, self.text[:begin]), Template(self.name, self.text[begin:])


def read_template(task: str, path: Path | None, fields: Sequence[str]) -> Template:
    """Return a prompt file, by default the task's own. InputError without the fields, or with another one."""
    if path is None:
        name = f"prompts/{task}.txt"
        text = (resources.files("jaxlm.zero_shot") / "prompts" / f"{task}.txt").read_text(encoding="utf-8")
    else:
        name = str(path)
        text = "".join(line + "\n" for _, line in Lines(path))
    found = _FIELD.findall(text)
    listed = ", ".join(f"{{{field}}}" for field in (*fields, "answer"))
    if sorted(found) != sorted((*fields, "answer")) or found[-1] != "answer":
        got = ", ".join(f"{{{field}}}" for field in found) or "none"
        raise InputError(f"--prompt {name} must have the fields {listed} once, {{answer}} last, got {got}; correct it")
    return Template(name, text)


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
        padding = Prompt(prompts[0].ids[:1], 1)
        filled = [*prompts, *[padding] * (self.model.batch_size - len(prompts))]  # all batches have one shape
        with use_mesh(self.model.mesh):
            collect(streams, self._sampler(filled))
        return streams
