"""Toy encoder runs and tasks of every kind: a vocabulary of invented words, files, command lines."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from toy_pairs import random_bert, random_tree
from toy_run import save

from jaxlm.atomic_write import write_json
from jaxlm.config import to_json
from jaxlm.models.bert import BertConfig
from jaxlm.objectives.config import MaskedLM
from jaxlm.runs.directory import RunDirectory
from jaxlm.tasks import CustomConfig, TaskOptions, read_task
from jaxlm.text import Tokenizer, tokenizer_from_spec
from jaxlm.training.config import FinetuneConfig, PretrainConfig, resolved_json
from jaxlm.training.task_model import make_task_learner

WORDS = [first + second for first in "bdfgklmn" for second in ("a", "e", "i", "o")]
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *(f"##{word}" for word in WORDS), "?", "."]
SIZES = BertConfig(num_positions=32, num_layers=1, width=16, num_heads=2, feed_forward_width=32, init_std=0.2)
FLAGS = "--model.num-layers 1 --model.width 16 --model.num-heads 2 --model.feed-forward-width 32".split()
FLAGS += "--model.num-positions 32 --model.init-std 0.2".split()
KINDS = ("classification", "regression", "choice", "span", "tagging")


def write_vocabulary(directory: Path) -> Path:
    """A `vocab.txt` of syllables."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "vocab.txt").write_text("\n".join(PIECES) + "\n")
    return directory / "vocab.txt"


def pretrained(path: Path, vocabulary: Path, *, steps=(3, 7), **model: Any) -> Path:
    """A pretraining run of random parameters, MLM and NSP heads among them."""
    tokenizer: Tokenizer = tokenizer_from_spec(f"wordpiece:{vocabulary}")
    sizes = replace(SIZES, vocab_size=tokenizer.size, **model)
    config = PretrainConfig(sizes, MaskedLM(), num_steps=max(steps), batch_size=8, length=sizes.num_positions)
    resolved = resolved_json(config, {"tokenizer": tokenizer.fingerprint})
    with RunDirectory(path) as run:
        run.open(resolved)
        run.save_tokenizer(tokenizer)
        run.record_start(started_from=None)
    save(path, {step: random_bert(sizes, seed=step) for step in steps}, resolved)
    return path


def custom(files: Path, kind: str) -> CustomConfig:
    """The task of `make_files`, for `read_task`."""
    parts = {part: str(files / f"{part}.jsonl") for part in ("train", "dev", "test")}
    words = columns(kind)
    values: dict[str, Any] = {}
    for word in words:
        if word.startswith("--"):
            name = word.removeprefix("--custom.")
            values[name] = ()
        else:
            values[name] = (*values[name], word)
    return CustomConfig(**parts, **{name: v if name == "choices" else v[0] for name, v in values.items()})


def finetuned(path: Path, vocabulary: Path, files: Path, kind: str, *, seed: int = 0) -> Path:
    """A fine-tuned run of random parameters, as the command leaves it."""
    tokenizer: Tokenizer = tokenizer_from_spec(f"wordpiece:{vocabulary}")
    task, data = read_task("custom", None, custom(files, kind))
    sizes = replace(SIZES, vocab_size=tokenizer.size)
    config = FinetuneConfig(model=sizes, num_steps=9, batch_size=8, length=24)
    resolved = resolved_json(config, {"tokenizer": tokenizer.fingerprint, "task_data": data.fingerprint()})
    resolved |= {"task": "custom", "task_dir": None, "custom": to_json(custom(files, kind)), "held_out_seed": 0}
    resolved |= {"options": to_json(TaskOptions())}
    with RunDirectory(path) as run:
        run.open(resolved)
        run.save_tokenizer(tokenizer)
        write_json(path / "task.json", task.to_json(), signed=True)
        run.record_start(started_from=None)
    shapes = jax.eval_shape(make_task_learner(config, task).init_params, jax.random.key(0))
    save(path, {9: random_tree(shapes, 0.5, seed)}, resolved)
    return path


def make_rows(kind: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Rows of a task of this kind; what is asked for can be read off the words."""
    rng = random.Random(seed)
    rows: list[dict[str, Any]] = []
    for number in range(count):
        words, right = rng.sample(WORDS[2:], 6), rng.randrange(2)
        words[rng.randrange(6)] = WORDS[right]
        text = " ".join(words)
        if kind == "classification":
            rows.append({"text": text, "label": ("bad", "good")[right]})
        elif kind == "regression":
            rows.append({"text": text, "score": round(3.0 * right + number % 3 / 10, 3)})
        elif kind == "choice":
            rows.append({"text": text, "a": WORDS[0], "b": WORDS[1], "right": "ab"[right]})
        elif kind == "span":
            context = " ".join([*words, *rng.sample(WORDS[2:], 10)])
            answers = [{"text": WORDS[right], "answer_start": context.index(WORDS[right])}]
            if number % 5 == 4:
                context, answers = context.replace(WORDS[right], "zzz"), []
            rows.append({"id": f"q{number}", "question": f"{words[0]} ?", "context": context, "answers": answers})
        else:
            tags = ["B-X" if word == WORDS[0] else "B-Y" if word == WORDS[1] else "O" for word in words]
            rows.append({"tokens": words, "tags": tags, "document": f"{seed}-{number // 3}"})
    return rows


def make_files(directory: Path, kind: str, **counts: int) -> Path:
    """train, dev and test as JSON lines."""
    directory.mkdir(parents=True, exist_ok=True)
    for number, (part, count) in enumerate(({"train": 32, "dev": 13, "test": 7} | counts).items()):
        rows = make_rows(kind, count, number)
        (directory / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def columns(kind: str) -> list[str]:
    """The flags that say what stands where."""
    return {
        "classification": "--custom.text text --custom.label label",
        "regression": "--custom.text text --custom.label score --custom.kind regression",
        "choice": "--custom.text text --custom.label right --custom.choices a b --custom.kind choice",
        "span": "--custom.kind span",
        "tagging": "--custom.text tokens --custom.label tags --custom.kind tagging",
    }[kind].split()


def arguments(run: Path, files: Path, kind: str, *more: Any) -> list[Any]:
    """Two epochs of four steps on files of `make_files`."""
    parts = [word for part in ("train", "dev", "test") for word in (f"--custom.{part}", files / f"{part}.jsonl")]
    toy = "--length 24 --batch-size 8 --num-epochs 2 --log-every 1 --checkpoint-every 3 --optimizer.peak-lr 1e-2"
    return ["finetune/bert", "--run", run, "--task", "custom", *parts, *columns(kind), *toy.split(), *more]


def lines(file: Path) -> list[dict[str, Any]]:
    """A file of JSON lines."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def softmax(x: np.ndarray) -> np.ndarray:
    """Over the last axis."""
    shares = np.exp(x - x.max(axis=-1, keepdims=True))
    return shares / shares.sum(axis=-1, keepdims=True)


def write_lines(file: Path, rows: list[dict[str, Any]]) -> Path:
    """JSON lines."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file
