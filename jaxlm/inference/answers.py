"""Answers of a model to prompts: samples of a decoder, fillings of an encoder's blanks; printed, or into a file."""

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from jaxlm.errors import InputError
from jaxlm.inference.arguments import GenerateArguments
from jaxlm.inference.generation import Generator, Sample
from jaxlm.inference.loaded_run import LoadedRun, load_model
from jaxlm.inference.masked_lm_scoring import candidates_text, check_masked_lm
from jaxlm.inference.resumable_output import ResumableOutput, settings_file
from jaxlm.inference.text_scorer import fill_masks, masked_texts
from jaxlm.progress import Progress
from jaxlm.reading.lines import Lines
from jaxlm.reading.rows import json_objects
from jaxlm.wording import lacks_field


class Continuations:
    """The answers of a decoder: samples."""

    def __init__(self, run: LoadedRun, arguments: GenerateArguments) -> None:
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

    def __init__(self, run: LoadedRun, arguments: GenerateArguments) -> None:
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


def answer(arguments: GenerateArguments) -> None:
    """Load the run and answer every prompt."""
    check(arguments)
    given = None if arguments.prompts is None else read_prompts(arguments.prompts)
    run = load_model(arguments.run, weights=arguments.weights)
    answers = (Fillings if run.model.family.is_encoder else Continuations)(run, arguments)
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


def check(arguments: GenerateArguments) -> None:
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
    if path.suffix == ".txt":
        found = [line for _, line in Lines(path) if line.strip()]
    else:
        found = [_prompt_of(row, where) for where, row in json_objects(path)]
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
    yield from (line for _, line in Lines("-") if line.strip())


def _prompt_of(row: dict[str, Any], where: str) -> str:
    if "prompt" not in row:
        raise InputError(lacks_field(where, "prompt", row, "add it"))
    if not isinstance(row["prompt"], str):
        raise InputError(f"{where}: prompt must be a text, got {row['prompt']!r:.80}; fix the row")
    return row["prompt"]


def _shown(samples: Sequence[Sample]) -> str:
    """Return the text to print for the samples of a prompt: a heading precedes each of several."""
    if len(samples) == 1:
        return samples[0].text
    headings = (f"--- sample {one.sample + 1} of {len(samples)}{', ended' if one.ended else ''}" for one in samples)
    return "\n".join(f"{heading}\n{one.text}" for heading, one in zip(headings, samples, strict=True))


def _name(run: LoadedRun) -> str:
    return run.name.replace(str(run.path), str(run.path.resolve()), 1) if isinstance(run.path, Path) else run.name


def _write(text: str) -> None:
    print(text, end="", flush=True)


def _open(path: Path) -> TextIO:
    try:
        settings_file(path).unlink(missing_ok=True)  # they are not of the file that replaces it
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; give an --output that is writable") from None
