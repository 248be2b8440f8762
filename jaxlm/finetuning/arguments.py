"""Arguments of fine-tuning: those that name its config, task and tokenizer, which several commands share, and all."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

from jaxlm.distributed.config import DistributedConfig
from jaxlm.ranges import Count, NotNegative
from jaxlm.runs.config import TrackerKind
from jaxlm.tasks.custom import CustomConfig
from jaxlm.tasks.task import TaskOptions
from jaxlm.training.config import FinetuneConfig


@dataclass(frozen=True, kw_only=True)
class DataArguments:
    """The task and its rows."""

    task: str
    """The task: cola, sst2, …, or custom for your own files."""
    task_dir: str | None = None
    """Directory of the task's files; tfds or tfds:DATA_DIR for TFDS's copy."""
    custom: CustomConfig = field(default_factory=CustomConfig)
    options: TaskOptions = field(default_factory=TaskOptions)
    strict: bool = False
    """Fail if an answer's text does not match its answer_start, and list all of these. Default: count them."""
    held_out_seed: int = 0
    """Seed that chooses the rows of the dev split for a task without one, and those of --sample."""
    sample: Count | None = None
    """Train on this number of random rows of the training split. Dev and test are kept whole. Default: all rows."""


@dataclass(frozen=True, kw_only=True)
class TaskArguments(DataArguments):
    """A fine-tuning config, the task and its rows, and the source of the tokenizer."""

    config: tyro.conf.Positional[str]
    """A config file, or its name: finetune/gpt1, finetune/bert."""
    start: str | None = None
    """A run to start from (RUN or RUN@STEP). Default: from scratch."""
    tokenizer: str | None = None
    """Tokenizer of a new run: sentencepiece:FILE, wordpiece:VOCAB.txt, gpt1:DIR, gpt2:DIR, hf:DIR, store:DIR."""
    settings: Annotated[FinetuneConfig, tyro.conf.arg(name="")] = field(default_factory=FinetuneConfig)


@dataclass(frozen=True, kw_only=True)
class FinetuneArguments(TaskArguments):
    """Fine-tune on a labelled task."""

    run: str
    """The run directory, or gs://BUCKET/RUN, to create or to resume."""
    seeds: Count = 1
    """Number of runs, each with a seed of its own: `seed`, `seed` + 1, ..."""
    learning_rates: tuple[NotNegative, ...] = ()
    """Learning rates to try instead of optimizer.peak_lr. The one with the best mean on dev is reported."""
    beyond_length: bool = False
    """Use positions of the start's table that were never trained. The limit is the task's length, or --length."""
    keep: Literal["best", "all"] = "best"
    """Keep the parameters of the run that is best on dev, or of all runs."""
    with_inputs: bool = False
    """Write the task's columns and the gold label into predictions.jsonl too."""
    tracker: TrackerKind | None = None
    """Send the records of metrics.jsonl to Weights & Biases, MLflow or trackio too. The package must be installed."""
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
