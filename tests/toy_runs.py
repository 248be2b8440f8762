"""Toy stores and tasks, and the real commands run on them: within the test's process, or as processes of their own."""

import contextlib
import io
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toy_store import write_store

from jaxlm import convert, doctor, evaluate, finetune, generate, predict, pretrain, show
from jaxlm.errors import LOGGERS, run_command
from jaxlm.runs.checkpoints import Checkpoints
from jaxlm.runs.metrics_log import read_metrics
from jaxlm.text import Tokenizer, train_sentencepiece, train_wordpiece

REPOSITORY = Path(__file__).resolve().parent.parent
SECONDS = 300  # after which a process that should have ended is killed; machines may be busy
COMMANDS: dict[str, Callable[[], None]] = {
    "pretrain": pretrain.main,
    "finetune": finetune.main,
    "convert": convert.main,
    "predict": predict.main,
    "evaluate": evaluate.main,
    "generate": generate.main,
    "show": show.main,
    "doctor": doctor.main,
}


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    output: str
    errors: str


def run_here(command: str, *arguments: Any) -> Ended:
    """Run a command within this process, on its eight devices."""
    output, errors = io.StringIO(), io.StringIO()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    loggers = {name: (logging.getLogger(name).handlers, logging.getLogger(name).propagate) for name in LOGGERS}
    before, sys.argv = sys.argv, [command, *map(str, arguments)]
    code = 0
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            try:
                run_command(COMMANDS[command])
            except SystemExit as end:
                code = 0 if end.code is None else int(end.code)
    finally:
        sys.argv = before
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for name, (former, propagate) in loggers.items():
            logging.getLogger(name).handlers, logging.getLogger(name).propagate = former, propagate
        logging.captureWarnings(False)
    return Ended(code, output.getvalue(), errors.getvalue())


class Process:
    """A command as a process of its own, with `devices` CPU devices; its output goes to files beside `log`."""

    def __init__(self, command: str, *arguments: Any, log: Path, devices: int = 1, cache: Path | None = None) -> None:
        self.output, self.errors = log.with_suffix(".out"), log.with_suffix(".err")
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0",
            "PYTHONPATH": str(REPOSITORY),
        }
        environment |= {} if cache is None else {"XDG_CACHE_HOME": str(cache)}  # that of another machine
        with self.output.open("w") as output, self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", f"jaxlm.{command}", *map(str, arguments)],
                stdout=output,
                stderr=errors,
                env=environment,
            )

    def ended(self) -> Ended:
        """Wait for its end."""
        try:
            code = self.process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"still running after {SECONDS} s: {self.errors.read_text()[-2000:]}") from None
        return Ended(code, self.output.read_text(), self.errors.read_text())

    def kill(self, number: int = signal.SIGKILL) -> Ended:
        """Send a signal and wait for its end."""
        self.process.send_signal(number)
        return self.ended()

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Wait until the condition holds; an AssertionError when the process ends before it does."""
        deadline = time.monotonic() + SECONDS
        while not (found := condition()):
            code = self.process.poll()
            assert code is None, f"ended with {code} before {what}: {self.errors.read_text()[-2000:]}"
            if time.monotonic() > deadline:
                self.process.kill()
                raise AssertionError(f"{what}: not within {SECONDS} s: {self.errors.read_text()[-2000:]}")
            time.sleep(0.001)
        return found


def run_process(command: str, *arguments: Any, log: Path, devices: int = 1) -> Ended:
    """Run a command as a process of its own, to its end."""
    return Process(command, *arguments, log=log, devices=devices).ended()


def assert_one_line(ended: Ended, code: int, *fragments: str) -> str:
    """The command ended with this code and one line on standard error that has all fragments; the line."""
    assert ended.code == code, (ended.code, ended.output, ended.errors)
    lines = ended.errors.splitlines()
    assert len(lines) == 1, ended.errors
    for fragment in fragments:
        assert fragment in lines[0], lines[0]
    return lines[0]


def metrics(run: Path, name: str = "loss", **scope: Any) -> dict[int, Any]:
    """A metric by step, as it stands in metrics.jsonl; a step that comes twice fails."""
    found: dict[int, Any] = {}
    for line in read_metrics(run / "metrics.jsonl"):
        if name in line and scope.items() <= line.items():
            assert line["step"] not in found, f"step {line['step']} comes twice"
            found[line["step"]] = line[name]
    return found


def newest_step(run: Path) -> int:
    """The last step in metrics.jsonl of a run that may be writing; 0 where there is none."""
    file = run / "metrics.jsonl"
    return max((line["step"] for line in read_metrics(file)), default=0) if file.exists() else 0


def checkpoints(run: Path) -> list[int]:
    """The steps of a run's complete checkpoints."""
    return Checkpoints(run / "checkpoints", read_only=True).steps()


def checksums(run: Path, step: int | None = None) -> dict[str, int]:
    """The checksum of every leaf of a run's checkpoint, the newest unless told."""
    return Checkpoints(run / "checkpoints", read_only=True).metadata(step).checksums


def starts(run: Path) -> list[dict[str, Any]]:
    """The lines of starts.jsonl."""
    return [json.loads(line) for line in (run / "starts.jsonl").read_text().splitlines()]


def copy_at(run: Path, step: int, to: Path) -> Path:
    """A copy of a run as if it had been killed when the checkpoint of `step` was its newest."""
    shutil.copytree(run, to)
    for newer in checkpoints(to):
        if newer > step:
            shutil.rmtree(to / "checkpoints" / str(newer))
    return to


def flip_bytes(step_directory: Path) -> None:
    """One bit in the middle of each file that holds arrays (of some of them Orbax reads nothing)."""
    for file in (step_directory / "state").rglob("d/*"):
        if file.is_file():
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 16
            file.write_bytes(content)


def sentences(count: int, seed: int = 0) -> list[str]:
    """Texts of invented words, each of which is followed by one of four: something to learn."""
    rng = random.Random(20)
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 3))) for _ in range(200)]
    follow = {word: rng.choices(words, k=4) for word in words}
    rng = random.Random(seed)

    def text() -> Iterator[str]:
        word = rng.choice(words)
        for _ in range(rng.randint(20, 200)):
            yield word
            word = rng.choice(follow[word])

    return [" ".join(text()) for _ in range(count)]


def make_stores(directory: Path, tokenizer: Tokenizer | None = None) -> tuple[Path, Path]:
    """A store to train on (about 50,000 tokens of a vocabulary of 320) and one to be held against (3,000)."""
    texts = sentences(140)
    tokenizer = tokenizer or train_sentencepiece(texts, 320)
    for name, part in (("store", texts[:130]), ("valid", texts[130:])):
        write_store(directory / name, {"toy": part}, tokenizer)
    return directory / "store", directory / "valid"


def pretrain_arguments(run: Path, stores: Sequence[Path], *more: Any) -> list[Any]:
    """A toy run: 2 x 32, dropout on, batch 8 x 32, a metrics line a step. What comes last counts."""
    store, valid = stores
    toy = "--length 32 --log-every 1 --optimizer.warmup 10 --optimizer.peak-lr 3e-3".split()
    return ["debug/gpt", "--run", run, "--data.store", store, "--data.validation", valid, *toy, *more]


def lined(texts: Sequence[str], seed: int = 1) -> list[str]:
    """The texts with line breaks in them: sentences of 3 to 12 words."""
    rng = random.Random(seed)

    def lines(words: list[str]) -> Iterator[str]:
        at = 0
        while at < len(words):
            count = rng.randint(3, 12)
            yield " ".join(words[at : at + count])
            at += count

    return ["\n".join(lines(text.split())) for text in texts]


def make_pair_stores(directory: Path) -> tuple[Path, Path]:
    """A store of sentences to train on (about 16,000 tokens, 320 WordPieces) and one to be held against (1,000)."""
    texts = lined(sentences(140))
    tokenizer = train_wordpiece(texts, 320)
    for name, part in (("store", texts[:130]), ("valid", texts[130:])):
        write_store(directory / name, {"toy": part}, tokenizer, sentences="lines")
    return directory / "store", directory / "valid"


def bert_arguments(run: Path, stores: Sequence[Path], *more: Any) -> list[Any]:
    """A toy BERT's run: 2 x 32, dropout on, batch 8 x 64, a metrics line a step. What comes last counts."""
    store, valid = stores
    return ["debug/bert", "--run", run, "--data.store", store, "--data.validation", valid, *more]


def make_task(directory: Path, kind: str = "classification", *, train: int = 40, dev: int = 13, test: int = 7) -> Path:
    """Files train, dev and test of a toy task: TSV with text, label; JSONL with a score, or with two choices."""
    directory.mkdir(parents=True, exist_ok=True)
    words = [word for text in sentences(20, seed=5) for word in text.split() if len(word) == 6]
    rng = random.Random(7)
    for name, count in (("train", train), ("dev", dev), ("test", test)):
        rows = []
        for number in range(count):
            chosen, right = rng.sample(words, 4), rng.randrange(2)
            chosen[rng.randrange(4)] = ("bobo", "zizi")[right]
            text = " ".join(chosen)
            if kind == "classification":
                rows.append(f"{text}\t{('bad', 'good')[right]}")
            elif kind == "regression":
                rows.append(json.dumps({"text": text, "score": round(3.0 * right + number % 3 / 10, 3)}))
            else:
                answers = ["bobo", "zizi"] if number % 2 else ["zizi", "bobo"]
                rows.append(
                    json.dumps(
                        {"text": text, "a": answers[0], "b": answers[1], "right": "ab"[right ^ (number % 2 == 0)]}
                    )
                )
        if kind == "classification":
            (directory / f"{name}.tsv").write_text("\n".join(["text\tlabel", *rows]) + "\n")
        else:
            (directory / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    return directory


def finetune_arguments(run: Path, task: Path, *more: Any) -> list[Any]:
    """Two epochs of five steps on a toy task; which one the files in its directory say."""
    lines = task / "train.jsonl"
    if not lines.exists():
        columns, suffix = ["--custom.text", "text", "--custom.label", "label"], "tsv"
    elif "score" in lines.read_text():
        columns, suffix = "--custom.text text --custom.label score --custom.kind regression".split(), "jsonl"
    else:
        columns = "--custom.text text --custom.label right --custom.choices a b --custom.kind choice".split()
        suffix = "jsonl"
    files = [word for part in ("train", "dev", "test") for word in (f"--custom.{part}", task / f"{part}.{suffix}")]
    toy = (
        "--length 16 --batch-size 8 --num-epochs 2 --log-every 1 --checkpoint-every 3 --optimizer.peak-lr 3e-3".split()
    )
    return ["finetune/gpt1", "--run", run, "--task", "custom", *files, *columns, *toy, *more]
