"""Arguments that name a fine-tuning run's config, task and tokenizer, shared by the commands that need them."""

from dataclasses import dataclass, field
from typing import Annotated

import tyro

from jaxlm.tasks import CustomConfig, TaskOptions
from jaxlm.training.config import FinetuneConfig


@dataclass(frozen=True, kw_only=True)
class TaskArguments:
    """A fine-tuning config, the task, the location of its files, and the source of the tokenizer."""

    config: tyro.conf.Positional[str]
    """A config file, or its name: finetune/gpt1, finetune/bert."""
    task: str
    """The task: cola, sst2, …, or custom for your own files."""
    task_dir: str | None = None
    """Directory of the task's files; tfds or tfds:DATA_DIR for TFDS's copy."""
    custom: CustomConfig = field(default_factory=CustomConfig)
    options: TaskOptions = field(default_factory=TaskOptions)
    strict: bool = False
    """Fail if an answer's text does not match its answer_start, and list all of these. Default: count them."""
    start: str | None = None
    """A run to start from (RUN or RUN@STEP). Default: from scratch."""
    tokenizer: str | None = None
    """Tokenizer of a new run: sentencepiece:FILE, wordpiece:VOCAB.txt, gpt1:DIR, gpt2:DIR, hf:DIR, store:DIR."""
    held_out_seed: int = 0
    """Seed that chooses the rows of the dev split for a task without one."""
    settings: Annotated[FinetuneConfig, tyro.conf.arg(name="")] = field(default_factory=FinetuneConfig)
