"""Arguments of fine-tuning, of which several commands share those of the task, and the defaults of its config."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import tyro

from jaxlm.config import to_json
from jaxlm.distributed.config import DistributedConfig
from jaxlm.models import family_of
from jaxlm.ranges import Count, NotNegative
from jaxlm.runs.config import TrackerKind
from jaxlm.tasks import CustomConfig, Task, TaskData, TaskOptions, read_task
from jaxlm.tasks.text_to_text import as_text
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
    as_text: bool = False
    """Read a task with labels as text to text, in T5's form: a label is a text that the model generates. For
    classification, choice, regression, and questions that all have an answer."""
    sample: Count | None = None
    """Train on this number of random rows of the training split. Dev and test are kept whole. Default: all rows."""

    def read(self) -> tuple[Task, TaskData]:
        """Return the task and its rows."""
        more: dict[str, Any] = {name: getattr(self, name) for name in ("options", "strict", "sample")}
        task, data = read_task(self.task, self.task_dir, self.custom, seed=self.held_out_seed, **more)
        return as_text(task, data) if self.as_text else (task, data)


@dataclass(frozen=True, kw_only=True)
class TaskArguments(DataArguments):
    """A fine-tuning config, the task and its rows, and the source of the tokenizer."""

    config: tyro.conf.Positional[str]
    """A config file, or its name: finetune/gpt1, finetune/bert."""
    start: str | None = None
    """A run to start from, RUN or RUN@STEP, or published weights, for example hf:DIR. Default: from scratch."""
    tokenizer: str | None = None
    """Tokenizer of a new run: sentencepiece:FILE, wordpiece:VOCAB.txt, gpt1:DIR, gpt2:DIR, hf:DIR, store:DIR, or
    vectors:FILE, the words of a file of word vectors."""
    unlabelled: str | None = None
    """Sentences without tags for --head cross_view, whose batches alternate with labelled ones. FILE: sentences as the
    task's. lines:FILE: a sentence in each line. STORE: those of a store of words. rest: the rows that --sample leaves
    out. Default: none."""
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
    word_vectors: str | None = None
    """File of word vectors in GloVe's text format, with which the words of a run from scratch begin. The vectors have
    the model's width. A word is looked up by its spelling, else in lower case. Words without a vector begin at random.
    Default: all words begin at random."""
    beyond_length: bool = False
    """Use positions of the start's table that were never trained. The limit is the task's length, or --length."""
    keep: Literal["best", "all"] = "best"
    """Keep the parameters of the run that is best on dev, or of all runs."""
    with_inputs: bool = False
    """Write the task's columns and the gold label into predictions.jsonl too."""
    tracker: TrackerKind | None = None
    """Send the records of metrics.jsonl to Weights & Biases, MLflow or trackio too. The package must be installed."""
    distributed: DistributedConfig = field(default_factory=DistributedConfig)


# Section 4.1 of GPT-1's paper and of BERT's.
DEFAULT_EPOCHS, DEFAULT_BATCH_SIZE = 3.0, 32
DEFAULT_LENGTH = 512  # of tasks without a published one, where the model has no shorter limit


def filled(
    config: FinetuneConfig, paper: Mapping[str, float], longest: int | None = None
) -> tuple[FinetuneConfig, int, int]:
    """Fill fields that are None from the task's paper: length, batch size, epochs and learning rate.

    longest: the number of positions to use; default: all of the model. Returns the config, its length and its batch
    size, which are never None.
    """
    longest = longest or family_of(config.model).max_length(config.model)
    if config.optimizer.peak_lr is None:
        rate = float(paper.get("peak_lr", family_of(config.model).finetuning_rate))
        config = replace(config, optimizer=replace(config.optimizer, peak_lr=rate))
    if config.num_steps is None and config.num_epochs is None:
        config = replace(config, num_epochs=float(paper.get("num_epochs", DEFAULT_EPOCHS)))
    length = config.length or min(int(paper.get("length", min(longest, DEFAULT_LENGTH))), longest)
    batch_size = config.batch_size or int(paper.get("batch_size", DEFAULT_BATCH_SIZE))
    return replace(config, length=length, batch_size=batch_size), length, batch_size


def kept_value(config: Any, saved: Mapping[str, Any] | None, name: str, *, derived_from: Sequence[str] = ()) -> Any:
    """Return `config` with the saved value of the field `name` of a run, if the field is None.

    A resumed run keeps the values derived at its first start, although another version may derive different ones.
    saved: the run's config.json, None for a new run. derived_from: if one of these fields differs from its saved value,
    the value is derived again.
    """
    if saved is None or saved.get(name) is None or getattr(config, name) is not None:
        return config
    if any(to_json(getattr(config, field)) != saved.get(field) for field in derived_from):
        return config
    return replace(config, **{name: saved[name]})
