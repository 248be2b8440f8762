"""Arguments of `jaxlm.show`. This module does not import JAX."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from jaxlm.finetuning.arguments import DataArguments, TaskArguments
from jaxlm.ranges import Count, Natural
from jaxlm.training.config import FinetuneConfig, PretrainConfig


@dataclass(frozen=True)
class ShowArguments:
    """Show a token store, a run, or several runs side by side."""

    target: tyro.conf.Positional[tuple[str, ...]] = ()
    """A token store, one or more run directories (or RUN@STEP), or a config file or its name."""
    step: Natural | None = None
    """Show the batch of this step of a run, counted from 0."""
    count: Natural = 3
    """Documents or rows to show."""
    document: Natural | None = None
    """Show this document of a store alone, whole; from 0, in the order of the store."""
    output: Path | None = None
    """Write the document to this file: as MIDI if it ends in .mid, else as text."""
    plot: Path | None = None
    """Write the curves of the runs, of training and validation, to this file: .png, .pdf or .svg."""


@dataclass(frozen=True)
class ShowPretrainingArguments:
    """Show a pretraining config, or with a store a batch of it."""

    config: tyro.conf.Positional[str]
    """A config file, or its name."""
    step: Natural | None = None
    """The step whose batch is shown, counted from 0. Default: 0 with a store, and without one no batch."""
    count: Natural = 3
    """Rows to show."""
    settings: Annotated[PretrainConfig, tyro.conf.arg(name="")] = field(default_factory=PretrainConfig)


@dataclass(frozen=True)
class ShowRecipeArguments:
    """Show a fine-tuning config without a task."""

    config: tyro.conf.Positional[str]
    """A config file, or its name."""
    settings: Annotated[FinetuneConfig, tyro.conf.arg(name="")] = field(default_factory=FinetuneConfig)


@dataclass(frozen=True, kw_only=True)
class ShowFinetuningArguments(TaskArguments):
    """Show a batch of a fine-tuning config."""

    step: Natural = 0
    """The step, counted from 0."""
    count: Natural = 3
    """Examples to show."""


@dataclass(frozen=True, kw_only=True)
class ShowRowsArguments(DataArguments):
    """Show the rows of a task before anything is trained."""

    start: str | None = None
    """A run or published model to measure tokens for."""
    tokenizer: str | None = None
    """Tokenizer to measure tokens with, without a start. A vocabulary with CLS and SEP is used as a BERT uses it."""
    length: Count | None = None
    """Tokens in the longest sequence. Default: the task's, at most those that the start was trained on."""
    count: Natural = 3
    """Training examples to show."""
