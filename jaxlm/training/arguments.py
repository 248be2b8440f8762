"""Arguments of pretraining."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

from jaxlm.distributed.config import DistributedConfig
from jaxlm.ranges import Natural
from jaxlm.runs.config import TrackerKind
from jaxlm.training.config import PretrainConfig


@dataclass(frozen=True)
class PretrainArguments:
    """Pretrain a language model on a token store."""

    config: tyro.conf.Positional[str]
    """A config file, or its name: pretrain/gpt1."""
    run: str
    """The run directory, or gs://BUCKET/RUN, to create or to resume."""
    start: str | None = None
    """A run to start from (RUN or RUN@STEP). Default: from scratch."""
    start_with: Literal["parameters", "state"] = "parameters"
    """Content to load from --start. state: moments and step too, to train longer or at another learning rate."""
    start_vocabulary: Literal["same", "matched"] = "same"
    """same: the stores have the tokenizer of --start. matched: each token's row of the table comes from the same token
    of --start; a token that it lacks begins at the mean of all rows (ULMFiT)."""
    profile: str | None = None
    """START:STOP, the steps to trace for TensorBoard's profiler. Default: none."""
    verify_stores: bool = False
    """Check the full hashes of the stores before training."""
    zero_shot: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """NAME:PATH, a zero-shot task to evaluate before the first step and during training, into zero_shot.jsonl. Can be
    repeated. See python -m jaxlm.evaluate zero-shot --help."""
    zero_shot_every: Natural = 0
    """Steps between zero-shot evaluations. 0: at the end only."""
    sample_every: Natural = 0
    """Steps between samples of text, from before the first step on, in the log and in metrics.jsonl. They are those of
    jaxlm.generate with its defaults. 0: none."""
    sample_prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A text to continue with --sample-every. Can be repeated. Default: the beginning of a new text."""
    tracker: TrackerKind | None = None
    """Send the records of metrics.jsonl to Weights & Biases, MLflow or trackio too. The package must be installed."""
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    settings: Annotated[PretrainConfig, tyro.conf.arg(name="")] = field(default_factory=PretrainConfig)
