"""Continue prompts with a trained language model: `python -m jaxlm.generate --run RUN --prompt 'It was'`.

An encoder fills the blanks of its prompts instead: `--prompt 'It was a [MASK] day.'` gives the best tokens for each.
The text printed begins with the decoded prompt. On a terminal a single sample appears while it is generated. Without
--prompt and --prompts each line of standard input is a prompt (blank lines are skipped). --prompt "" starts a new text.

With --prompts FILE --output FILE a killed command continues: prompts that are answered in the output are left out, and
the result is the same. --output has a line for each sample: {"prompt": "It was", "sample": 0, "text": "It was cold.",
"generated": " cold.", "tokens": [310, 12], "ended": true}; with "stop", the stop string that ended the text, and
"score", of a beam search, where there is one; and with --log-probabilities "log_probabilities", one per token.
"""

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TextIO

import tyro

from jaxlm.config import command_line
from jaxlm.distributed.devices import prepare_process
from jaxlm.errors import EXIT_FAILED, InputError, run_command
from jaxlm.inference.generation import GenerationSettings, Generator, Sample
from jaxlm.inference.loaded_run import LoadedRun, load_run
from jaxlm.inference.masked_lm_scoring import candidates_text, check_masked_lm
from jaxlm.inference.resumable_output import ResumableOutput, settings_file
from jaxlm.inference.text_scorer import fill_masks, masked_texts
from jaxlm.progress import Progress
from jaxlm.renamed import refuse_other_names
from jaxlm.tasks.reading.files import json_rows, numbered_lines, open_input

# Names of options in transformers and in other programs, and ours.
OTHER_NAMES = {
    "--max-new-tokens": "--length",
    "--max-tokens": "--length",
    "--max-length": "--length, the number of new tokens",
    "--min-new-tokens": "--min-length",
    "--num-beams": "--beams",
    "--num-return-sequences": "--num-samples",
    "--do-sample": "--temperature, which is 0 without sampling",
    "--stop-strings": "--stop",
    "--prompt-file": "--prompts",
}


@dataclass(frozen=True)
class Arguments:
    """Continue prompts with a trained language model."""

    run: str
    """A run: RUN or RUN@STEP."""
    prompt: str | None = None
    """Text to continue; '' starts a new text. Default, or '-': each line of standard input."""
    prompts: Path | None = None
    """File of prompts. FILE.txt: one per line. FILE.jsonl: objects with the field prompt."""
    settings: Annotated[GenerationSettings, tyro.conf.arg(name="")] = field(default_factory=GenerationSettings)
    stream: bool = False
    """Print a single sample while it is generated, also where standard output is not a terminal."""
    top: int = 5
    """Number of candidates per blank, for an encoder."""
    output: Path | None = None
    """JSONL file for the samples. With --prompts nothing is printed, and the same command continues the file."""


class Continuations:
    """The answers of a decoder: samples."""

    def __init__(self, run: LoadedRun, arguments: Arguments) -> None:
        self.per_prompt = arguments.settings.num_samples
        self.identity = {"run": _name(run)} | arguments.settings.identity()
        self._generator = Generator(run, arguments.settings)
        self._stream = arguments.prompts is None and (arguments.stream or sys.stdout.isatty())

    def __call__(self, prompts: Sequence[str], *, number: int = 0, done: int = 0) -> Iterator[tuple[str, list[dict]]]:
        """Yield the text to print and the lines of output for each prompt after the first `done`, in order."""
        streamed = self._stream and self.per_prompt == 1
        for samples in self._generator(prompts, number=number, done=done, on_text=_write if streamed else None):
            yield "" if streamed else _shown(samples), [sample.to_json() for sample in samples]


class Fillings:
    """The answers of an encoder: candidates for each blank."""

    per_prompt = 1

    def __init__(self, run: LoadedRun, arguments: Arguments) -> None:
        self.identity = {
            "run": _name(run),
            "top": arguments.top,
            "beyond-length": arguments.settings.beyond_length,
        }
        self._run, self._arguments = run, arguments
        check_masked_lm(run.model, run.params, run.tokenizer, run.name)

    def __call__(self, prompts: Sequence[str], *, number: int = 0, done: int = 0) -> Iterator[tuple[str, list[dict]]]:
        """Yield the text to print and the line of output for each prompt after the first `done`, in order."""
        run, positions = self._run, self._run.positions(beyond=self._arguments.settings.beyond_length)
        for prompt, text in list(zip(prompts, masked_texts(run, prompts), strict=True))[done:]:
            named = fill_masks(run, text, top=self._arguments.top, positions=positions)
            yield candidates_text(prompt, named), [{"prompt": prompt, "fillings": named}]


def generate(arguments: Arguments) -> None:
    """Load the run and answer every prompt."""
    check(arguments)
    given = None if arguments.prompts is None else read_prompts(arguments.prompts)
    run = load_run(arguments.run)
    answers = (Fillings if run.model.family.context == "bidirectional" else Continuations)(run, arguments)
    if given is not None:
        answer_file(answers, given, arguments.output)
        return
    with contextlib.nullcontext() if arguments.output is None else _open(arguments.output) as output:
        for number, prompt in enumerate(typed_prompts(arguments.prompt)):
            for text, lines in answers([prompt], number=number):
                print(text, flush=True)
                if output is not None:
                    output.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
                    output.flush()


def check(arguments: Arguments) -> None:
    """Raise InputError for a value out of range, or two that exclude each other."""
    if arguments.top < 1:
        raise InputError(f"--top must be positive, got {arguments.top}; give at least 1")
    if arguments.prompt is not None and arguments.prompts is not None:
        raise InputError(f"--prompts must be given without --prompt, got {arguments.prompts} and both; leave out one")
    if arguments.stream and (arguments.prompts is not None or arguments.settings.num_samples > 1):
        raise InputError("--stream must be given without --prompts and with one sample, got more; leave it out")
    if arguments.stream and arguments.settings.beams > 1:
        raise InputError(
            f"--stream must be given without --beams, got --beams {arguments.settings.beams}; leave out one"
        )
    if arguments.settings.log_probabilities and arguments.output is None:
        raise InputError("--log-probabilities must be given with --output, got none; add --output FILE.jsonl")
    arguments.settings.check()


def answer_file(answers: Continuations | Fillings, given: Sequence[str], path: Path | None) -> None:
    """Answer all prompts of a file, and print the answers, or write those that the output does not have yet."""
    if path is None:
        for text, _ in answers(given):
            print(text, flush=True)
        return
    with (
        ResumableOutput(path, given, answers.identity, per_prompt=answers.per_prompt) as output,
        Progress("prompts", len(given)) as progress,
    ):
        progress.update(output.done)
        for done, (_, lines) in enumerate(answers(given, done=output.done), output.done + 1):
            output.write(lines)
            progress.update(done)


def read_prompts(path: Path) -> list[str]:
    """Return the prompts of a file: lines that are not blank, or the fields `prompt` of JSONL. InputError for none."""
    if path.suffix not in (".txt", ".jsonl"):
        raise InputError(f"--prompts must be a .txt or .jsonl file, got {path}; rename it")
    with open_input(path) as stream:
        lines = numbered_lines(stream, str(path))
        if path.suffix == ".txt":
            found = [line for _, line in lines if line.strip()]
        else:
            found = [_prompt_of(row, number, path) for number, row in json_rows(lines, str(path)) if row is not None]
    if not found:
        raise InputError(f"--prompts must have at least one prompt, got {path} without; add one")
    return found


def typed_prompts(given: str | None) -> Iterator[str]:
    """Yield the given prompt, or the lines of standard input as they arrive."""
    if given is not None and given != "-":
        yield given
        return
    if sys.stdin.isatty():
        print("one prompt per line; Ctrl-D ends", file=sys.stderr)
    yield from (line for _, line in numbered_lines(sys.stdin.buffer, "standard input") if line.strip())


def _prompt_of(row: dict[str, Any], number: int, path: Path) -> str:
    prompt = row.get("prompt")
    if not isinstance(prompt, str):
        fields = ", ".join(row) or "none"
        raise InputError(f"{path} line {number} must have a text as its field prompt, got the fields {fields}; add it")
    return prompt


def _shown(samples: Sequence[Sample]) -> str:
    """Return the text to print for the samples of a prompt: a heading precedes each of several."""
    if len(samples) == 1:
        return samples[0].text
    headings = (f"--- sample {one.sample + 1} of {len(samples)}{', ended' if one.ended else ''}" for one in samples)
    return "\n".join(f"{heading}\n{one.text}" for heading, one in zip(headings, samples, strict=True))


def _name(run: LoadedRun) -> str:
    return f"{run.path.resolve() if isinstance(run.path, Path) else run.path}@{run.step}"


def _write(text: str) -> None:
    print(text, end="", flush=True)


def _open(path: Path) -> TextIO:
    try:
        settings_file(path).unlink(missing_ok=True)  # they are not of the file that replaces it
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; give an --output that is writable") from None


def main() -> None:
    """Run the command."""
    refuse_other_names(sys.argv[1:], OTHER_NAMES)
    arguments, _ = command_line(Arguments, program="generate", description=__doc__)
    prepare_process()
    try:
        generate(arguments)
    except KeyboardInterrupt:  # the usual way to end a long text, or a series of prompts, at a terminal
        print()
        sys.exit(EXIT_FAILED)


if __name__ == "__main__":
    run_command(main)
