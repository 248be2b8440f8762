"""Answers of a model to prompts: samples of a decoder, fillings of an encoder's blanks; printed, or into a file.

A killed command continues a file: the answers that are in it are kept. `OUTPUT.settings.json` next to the file holds
the settings that made it. The file of the same prompts and settings is continued after its last whole answer; any other
file is refused.
"""

import contextlib
import functools
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from jaxlm.errors import InputError
from jaxlm.files import check_output, open_regular, parse_json, read_object, write_json
from jaxlm.inference.arguments import GenerateArguments
from jaxlm.inference.generation import Generator, Sample
from jaxlm.inference.loaded_run import LoadedRun, load_model
from jaxlm.inference.text_scoring import candidates_text, check_masked_lm, fill_masks, masked_texts
from jaxlm.progress import Progress
from jaxlm.reading.lines import Lines
from jaxlm.reading.midi import is_midi
from jaxlm.reading.rows import json_objects
from jaxlm.text.writing import music_for, write_text
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
        write = functools.partial(print, end="", flush=True) if streamed else None
        for samples in self._generator(prompts, number=number, done=done, on_text=write):
            yield "" if streamed else _shown(samples), [sample.to_json() for sample in samples]


class Fillings:
    """The answers of an encoder: candidates for each blank."""

    per_prompt = 1

    def __init__(self, run: LoadedRun, arguments: GenerateArguments) -> None:
        self.identity = {"run": _name(run), "top": arguments.top, "beyond-length": arguments.settings.beyond_length}
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
    path, given_text = arguments.output, prompt_text(arguments, run)
    if path is not None and given_text is not None and is_midi(path):
        music_for(run.tokenizer, path, "--output")
        ((text, (line,)),) = answers([given_text])
        print(text, flush=True)
        write_text(path, run.tokenizer, line["text"])
        return
    with contextlib.nullcontext() if path is None else _open(path) as output:
        for number, prompt in enumerate(typed_prompts(given_text)):
            for text, lines in answers([prompt], number=number):
                print(text, flush=True)
                if output is not None:
                    output.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
                    output.flush()


def check(arguments: GenerateArguments) -> None:
    """Raise InputError for a value out of range, or two that exclude each other."""
    if arguments.prompt is not None and arguments.prompts is not None:
        raise InputError("--prompts must be given without --prompt, got both; leave out one")
    if arguments.stream and (arguments.prompts is not None or arguments.settings.num_samples > 1):
        raise InputError("--stream must be given without --prompts and with one sample, got more; leave it out")
    if arguments.stream and arguments.settings.beams > 1:
        raise InputError(
            f"--stream must be given without --beams, got --beams {arguments.settings.beams}; leave out one"
        )
    if arguments.settings.log_probabilities and arguments.output is None:
        raise InputError("--log-probabilities must be given with --output, got none; add --output FILE.jsonl")
    _check_music(arguments)
    arguments.settings.check()


def prompt_text(arguments: GenerateArguments, run: LoadedRun) -> str | None:
    """Return the text of --prompt, which is that of the beginning of a piece for a MIDI file; None if there is none."""
    path, seconds = arguments.prompt, arguments.prompt_seconds
    if not path or not is_midi(path) or (run.tokenizer.music is None and not os.path.isfile(path)):
        return path
    music = music_for(run.tokenizer, path, "--prompt")
    words = music.encode(music.read(path))
    if seconds is None:
        return " ".join(words)
    if not (begun := music.before(words, seconds)):
        raise InputError(f"--prompt-seconds must be after the first note of {path}, got {seconds:g}; give more")
    return " ".join(begun)


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
        raise InputError(f"--prompts must have at least one prompt, got none in {path}; add one")
    return found


def typed_prompts(given: str | None) -> Iterator[str]:
    """Yield the given prompt, or the lines of standard input as they arrive."""
    if given is not None and given != "-":
        yield given
        return
    if sys.stdin.isatty():
        print("one prompt per line; Ctrl-D ends", file=sys.stderr)
    yield from (line for _, line in Lines("-") if line.strip())


def settings_file(path: Path) -> Path:
    """Return the file of the settings of an output file."""
    return path.with_name(f"{path.name}.settings.json")


class ResumableOutput:
    """An output file with `per_prompt` lines for each of `prompts`, in order; each line has the field `prompt`.

    settings: what the lines depend on, by the names of flags without their dashes. done: the number of prompts whose
    lines were in the file when it was opened.
    InputError, before anything changes, if the file has other settings or prompts, or cannot be written.
    """

    def __init__(self, path: Path, prompts: Sequence[str], settings: Mapping[str, Any], *, per_prompt: int = 1) -> None:
        check_output(path)
        self.done, end = 0, 0
        if path.exists() and path.stat().st_size:
            _check_settings(path, settings)
            self.done, end = _answered(path, prompts, per_prompt)
        else:
            write_json(settings_file(path), dict(settings))
        self._file = path.open("ab")
        self._file.truncate(end)

    def write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Add the lines of the next prompt."""
        self._file.write(b"".join(json.dumps(line, ensure_ascii=False).encode() + b"\n" for line in lines))
        self._file.flush()

    def __enter__(self) -> "ResumableOutput":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _check_music(arguments: GenerateArguments) -> None:
    """Raise InputError for seconds without a MIDI prompt, and for a MIDI file of several samples."""
    prompt, output = arguments.prompt, arguments.output
    if arguments.prompt_seconds is not None and not is_midi(prompt or ""):
        raise InputError(
            f"--prompt-seconds must be given with --prompt FILE.mid, got {arguments.prompt_seconds:g}; leave it out"
        )
    if output is None or not is_midi(output):
        return
    if prompt in (None, "-"):
        raise InputError(f"--prompt must be given with --output {output}, got none; '' begins a new piece")
    if arguments.settings.num_samples > 1 or arguments.settings.log_probabilities:
        raise InputError(
            f"--output must be a .jsonl file with --num-samples and --log-probabilities, got {output}; rename it"
        )
    check_output(output)


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


def _open(path: Path) -> TextIO:
    try:
        settings_file(path).unlink(missing_ok=True)  # they are not of the file that replaces it
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; give an --output that is writable") from None


def _check_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """Raise InputError, with one difference, unless the file was made with these settings."""
    beside = settings_file(path)
    try:
        former = read_object(beside)
    except (OSError, ValueError):
        raise InputError(
            f"--output must be a new file or an earlier output of --prompts, got {path} without a readable "
            f"{beside.name}; name another file"
        ) from None
    for name in (*settings, *former):
        if settings.get(name) != former.get(name):
            raise InputError(
                f"--output must be a file of the same settings, got {path}, made with --{name} "
                f"{json.dumps(former.get(name))} instead of {json.dumps(settings.get(name))}; name another file"
            )


def _answered(path: Path, prompts: Sequence[str], per_prompt: int) -> tuple[int, int]:
    """Return the number of prompts with all their lines in the file, and the bytes of these lines.

    A killed process may leave the last prompt with fewer lines, and a last line without its end.
    """
    done = end = size = 0
    with open_regular(path) as file:
        for number, line in enumerate(file):
            if not line.endswith(b"\n"):
                break
            if done == len(prompts):
                raise InputError(
                    f"--prompts must begin with the prompts of {path}, got {done} and the file has more; name another "
                    "--output"
                )
            if _prompt_in(line) != prompts[done]:
                raise InputError(
                    f"{path} line {number + 1} must be of prompt {done + 1} of --prompts, got another; name another "
                    "--output"
                )
            size += len(line)
            if (number + 1) % per_prompt == 0:
                done, end = done + 1, size
    return done, end


def _prompt_in(line: bytes) -> Any:
    try:
        return dict(parse_json(line)).get("prompt")
    except (ValueError, TypeError):
        return None
