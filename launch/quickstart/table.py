"""The demonstration's result: a table, a plot of the curves and summary.json out of what the commands wrote.

    python launch/quickstart/table.py --directory runs/quickstart

Read are `metrics.jsonl` of the runs, `results.json` of the fine-tunings, the scores of `jaxlm.evaluate score`, the
baseline's figures and the seconds that launch/quickstart.sh noted for each step.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baseline import read_pairs

from jaxlm.errors import InputError, run_command
from jaxlm.progress import duration
from jaxlm.runs.metrics_log import read_metrics

PRETRAINED, SCRATCH, LONG = "finetuned", "scratch", "scratch-long"  # directories of the three fine-tunings
ARMS = {
    SCRATCH: "from scratch",
    LONG: "from scratch, 4 x the steps",
    PRETRAINED: "pretrained",
}
CHOICES = ("first", "second")
CAVEATS = (
    "The task is made by a program and the text is documentation: the table says that pretraining, transfer and",
    "comparison work on this machine, nothing about language at large. All of it moves with what is installed (the",
    "corpus has a fingerprint): compare the gaps, not the digits. The order of words is what a language model is",
    "trained on, so its own preference needs no labels here; other tasks do. With more labels the arms come closer.",
    "The long run from scratch is one seed. Settings were chosen on the dev pairs; the test pairs were used once.",
)


@dataclass(frozen=True)
class Arm:
    """One fine-tuning: accuracies (fractions) of its seeds."""

    dev: list[float]
    test: list[float]


@dataclass(frozen=True)
class Pretraining:
    """Figures of the pretraining run: (perplexity a token, bits a byte) at `before` and at `after`, the last step."""

    before_step: int
    before: tuple[float, float]
    after_step: int
    after: tuple[float, float]
    tokens: int
    tokens_per_second: float


@dataclass(frozen=True)
class Outcome:
    """All that the table says."""

    pretraining: Pretraining
    arms: dict[str, Arm]
    baseline: dict[str, float]
    zero_shot: float
    seconds: float

    def summary(self) -> dict[str, Any]:
        """What summary.json holds; accuracies are fractions."""
        return {
            "pretrained_accuracy": self.arms[PRETRAINED].test,
            "scratch_accuracy": self.arms[SCRATCH].test,
            "long_scratch_accuracy": self.arms[LONG].test[0],
            "baseline_accuracy": self.baseline["test_accuracy"],
            "zero_shot_accuracy": self.zero_shot,
            "validation_perplexity": self.pretraining.after[0],
            "seconds": self.seconds,
        }


# --- reading ----------------------------------------------------------------------------------------------------------


def read_json(path: Path) -> Any:
    """A JSON file. InputError names it when it is missing or torn."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error}); run launch/quickstart.sh again") from error


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl. InputError when there are none."""
    try:
        lines = list(read_metrics(path))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error}); run launch/quickstart.sh again") from error
    if not lines:
        raise InputError(f"{path}: holds no lines; run launch/quickstart.sh again")
    return lines


def read_pretraining(run: Path) -> Pretraining:
    """Perplexities and speed of a pretraining run."""
    lines = read_lines(run / "metrics.jsonl")
    validation = [line for line in lines if "validation_loss" in line]
    speeds = [line["tokens_per_second"] for line in lines if line.get("tokens_per_second")]
    if not validation or not speeds:
        raise InputError(f"{run / 'metrics.jsonl'}: no validation or no speed in it; the run needs --data.validation")
    first, last = validation[0], validation[-1]
    return Pretraining(
        first["step"],
        (first["perplexity"], first["bits_per_byte"]),
        last["step"],
        (last["perplexity"], last["bits_per_byte"]),
        last["step"] * tokens_per_step(run),
        statistics.median(speeds),
    )


def tokens_per_step(run: Path) -> int:
    """Tokens of a batch of a pretraining run."""
    config = read_json(run / "config.json")
    return int(config["batch_size"]) * int(config["length"])


def read_arm(run: Path) -> Arm:
    """Accuracies of a fine-tuning over its seeds, in the order of the seeds."""
    runs = sorted(read_json(run / "results.json")["runs"], key=lambda entry: entry["seed"])
    try:
        return Arm([entry["dev"]["accuracy"] for entry in runs], [entry["test"]["accuracy"] for entry in runs])
    except KeyError as error:
        raise InputError(f"{run / 'results.json'}: no {error} in a run; run launch/quickstart.sh again") from error


def zero_shot_accuracy(scores: Path, pairs: Sequence[dict[str, str]]) -> float:
    """The share of pairs whose original the language model finds the more probable of the two; a tie is half right.

    Args:
      scores: JSONL of `jaxlm.evaluate score`, a line a pair in their order, sums over tokens in nats:
        `{"index": 0, "log_probability": {"first": …, "second": …}, …}`.
    """
    rows = read_json_lines(scores)
    if len(rows) != len(pairs):
        raise InputError(
            f"{scores}: {len(rows)} lines for {len(pairs)} pairs; delete it and run launch/quickstart.sh again"
        )
    right = 0.0
    for row, pair in zip(rows, pairs, strict=True):
        values = row["log_probability"]
        other = CHOICES[1 - CHOICES.index(pair["answer"])]
        right += (values[pair["answer"]] > values[other]) + 0.5 * (values[pair["answer"]] == values[other])
    return right / len(pairs)


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file."""
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error}); run launch/quickstart.sh again") from error


def total_seconds(steps: Sequence[dict[str, Any]]) -> float:
    """Seconds that the work took: every attempt of a step up to the first that was complete, later repeats not."""
    complete: set[str] = set()
    total = 0.0
    for entry in steps:
        if entry["step"] not in complete:
            total += entry["seconds"]
            if entry["code"] == 0:
                complete.add(entry["step"])
    return total


def read_outcome(directory: Path) -> Outcome:
    """Everything, from the directory that launch/quickstart.sh filled."""
    return Outcome(
        read_pretraining(directory / "pretrained"),
        {name: read_arm(directory / name) for name in ARMS},
        read_json(directory / "baseline.json"),
        zero_shot_accuracy(directory / "zero-shot.jsonl", read_pairs(directory / "task" / "test.jsonl")),
        total_seconds(read_json_lines(directory / "steps.jsonl")),
    )


# --- telling ----------------------------------------------------------------------------------------------------------


def spread(values: Sequence[float]) -> str:
    """`79.7 ± 1.1`, in per cent, with the deviation of the sample (n - 1); one value stands alone."""
    mean = f"{100 * statistics.fmean(values):5.1f}"
    return mean if len(values) < 2 else f"{mean} ± {100 * statistics.stdev(values):.1f}"


def table(outcome: Outcome, directory: Path) -> str:
    """The text that ends the demonstration."""
    pretraining, baseline = outcome.pretraining, outcome.baseline
    rows = [("which of two sentences is the original, accuracy in %", "dev", "test")]
    rows += [("chance", f"{50:5.1f}", f"{50:5.1f}")]
    rows += [
        (
            "TF-IDF of words and word pairs, logistic regression",
            spread([baseline["dev_accuracy"]]),
            spread([baseline["test_accuracy"]]),
        )
    ]
    for name, title in ARMS.items():
        arm = outcome.arms[name]
        seeds = f"{len(arm.test)} seeds" if len(arm.test) > 1 else "1 seed"
        rows.append((f"GPT {title} ({seeds})", spread(arm.dev), spread(arm.test)))
    rows.append(("the pretrained language model's own preference, no labels", "", spread([outcome.zero_shot])))
    lines = [f"{name:<58}{dev:<14}{test}" for name, dev, test in rows]
    lines.insert(1, "-" * max(map(len, lines)))
    gain = statistics.fmean(outcome.arms[PRETRAINED].test) - statistics.fmean(outcome.arms[SCRATCH].test)
    over = statistics.fmean(outcome.arms[PRETRAINED].test) - outcome.arms[LONG].test[0]
    lines += [
        "",
        f"Pretraining is worth {100 * gain:+.1f} points with as many steps, "
        f"{100 * over:+.1f} against four times as many.",
        "",
        f"perplexity a token   {pretraining.before[0]:8.1f} (step {pretraining.before_step}) → "
        f"{pretraining.after[0]:.1f} (step {pretraining.after_step:,}, {pretraining.tokens / 1e6:.1f} M tokens)",
        f"bits a byte          {pretraining.before[1]:8.2f} → {pretraining.after[1]:.2f}",
        f"pretraining speed    {pretraining.tokens_per_second:8,.0f} tokens a second",
        f"in all               {duration(outcome.seconds):>8}",
        "",
        "What it does not show:",
        *(f"  {line}" for line in CAVEATS),
        "",
        "Where everything lies:",
    ]
    places = {
        "corpus": "the text, and corpus.json with its counts and fingerprint",
        "stores": "the same as tokens, with the tokenizer",
        "task": "the labelled pairs",
        "pretrained": "the pretrained model: config.json, metrics.jsonl, tensorboard, checkpoints",
        PRETRAINED: "fine-tuned from it: results.json, predictions.jsonl",
        SCRATCH: "the same from scratch, and four times as long in scratch-long",
        "sample.txt": "what the pretrained model writes",
        "curves.png": "the curves",
        "summary.json": "the figures above, as fractions",
    }
    width = max(len(str(directory / name)) for name in places) + 2
    lines += [f"  {str(directory / name):<{width}}{what}" for name, what in places.items()]
    return "\n".join(lines) + "\n"


def plot(outcome: Outcome, directory: Path) -> None:
    """curves.png: pretraining, fine-tuning, accuracies."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colors = {PRETRAINED: "#0b6e4f", SCRATCH: "#c44536", LONG: "#e39774"}
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(14, 4), layout="constrained")

    lines = read_lines(directory / "pretrained" / "metrics.jsonl")
    scale = tokens_per_step(directory / "pretrained") / 1e6
    training = [(line["step"] * scale, line["loss"]) for line in lines if "loss" in line]
    validation = [(line["step"] * scale, line["validation_loss"]) for line in lines if "validation_loss" in line]
    left.plot(*zip(*training, strict=True), color="#9db4c0", linewidth=1, label="training")
    left.plot(*zip(*validation, strict=True), color="#253237", marker="o", markersize=4, label="validation")
    left.set(title="Pretraining", xlabel="million tokens", ylabel="nats a token")
    left.legend(frameon=False)

    for name, title in ARMS.items():
        curves: dict[int, list[tuple[int, float]]] = {}
        for line in read_lines(directory / name / "metrics.jsonl"):
            if "loss" in line and "validation_loss" not in line:
                curves.setdefault(line.get("seed", 0), []).append((line["step"], line.get("task_loss", line["loss"])))
        for place, curve in enumerate(curves.values()):
            first = curve[0][0]
            smooth = _smoothed([value for _, value in curve])
            middle.plot(
                [step - first for step, _ in curve],
                smooth,
                color=colors[name],
                linewidth=1.2,
                label=title if place == 0 else None,
            )
    middle.set(title="Fine-tuning", xlabel="steps", ylabel="loss of the task, smoothed")
    middle.legend(frameon=False)

    for height, name in enumerate(ARMS):
        values = [100 * value for value in outcome.arms[name].test]
        right.scatter(values, [height] * len(values), color=colors[name], zorder=3)
    references = {
        "chance": 50.0,
        "TF-IDF": 100 * outcome.baseline["test_accuracy"],
        "no labels": 100 * outcome.zero_shot,
    }
    for name, value in references.items():
        right.axvline(value, color="#888888", linewidth=1, linestyle=":")
        right.text(value, len(ARMS) - 0.45, name, ha="center", va="bottom", fontsize=8, color="#555555")
    right.set_yticks(range(len(ARMS)), [title.replace(", ", ",\n") for title in ARMS.values()])
    right.set(title="Accuracy on the test pairs\n", xlabel="per cent, a point a seed", ylim=(-0.5, len(ARMS) - 0.5))
    figure.savefig(directory / "curves.png", dpi=110)
    pyplot.close(figure)


def _smoothed(values: Sequence[float], window: int = 5) -> list[float]:
    return [statistics.fmean(values[max(0, i - window + 1) : i + 1]) for i in range(len(values))]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the table, the plot and summary.json of the quickstart.")
    parser.add_argument("--directory", type=Path, required=True, help="what launch/quickstart.sh filled")
    directory = parser.parse_args().directory
    outcome = read_outcome(directory)
    (directory / "summary.json").write_text(json.dumps(outcome.summary(), indent=2) + "\n", encoding="utf-8")
    text = table(outcome, directory)
    (directory / "table.txt").write_text(text, encoding="utf-8")
    plot(outcome, directory)
    sample = directory / "sample.txt"
    if sample.is_file():
        print("A sample:\n")
        print("\n".join(f"  {line}" for line in sample.read_text(encoding="utf-8").strip().splitlines()) + "\n")
    print(text, end="")


if __name__ == "__main__":
    run_command(main)
