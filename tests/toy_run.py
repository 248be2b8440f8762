"""Run directories as training leaves them, made without training: random parameters, a real tokenizer, real stores."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import toy
from flax import linen as nn
from toy_store import write_store

from jaxlm.atomic_write import write_json
from jaxlm.config import to_json
from jaxlm.data.config import MEMBERS
from jaxlm.data.store import Store
from jaxlm.models.gpt import GPTConfig
from jaxlm.models.heads import task_head
from jaxlm.runs.checkpoints import Checkpoints
from jaxlm.runs.directory import RunDirectory
from jaxlm.runs.metrics_log import MetricsLog
from jaxlm.tasks import CustomConfig, Task, TaskData, read_task
from jaxlm.text import Tokenizer, train_sentencepiece
from jaxlm.training.config import FinetuneConfig, PretrainConfig, resolved_json

DOCUMENTS = [
    "The cat sat on the mat. The dog lay on the rug, and the bird sang in the tree.",
    "A naïve fox went over the hill – twice.\n\nIt saw a crow.",
    "In the morning the cat sat on the hill and the fox lay in the tree.",
]
SIZES = GPTConfig(num_positions=48, num_layers=2, width=16, num_heads=2, feed_forward_width=32, init_std=0.3)


def toy_tokenizer() -> Tokenizer:
    return train_sentencepiece(DOCUMENTS, 310)


def toy_store(path: Path, tokenizer: Tokenizer, documents=DOCUMENTS) -> Store:
    return write_store(path, {"text": documents}, tokenizer)


def pretrained(path: Path, store: Store, *, steps=(3, 7), layout="windows", data_order=None) -> Path:
    """A pretraining run with checkpoints of these steps, different in their parameters."""
    tokenizer = store.tokenizer()
    model = dataclasses.replace(SIZES, vocab_size=tokenizer.size)
    data = MEMBERS[layout](store=(str(store.path),))
    config = PretrainConfig(model=model, data=data, num_steps=max(steps), batch_size=4, length=16)
    prints = {"tokenizer": tokenizer.fingerprint, "stores": [store.fingerprint]}
    resolved = resolved_json(config, prints | ({} if data_order is None else {"data_order": data_order}))
    with RunDirectory(path) as run:
        run.open(resolved)
        run.save_tokenizer(tokenizer)
        run.record_start(started_from=None)
    with MetricsLog(path, None) as metrics:
        for step in range(1, max(steps) + 1):
            metrics.write(step, {"loss": 6.0 - step / 10, "learning_rate": 0.1, "tokens_per_second": 1234.0})
        for step, loss in ((2, 5.0), (5, 4.5), (7, 4.75)):
            figures = {"perplexity": float(np.exp(loss)), "word_perplexity": 1e3, "bits_per_byte": 2.5}
            metrics.write(step, {"validation_loss": loss} | figures)
    save(path, {step: toy.random_params(model, seed=step) for step in steps}, resolved)
    return path


def finetuned(path: Path, tokenizer: Tokenizer, custom: CustomConfig) -> tuple[Path, Task, TaskData]:
    """A fine-tuning run of a user's own task."""
    task, data = read_task("custom", None, custom)
    model = dataclasses.replace(SIZES, vocab_size=tokenizer.size)
    config = FinetuneConfig(model=model, num_steps=9, batch_size=4, length=40)
    resolved = resolved_json(config, {"tokenizer": tokenizer.fingerprint, "task_data": data.fingerprint()})
    resolved |= {"task": "custom", "task_dir": None, "custom": to_json(custom), "start": "runs/x@7", "seeds": 1}
    with RunDirectory(path) as run:
        run.open(resolved)
        run.save_tokenizer(tokenizer)
        write_json(path / "task.json", task.to_json(), signed=True)
        run.record_start(started_from="parameters of runs/x@7")
    states = np.zeros((1, 1, model.width), np.float32)
    module = task_head(task.kind, task.num_outputs, input_format="gpt1", dropout_rate=0.1, init_std=0.5)
    head = jax.tree.map(np.asarray, nn.unbox(module.init(jax.random.key(1), states, train=False)["params"]))
    save(path, {9: toy.random_params(model) | {"head": head}}, resolved)
    return path, task, data


def save(path: Path, params: dict, resolved: dict) -> None:
    with Checkpoints(path / "checkpoints", keep_newest=9) as checkpoints:
        for step, tree in params.items():
            checkpoints.save(step, {"params": tree, "step": np.int32(step)}, config=resolved)
            checkpoints.wait()
