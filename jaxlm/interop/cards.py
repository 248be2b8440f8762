"""The model card of an export: its input, its use, its training data and its metrics."""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from jaxlm.files import read_own
from jaxlm.interop.huggingface import Export
from jaxlm.models import family_of
from jaxlm.runs.metrics_log import read_metrics
from jaxlm.tasks import Task
from jaxlm.text import Tokenizer
from jaxlm.wording import counted

# Hugging Face's pipeline tags, by the end of a class's name.
_TAGS = {
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMultipleChoice": "multiple-choice",
    "DoubleHeadsModel": "multiple-choice",
    "LMHeadModel": "text-generation",
    "ForMaskedLM": "fill-mask",
    "ForPreTraining": "fill-mask",
    "ForNextSentencePrediction": "",
    "ForConditionalGeneration": "text2text-generation",
    "Model": "feature-extraction",
}
# Tags that have a pipeline in transformers, with an example of its input.
_EXAMPLES = {
    "text-classification": ('"a text"', ", truncation=True"),
    "token-classification": ('"a sentence"', ', aggregation_strategy="first"'),
    "text-generation": ('"Once upon a time"', ", max_new_tokens=20"),
    "fill-mask": ('"a text with one [MASK]"', ""),
    "feature-extraction": ('"a text"', ""),
}


class About(NamedTuple):
    """Facts of a card that no run knows. license: as the Hub spells it. datasets: by their names on the Hub."""

    license: str | None = None
    languages: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()


UNKNOWN = About()


def model_card(
    export: Export,
    *,
    name: str,
    run: str,
    config: dict[str, Any],
    directory: Path,
    task: Task | None = None,
    tokenizer: Tokenizer | None = None,
    longest: int | None = None,
    about: About = UNKNOWN,
) -> str:
    """Return Markdown: the input, a snippet, the run's config, the metrics of its results.json or its metrics.jsonl.

    name: of the exported directory. directory: of the run. longest: length of the longest training sequence.
    """
    model = config["model"]
    tag = next(tag for end, tag in _TAGS.items() if export.architecture.endswith(end))
    results = read_own(directory / "results.json")
    lines = [*_front_matter(about, tag, name, results), ""]
    layers, heads = counted(model["num_layers"], "layer"), counted(model["num_heads"], "head")
    positions = f"{model['num_positions']} positions, " if "num_positions" in model else ""
    lines += [
        f"# {export.architecture} from jaxlm",
        "",
        f"Exported from the run `{run}`: {layers} of width {model['width']}, {heads}, {positions}a vocabulary of "
        f"{model['vocab_size']:,}.",
        "",
    ]
    if export.notes:
        lines += [*(f"- {note}" for note in export.notes), ""]
    if tokenizer is not None:
        lines += [*_input(export, tokenizer, task, longest or model.get("num_positions", 0)), ""]
        lines += _usage(tag, name, task)
    measured = _results(results) or _last_metrics(directory / "metrics.jsonl")
    if measured:
        lines += ["## What was measured", "", *measured, ""]
    return "\n".join([*lines, "## The run's config", "", "```json", json.dumps(config, indent=2), "```", ""])


def _input(export: Export, tokenizer: Tokenizer, task: Task | None, longest: int) -> list[str]:
    """Return lines about the input of the model, which the tokenizer builds."""
    inputs = export.inputs(tokenizer)
    spelt = {role: tokenizer.pieces([i])[0] for role, i in tokenizer.specials.items()}
    lines = ["## Input", ""]
    if inputs == "decoder":
        start, delimiter, extract = (spelt[role] for role in ("start", "delimiter", "extract"))
        lines += [
            f"The model reads `{start} text {extract}`, or of two texts `{start} first {delimiter} second {extract}`, "
            f"and answers at `{extract}`. The tokenizer adds these tokens."
        ]
    elif inputs == "encoder":
        cls, sep = spelt["cls"], spelt["sep"]
        lines += [
            f"The model reads `{cls} text {sep}`, or of two texts `{cls} first {sep} second {sep}` with token type 1 "
            "from the second on. The tokenizer adds these tokens."
        ]
    elif inputs == "source":
        lines += [f"The encoder reads `text {spelt['end']}`. The tokenizer adds this token."]
    else:
        lines += ["The model reads plain text: the tokenizer adds no token."]
    if task is None and family_of(export.model).positions is None:
        return [*lines, "It reads texts of any length."]
    if task is None:
        positions = export.model.num_positions
        trained = f", {longest} of which were trained" if longest < positions else ""
        return [*lines, f"It has {positions} positions{trained}."]
    lines += [f"It reads at most {longest} tokens; longer inputs are truncated at their end (`truncation=True`)."]
    if inputs == "decoder" and task.form != "single":
        lines += ["Of two texts that are both too long, transformers may keep one token more of the second than jaxlm."]
    if tokenizer.kind == "gpt1":
        lines += [
            "jaxlm repairs text with ftfy and splits it with spaCy, as GPT-1 did; this tokenizer splits it as BERT's."
        ]
    return lines


def _usage(tag: str, name: str, task: Task | None) -> list[str]:
    """Return a Python snippet; empty for classes without a pipeline in transformers."""
    if tag not in _EXAMPLES:
        return []
    example, more = _EXAMPLES[tag]
    if tag == "text-classification" and task is not None and task.form in ("entailment", "similarity"):
        example = '{"text": "the first text", "text_pair": "the second"}'
    if task is not None and task.kind == "multilabel":
        more += ", top_k=None"
    lines = ["## Use", "", "```python", "from transformers import pipeline", ""]
    lines += [f'model = pipeline("{tag}", "{name}")', f"model({example}{more})", "```", ""]
    if task is not None and task.kind == "regression":
        lines += ["The score is in the unit of the training files.", ""]
    return lines


def _front_matter(about: About, tag: str, name: str, results: dict[str, Any]) -> list[str]:
    """Return the metadata of the card: YAML, of which JSON values are a part."""
    fields: dict[str, Any] = {"tags": ["jaxlm"]}
    fields |= {"license": about.license, "language": list(about.languages), "datasets": list(about.datasets)}
    if results:
        fields["model-index"] = [{"name": name, "results": _index(results, tag)}]
    ours = ["library_name: transformers", *([f"pipeline_tag: {tag}"] if tag else [])]
    return ["---", *ours, *(f"{field}: {json.dumps(value)}" for field, value in fields.items() if value), "---"]


def _index(results: dict[str, Any], tag: str) -> list[dict[str, Any]]:
    """Return the evaluation of a fine-tuned model in the form of a model-index: the mean of each metric by split."""
    task = results["task"]
    return [
        {
            "task": {"type": tag or "other"},
            "dataset": {"name": task, "type": task, "split": split},
            "metrics": [
                {"type": metric, "name": metric, "value": value["mean"]}
                for metric, value in values.items()
                if math.isfinite(float(value["mean"]))
            ],
        }
        for split, values in _splits(results)
    ]


def _splits(results: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the splits with their metrics: dev and test, or those that a task names otherwise, such as dev_matched."""
    return [(name, value) for name, value in results.items() if isinstance(value, dict) and name != "best"]


def _results(results: dict[str, Any]) -> list[str]:
    if not results:
        return []
    rate = results.get("learning_rate")
    count = sum("failed" not in run and run.get("learning_rate") == rate for run in results["runs"])
    runs = "1 run" if count == 1 else f"{count} runs, mean ± deviation"
    lines = [f"Task {results['task']}, {runs}:", "", "| split | metric | |", "|---|---|---|"]
    for part, values in _splits(results):
        for name, value in values.items():
            spread = f" ± {value['std']:.4f}" if count > 1 else ""
            lines.append(f"| {part} | {name} | {value['mean']:.4f}{spread} |")
    return lines


def _last_metrics(file: Path) -> list[str]:
    if not file.exists():
        return []
    last: dict[str, Any] = {}
    for line in read_metrics(file):
        last |= {
            name: value for name, value in line.items() if name == "step" or "loss" in name or "perplexity" in name
        }
    return ["| metric | |", "|---|---|", *(f"| {name} | {value} |" for name, value in last.items())] if last else []
