"""Requests of the lm-evaluation-harness for generated text, answered by a language model.

Arguments, truncation and stop strings follow the harness's own Hugging Face backend (EleutherAI, lm_eval 0.4.13:
`normalize_gen_kwargs` in models/utils.py, `generate_until` in models/huggingface.py). This module needs no lm_eval.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxlm.distributed.mesh import use_mesh
from jaxlm.errors import InputError
from jaxlm.inference.decoding import CachedModel, Prompt, filled
from jaxlm.inference.prediction import default_batch_size
from jaxlm.inference.sampling import Sampler, Sampling
from jaxlm.inference.text_stream import TextStream, collect
from jaxlm.zero_shot.harness_requests import Answered, HarnessRequests, same_everywhere

DEFAULT_NEW_TOKENS = 256
# The names of the maximum number of new tokens, the first of which counts.
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
KNOWN = {*LENGTHS, "until", "do_sample", "temperature", "top_k", "top_p", "repetition_penalty"}
WITHOUT_EFFECT = {"num_beams": 1, "num_return_sequences": 1, "length_penalty": 1.0, "use_cache": True}


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
    sampling.check()
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
