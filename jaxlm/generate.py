"""Continue a prompt with a trained language model: `python -m jaxlm.generate --run RUN --prompt 'It was'`.

An encoder fills the blanks of its prompt instead: `--prompt 'It was a [MASK] day.'` gives the best tokens for each.
A single sample is printed while it is generated, several samples after all of them are complete. The output begins with
the decoded prompt. Without --prompt each line of standard input is a prompt (blank lines are skipped). --prompt ""
starts a new text.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TextIO

import tyro

from jaxlm.config import command_line
from jaxlm.distributed.devices import prepare_process
from jaxlm.errors import EXIT_FAILED, InputError, run_command
from jaxlm.inference.decoding import ENDED, Decoder, Sampling, TextStream
from jaxlm.inference.loaded_run import LoadedRun, load_run
from jaxlm.inference.masked_lm_scoring import (
    MASK,
    candidates_json,
    candidates_text,
    check_masked_lm,
    masked_lm_scores,
    masked_text,
)
from jaxlm.inference.prediction import default_batch_size
from jaxlm.tasks.reading.files import numbered_lines
from jaxlm.training.config import check_seed

DEFAULT_LENGTH = 100


@dataclass(frozen=True)
class Arguments:
    """Continue prompts with a trained language model."""

    run: str
    """A run: RUN or RUN@STEP."""
    prompt: str | None = None
    """Text to continue; '' starts a new text. Default, or '-': each line of standard input."""
    length: int | None = None
    """Maximum number of new tokens. Default: 100, or less to stay within the trained length."""
    beyond_length: bool = False
    """Use positions of the position table that were never trained."""
    samples: int = 1
    """Number of continuations per prompt."""
    top: int = 5
    """Number of candidates per blank, for an encoder."""
    sampling: Annotated[Sampling, tyro.conf.arg(name="")] = field(default_factory=Sampling)
    seed: int = 0
    """Seed of the sampling. The same seed, prompt and settings give the same text."""
    output: Path | None = None
    """JSONL file for the samples: prompt, sample, text, tokens, ended."""


def generate(arguments: Arguments) -> None:
    """Load the run and continue every prompt."""
    for name in ("length", "samples", "top"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise InputError(f"--{name} must be positive, got {value}")
    arguments.sampling.check()
    check_seed("--seed", arguments.seed)
    run = load_run(arguments.run)
    if run.model.family.context == "bidirectional":
        fill(run, arguments)
        return
    specials = run.tokenizer.specials
    decoder = Decoder(
        run.model,
        run.params,
        sampling=arguments.sampling,
        positions=run.positions(beyond=arguments.beyond_length),
        forbidden=list(specials.values()),
        size=run.tokenizer.size,
        end=specials.get("end"),
        seed=arguments.seed,
    )
    output = _open(arguments.output)
    try:
        for number, prompt in enumerate(prompts(arguments.prompt)):
            for sample in continue_prompt(run, decoder, prompt, number, arguments):
                if output is not None:
                    output.write(json.dumps(sample, ensure_ascii=False) + "\n")
                    output.flush()
    finally:
        if output is not None:
            output.close()


def fill(run: LoadedRun, arguments: Arguments) -> None:
    """Fill the blanks of every prompt with an encoder."""
    model = check_masked_lm(run.model, run.params, run.tokenizer, run.name)
    output = _open(arguments.output)
    try:
        for prompt in prompts(arguments.prompt):
            masked = masked_text(run.tokenizer, prompt)
            if not masked.has_masks:
                raise InputError(
                    f"{run.path} is {run.model.family.title}, which fills blanks: put {MASK} into the prompt"
                )
            size = default_batch_size(len(masked.where), run.mesh)
            (answer,) = masked_lm_scores(
                model,
                run.params,
                [masked],
                run.tokenizer,
                mesh=run.mesh,
                batch_size=size,
                top=arguments.top,
                positions=run.positions(beyond=arguments.beyond_length),
            )
            named = candidates_json(run.tokenizer, answer.candidates)
            print(candidates_text(prompt, named), flush=True)
            if output is not None:
                output.write(json.dumps({"prompt": prompt, "fillings": named}, ensure_ascii=False) + "\n")
    finally:
        if output is not None:
            output.close()


def prompts(given: str | None) -> Iterator[str]:
    """Yield the given prompt, or the lines of standard input as they arrive."""
    if given is not None and given != "-":
        yield given
        return
    if sys.stdin.isatty():
        print("one prompt per line; Ctrl-D ends", file=sys.stderr)
    yield from (line for _, line in numbered_lines(sys.stdin.buffer, "standard input") if line.strip())


def continue_prompt(
    run: LoadedRun, decoder: Decoder, prompt: str, number: int, arguments: Arguments
) -> list[dict[str, Any]]:
    """Write the samples of one prompt to standard output, and return them."""
    ids = run.tokenizer.encode(prompt)
    if not ids or run.layout == "packed":  # packed rows have these tokens before every document, windows begin anywhere
        ids = [*run.left, *ids]
    if not ids:
        raise InputError(
            "--prompt must not be empty for this model, which was trained without a token that begins a text; give a "
            "--prompt"
        )
    length = arguments.length or max(1, min(DEFAULT_LENGTH, decoder.room(ids)))
    if not arguments.length and decoder.positions < min(len(ids) + DEFAULT_LENGTH, run.model.max_length):
        print(f"note: at most {length} new tokens: {run.limit}", file=sys.stderr)
    streams = [TextStream(run.tokenizer, ids) for _ in range(arguments.samples)]
    made: list[list[int]] = [[] for _ in streams]
    alone = len(streams) == 1
    steps = decoder(ids, length=length, samples=len(streams), number=number)
    for stream in streams:
        _write(stream.push(), alone)
    for row in steps:
        for stream, tokens, i in zip(streams, made, row.tolist(), strict=True):
            if i != ENDED:
                tokens.append(i)
                _write(stream.push(i), alone)
    samples = []
    for sample, (stream, tokens) in enumerate(zip(streams, made, strict=True)):
        _write(stream.finish() + "\n", alone)
        ended = decoder.end is not None and tokens[-1] == decoder.end
        if not alone:
            print(f"--- sample {sample + 1} of {len(streams)}{', ended' if ended else ''}\n{stream.given}", flush=True)
        samples.append({"prompt": prompt, "sample": sample, "text": stream.given, "tokens": tokens, "ended": ended})
    return samples


def _write(text: str, alone: bool) -> None:
    if alone and text:
        print(text, end="", flush=True)


def _open(path: Path | None) -> TextIO | None:
    try:
        return None if path is None else path.open("w", encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; give an --output that is writable") from None


def main() -> None:
    """Run the command."""
    arguments, _ = command_line(Arguments, program="generate", description=__doc__)
    prepare_process()
    try:
        generate(arguments)
    except KeyboardInterrupt:  # the usual way to end a long text, or a series of prompts, at a terminal
        print()
        sys.exit(EXIT_FAILED)


if __name__ == "__main__":
    run_command(main)
