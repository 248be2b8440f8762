"""The commands of the fault campaign: a resumed pretraining and fine-tuning, and what reads runs, as processes.

Each works in one place, which is filled from a specimen before it: a run remembers where its store was. Beside damaged
files there are a full disk (a limit to the size of files) and a clock that jumps.
"""

import fcntl
import functools
import json
import os
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import toy_encoder
from faults import Fault, copied, damage
from fork_server import Request, Server
from toy_runs import checkpoints, checksums, finetune_arguments, make_task, metrics, sentences
from toy_store import write_store

from jaxlm.atomic_write import write_json
from jaxlm.text import train_sentencepiece

SECONDS = 60  # that a command may take longer than the undamaged one
SAID = ("damaged", "dropped", "skipped", "changed since", "warning", "moved to", "resumed at", "continues")
RECORDS = ("metrics.jsonl", "starts.jsonl")
HERE = Path()  # commands run in their place


@dataclass(frozen=True)
class Scenario:
    """A command and its undamaged outcome. make(place): the files. words(place): the command line.

    result(place): what counts of what it leaves and prints, by name. targets: patterns of the files that are damaged;
    none for what happens to the system. repairs: after a refusal the files are put back and the command runs again.
    """

    name: str
    make: Callable[["Commands", Path], None]
    words: Callable[[Path], list[Any]]
    result: Callable[[Path, str], Any]
    targets: tuple[str, ...] = ()
    weight: int = 2
    repairs: bool = False


def pretrain_words(place: Path, run: str = "run") -> list[Any]:
    """Eight steps, a checkpoint every fourth."""
    flags = "--num-steps 8 --checkpoint-every 4 --eval-every 4 --log-every 1 --length 32 --batch-size 8".split()
    stores = ["--data.store", place / "store", "--data.validation", place / "valid"]
    return ["pretrain", "debug/gpt", "--run", place / run, *stores, *flags]


def finetune_words(place: Path, run: str = "tuned") -> list[Any]:
    """Two epochs of five steps from the pretrained run."""
    return ["finetune", *finetune_arguments(place / run, place / "task", "--start", place / "run")]


def make_stores(place: Path) -> None:
    """A store to train on and one to be held against."""
    texts = sentences(60)
    tokenizer = train_sentencepiece(texts, 320)
    for name, part in (("store", texts[:55]), ("valid", texts[55:])):
        write_store(place / name, {"toy": part}, tokenizer)


def make_whole(commands: "Commands", place: Path) -> None:
    """A pretraining run that is complete."""
    make_stores(place)
    commands.sound(pretrain_words(HERE))


def make_half(commands: "Commands", place: Path) -> None:
    """A pretraining run as a kill after the checkpoint of step 4 leaves it, the metrics beyond it among them."""
    make_whole(commands, place)
    for step in checkpoints(place / "run")[1:]:
        shutil.rmtree(place / "run" / "checkpoints" / str(step))


def make_tuning(commands: "Commands", place: Path) -> None:
    """A fine-tuning run that was stopped after some steps."""
    make_whole(commands, place)
    make_task(place / "task")
    stop = {"stop_at": str(place / "tuned" / "metrics.jsonl"), "stop_after": 4}
    assert commands.run(finetune_words(HERE), **stop) == 75, commands.log.with_suffix(".err").read_text()


def make_tuned(commands: "Commands", place: Path) -> None:
    """A fine-tuned run that is complete, and rows to label."""
    make_whole(commands, place)
    make_task(place / "task")
    commands.sound(finetune_words(HERE))
    shutil.copy(place / "task" / "test.tsv", place / "new.tsv")


def make_published(commands: "Commands", place: Path) -> None:
    """An exported classifier."""
    vocabulary = toy_encoder.write_vocabulary(place / "vocabulary")
    files = toy_encoder.make_files(place / "files", "classification")
    toy_encoder.finetuned(place / "source", vocabulary, files, "classification")
    commands.sound(["convert", "export", "source", "--to", "hf:out"])


def make_texts(commands: "Commands", place: Path) -> None:
    """Texts to prepare."""
    (place / "texts").mkdir(parents=True)
    for number, text in enumerate(sentences(12)):
        (place / "texts" / f"{number:02}.txt").write_text(text)


def trained(place: Path, output: str) -> Any:
    """What a pretraining came to."""
    return {
        "params": checksums(place / "run"),
        "metrics.jsonl": [metrics(place / "run", n) for n in ("loss", "validation_loss")],
    }


def tuned(place: Path, output: str) -> Any:
    """What a fine-tuning came to."""
    run, results = place / "tuned", json.loads((place / "tuned" / "results.json").read_text())
    return {"params": checksums(run), "results": results, "predictions": (run / "predictions.jsonl").read_text()}


def printed(place: Path, output: str) -> Any:
    """What a command printed."""
    return {"output": output}


def imported(place: Path, output: str) -> Any:
    """What an import came to, with what a later start remembers of it."""
    task, config = (json.loads((place / "back" / name).read_text()) for name in ("task.json", "config.json"))
    return {"params": checksums(place / "back"), "task": task, "pin": config}


def prepared(place: Path, output: str) -> Any:
    """What a preparation came to."""
    return {"pin": json.loads((place / "made" / "description.json").read_text())}


SCENARIOS = (
    Scenario("resume pretraining", make_half, pretrain_words, trained, ("run/", "run/", "store/", "valid/"), 5, True),
    Scenario("pretrain", lambda commands, place: make_stores(place), pretrain_words, trained, (), 2, True),
    Scenario("resume fine-tuning", make_tuning, finetune_words, tuned, ("tuned/", "tuned/", "run/", "task/"), 3, True),
    Scenario(
        "predict",
        make_tuned,
        lambda place: ["predict", "--run", place / "tuned", "--input", place / "new.tsv"],
        printed,
        ("tuned/",),
        3,
    ),
    Scenario(
        "evaluate perplexity",
        make_whole,
        lambda place: ["evaluate", "perplexity", "--run", place / "run", "--data.store", place / "valid"],
        printed,
        ("run/", "run/", "valid/"),
        3,
    ),
    Scenario("show", make_tuned, lambda place: ["show", place / "tuned"], printed, ("tuned/",), 2),
    Scenario(
        "import",
        make_published,
        lambda place: ["convert", "import", f"hf:{place / 'out'}", "--run", place / "back"],
        imported,
        ("out/",),
        2,
    ),
    Scenario(
        "prepare",
        make_texts,
        lambda place: (
            ["prepare", "--source", f"text:{place / 'texts'}/*.txt", "--tokenizer", "train-sentencepiece:300"]
            + ["--output", place / "made", "--workers", "1"]
        ),
        prepared,
        (),
        1,
        True,
    ),
)


class Commands:
    """The specimens of all scenarios, made once, and the place where they are run."""

    def __init__(self, directory: Path):
        self.specimens = directory.absolute()
        own = self.specimens / f"process-{os.getpid()}"
        self.place, self.log = own / "place", own / "log"
        cache = self.specimens / "cache"
        for path in (own, cache):
            path.mkdir(parents=True, exist_ok=True)
        cache.chmod(0o777)
        self.server = Server(cache)

    def run(self, words: list[Any], seconds: float = 600, **changes: Any) -> int | None:
        """Run a command in its place; its exit code, or None where it did not end. changes: of the request."""
        return self.server.run(
            Request([str(word) for word in words], str(self.place), str(self.log), seconds, **changes)
        )

    def sound(self, words: list[Any]) -> None:
        """Run a command that must not fail."""
        assert self.run(words) == 0, self.log.with_suffix(".err").read_text()

    @functools.cache  # noqa: B019
    def of(self, scenario: Scenario) -> tuple[Path, Any, float]:
        """The specimen of a scenario, the result of its undamaged command, and the seconds it takes."""
        specimen = self.specimens / scenario.name.replace(" ", "-")
        with specimen.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # several processes may share the work of a campaign
            answer = specimen.with_suffix(".json")
            if not answer.exists():
                for path in (self.place, specimen):
                    shutil.rmtree(path, ignore_errors=True)
                self.place.mkdir()
                scenario.make(self, self.place)
                copied(self.place, specimen)
                self.fill(specimen)
                began = time.monotonic()
                self.sound(scenario.words(HERE))
                seconds = time.monotonic() - began
                found = scenario.result(self.place, self.log.with_suffix(".out").read_text())
                write_json(answer, [found, seconds])
        found, seconds = json.loads(answer.read_text())
        return specimen, found, seconds

    def result(self, scenario: Scenario, output: str) -> Any:
        """What a command came to, as JSON has it."""
        return json.loads(json.dumps(scenario.result(self.place, output)))

    def fill(self, specimen: Path) -> None:
        """Put the files of a specimen in place."""
        copied(specimen, self.place)

    def judged(self, seed: int) -> dict[str, Any]:
        """One fault of a seed, and how the command ends."""
        rng = random.Random(seed)
        scenario = rng.choices(SCENARIOS, [each.weight for each in SCENARIOS])[0]
        specimen, expected, seconds = self.of(scenario)
        self.fill(specimen)
        changes: dict[str, Any] = {}
        if scenario.targets and rng.random() < 0.85:
            fault = damage(self.place, rng, only=rng.choice(scenario.targets))
        elif rng.random() < 0.6:
            changes["limit"] = int(10 ** rng.uniform(2, 5.5))
            fault = Fault("fill the disk", "", f"files of {changes['limit']} bytes")
        else:
            changes["clock"] = rng.choice(["back", "ahead", "to and fro"])
            fault = Fault("turn the clock", "", changes["clock"])
        if fault.forbidden and os.geteuid() == 0:
            changes["bound"] = True
        began = time.monotonic()
        outcome, said = self.judgement(scenario, specimen, expected, seconds, fault, changes)
        return {
            "seed": seed,
            "subject": f"command: {scenario.name}",
            "kind": fault.kind,
            "fault": str(fault),
            "outcome": outcome,
            "said": said,
            "seconds": round(time.monotonic() - began, 2),
        }

    def judgement(
        self, scenario: Scenario, specimen: Path, expected: Any, seconds: float, fault: Fault, changes: dict[str, Any]
    ) -> tuple[str, str]:
        """How a command ends: a sound outcome or what is wrong, and what it said."""
        code = self.run(scenario.words(HERE), 2 * seconds + SECONDS, **changes)
        errors, output = (self.log.with_suffix(suffix).read_text(errors="replace") for suffix in (".err", ".out"))
        if code is None:
            return "no end", errors[-500:]
        if "Traceback" in errors or code not in (0, 1, 2):
            return "traceback", f"exit {code}: {errors[-700:]}"
        if code:
            lines = errors.splitlines()
            ends = [line for line in lines if line.startswith(("error: ", "failed: "))]
            if len(ends) != 1 or ends[0] != lines[-1] or not ends[0].startswith(("error", "failed")[code == 1]):
                return "not one line", f"exit {code}: {errors[-700:]}"
            if scenario.repairs:
                return self.repaired(scenario, specimen, expected, fault, ends[0])
            return "refused", ends[0]
        return compared(self.result(scenario, output), expected, fault, errors + output)

    def repaired(self, scenario: Scenario, specimen: Path, expected: Any, fault: Fault, said: str) -> tuple[str, str]:
        """Put the damaged file back, run the same command again, and compare."""
        if fault.path:
            file = self.place / fault.path
            shutil.rmtree(file) if file.is_dir() and not file.is_symlink() else file.unlink(missing_ok=True)
            shutil.copy2(specimen / fault.path, file)
        code = self.run(scenario.words(HERE))
        if code != 0:
            errors = self.log.with_suffix(".err").read_text()
            return "not usable after the repair", f"{said}; then exit {code}: {errors[-600:]}"
        output = self.log.with_suffix(".out").read_text()
        outcome, _ = compared(self.result(scenario, output), expected, fault, said)
        sound = outcome in ("recovered", "unaffected", "a record differs")
        return ("refused" if sound else f"after the repair: {outcome}"), said


def compared(found: Any, expected: Any, fault: Fault, said: str) -> tuple[str, str]:
    """Judge the result of a command that ended well."""
    notes = "; ".join(line for line in said.splitlines() if any(word in line for word in SAID))[:500]
    if found == expected:
        return ("recovered" if any(word in said for word in SAID[:6]) else "unaffected"), notes
    differs = [name for name in expected if found[name] != expected[name]]
    if Path(fault.path).name in RECORDS and set(differs) <= {"metrics.jsonl", "output"}:
        return "a record differs", notes
    if "pin" in differs:
        return "refused by fingerprint", notes
    return "silent difference", f"{', '.join(differs)}: {said[-400:]}"
