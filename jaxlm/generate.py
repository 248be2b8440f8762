"""Continue a prompt with a trained language model: `python -m jaxlm.generate --run RUN --prompt 'It was'`.

An encoder fills the blanks of its prompt instead: `--prompt 'It was a [MASK] day.'` gives the best tokens for each.
On a terminal a single sample is printed while it is generated. The output begins with the decoded prompt. Without
--prompt each line of standard input is a prompt (blank lines are skipped). --prompt "" starts a new text.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, TextIO

import tyro

from jaxlm.config import command_line
from jaxlm.distributed.devices import prepare_process
from jaxlm.errors import EXIT_FAILED, InputError, run_command
from jaxlm.inference.generation import GenerationSettings, Generator, Sample
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


@dataclass(frozen=True)
class Arguments:
    """Continue prompts with a trained language model."""

    run: str
    """A run: RUN or RUN@STEP."""
    prompt: str | None = None
    """Text to continue; '' starts a new text. Default, or '-': each line of standard input."""
    settings: Annotated[GenerationSettings, tyro.conf.arg(name="")] = field(default_factory=GenerationSettings)
    stream: bool = False
    """Print a single sample while it is generated, also where standard output is not a terminal."""
    top: int = 5
    """Number of candidates per blank, for an encoder."""
    output: Path | None = None
    """JSONL file for the samples: prompt, sample, text, generated, tokens, ended."""


def generate(arguments: Arguments) -> None:
    """Load the run and continue every prompt."""
    if arguments.top < 1:
        raise InputError(f"--top must be positive, got {arguments.top}")
    arguments.settings.check()
    run = load_run(arguments.run)
    if run.model.family.context == "bidirectional":
        fill(run, arguments)
        return
    generator = Generator(run, arguments.settings)
    on_text = _write if arguments.stream or sys.stdout.isatty() else None
    output = _open(arguments.output)
    try:
        for number, prompt in enumerate(prompts(arguments.prompt)):
            (samples,) = generator([prompt], number=number, on_text=on_text)
            show(samples, streamed=on_text is not None and arguments.settings.num_samples == 1)
            if output is not None:
                for sample in samples:
                    output.write(json.dumps(sample.to_json(), ensure_ascii=False) + "\n")
                output.flush()
    finally:
        if output is not None:
            output.close()


def show(samples: list[Sample], *, streamed: bool) -> None:
    """Print the samples of one prompt, with a heading for each of several."""
    for sample in samples:
        if len(samples) > 1:
            ended = ", ended" if sample.ended else ""
            print(f"--- sample {sample.sample + 1} of {len(samples)}{ended}")
        print("" if streamed else sample.text, flush=True)


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
                positions=run.positions(beyond=arguments.settings.beyond_length),
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


def _write(text: str) -> None:
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
