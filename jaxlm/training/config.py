"""What a run is: the configs of pretraining and fine-tuning, and which of their fields are its identity."""

import math
import operator
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import tyro
from jax.sharding import Mesh

from jaxlm.config import CHOSEN_BY_FLAG, to_json
from jaxlm.data.config import DataConfig, Windows
from jaxlm.distributed.mesh import MeshConfig, check_batch
from jaxlm.errors import InputError
from jaxlm.models import DEFAULT_MODEL, ModelConfig, build, family_of
from jaxlm.models.family import UNLIMITED
from jaxlm.models.heads import Features
from jaxlm.nn.dropout import check_rate
from jaxlm.nn.execution import Execution
from jaxlm.objectives.config import LanguageModel, ObjectiveConfig
from jaxlm.training.optimizer import OptimizerConfig

PRETRAINING, FINETUNING = "pretraining", "finetuning"  # kinds of runs, as config.json has them

# Fields that may change when a run resumes: how it runs, what it writes, what it is held against. Stores may move: what
# is in them is held by `fingerprints`, which `config.json` has beside the fields.
RUN_FIELDS = (
    "mesh.*",
    "execution.*",
    "micro_batches",
    "log_every",
    "eval_every",
    "eval_batch_size",
    "checkpoint_every",
    "keep_newest",
    "keep_every",
    "data.store",
    "data.validation",
)
# Those in which config.json may differ from what an older checkpoint of the run was saved with.
MAY_DIFFER = (
    *RUN_FIELDS,
    "num_steps",
    "num_epochs",
    "seed",
    "members_per_group",
    "task_dir",
    "start",
    "custom.train",
    "custom.dev",
    "custom.test",
)


@dataclass(frozen=True)
class PretrainConfig:
    """A pretraining run: a model, an objective, and rows of text."""

    model: ModelConfig = field(default_factory=DEFAULT_MODEL)
    objective: Annotated[ObjectiveConfig, tyro.conf.AvoidSubcommands, CHOSEN_BY_FLAG] = field(
        default_factory=LanguageModel
    )
    data: Annotated[DataConfig, tyro.conf.AvoidSubcommands, CHOSEN_BY_FLAG] = field(default_factory=Windows)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    num_steps: int | None = None
    """Updates; or give num_epochs."""
    num_epochs: float | None = None
    """Passes over the store."""
    batch_size: int = 64
    """Sequences in the global batch."""
    length: int = 512
    """Tokens in a sequence."""
    seed: int = 0
    mesh: MeshConfig = field(default_factory=MeshConfig)
    execution: Execution = field(default_factory=Execution)
    micro_batches: int | Literal["auto"] = 1
    """Pieces of the batch that are run one after the other; the update is that of the whole batch. auto: as few as fit
    the devices' memory, by compiling; 1 on a CPU."""
    log_every: int = 10
    eval_every: int = 1000
    """Steps between evaluations on data.validation; 0: at the end only."""
    eval_batch_size: int | None = None
    """Sequences in an evaluation batch; batch_size unless given."""
    checkpoint_every: int = 1000
    keep_newest: int = 3
    """Checkpoints kept."""
    keep_every: int | None = None
    """Steps of which every multiple's checkpoint is kept for good."""

    def check(self) -> None:
        """Refuse what cannot run."""
        check_fields(self)
        self.data.check()
        self.objective.check()
        is_causal = build(self.model).is_causal
        wanted = "language_model" if is_causal else "masked_lm"
        if self.objective.kind != wanted:
            kind = "causal" if is_causal else "bidirectional"
            raise InputError(
                f"objective.kind must be {wanted} for a {kind} model, got {self.objective.kind}; give that objective"
            )
        encoder = family_of(self.model).context == "bidirectional"
        if encoder and self.data.layout == "streams":
            raise InputError(
                f"data.layout must be pairs, windows or packed for {family_of(self.model).title}, got streams; give "
                "one of these"
            )
        if not encoder and self.data.layout == "pairs":
            raise InputError(
                f"data.layout must be windows, packed or streams for {family_of(self.model).title}, got pairs; give "
                "one of these"
            )
        # The loss of an encoder is over the masked tokens, whose number its chunks need not divide.
        check_sizes(self.length, 0 if encoder else self.execution.loss_chunks, self.model)


@dataclass(frozen=True)
class FinetuneConfig:
    """A fine-tuning run: a pretrained (or fresh) model, a head, a labelled task. Fields that are None: the task's."""

    model: ModelConfig = field(default_factory=DEFAULT_MODEL)
    """Sizes for a run from scratch; with --start they come from there."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    auxiliary_lm: float = 0.0
    """Weight of a decoder's language-model loss beside the task's (GPT-1's lambda, L3 = L2 + lambda L1); 0: none."""
    head: Literal["linear", "bilstm"] = "linear"
    """What stands on the model. bilstm: of an encoder, two layers of 768 units a direction on `features`, and then
    what linear has (BERT's tables 5 and 7)."""
    features: Features = "last"
    """Layers that a bilstm head reads, the rows of BERT's table 7."""
    frozen: bool = False
    """Whether the pretrained model stays as it is and only the head learns."""
    head_dropout_rate: float = 0.1
    transfer_layers: int | None = None
    """Pretrained layers kept, from the first; the rest start fresh (GPT-1's figure 2). None: all."""
    reinit_layers: int = 0
    """Pretrained layers, from the last, that start fresh, and an encoder's pooler with them (Zhang et al., 2021)."""
    select: Literal["best", "last"] = "best"
    """Parameters that count at the end. best: of the evaluation that did best on dev. last: of the last step."""
    num_steps: int | None = None
    num_epochs: float | None = None
    batch_size: int | None = None
    length: int | None = None
    """Longest sequence; longer inputs are cut by the task's rule and counted."""
    seed: int = 0
    mesh: MeshConfig = field(default_factory=MeshConfig)
    execution: Execution = field(default_factory=Execution)
    micro_batches: int = 1
    log_every: int = 10
    eval_every: int = 0
    """Steps between evaluations on dev; 0: after each epoch."""
    eval_batch_size: int | None = None
    checkpoint_every: int = 1000
    keep_newest: int = 1
    """Training states kept of a seed and rate that is worked on; they go when its result is written."""
    keep_every: int | None = None
    """Steps of which every multiple's training state is kept as long."""
    members_per_group: int = 0
    """Seeds and rates that train side by side in one program; 0: as many as fit an accelerator, one on a CPU, which
    gains nothing."""

    def check(self) -> None:
        """Refuse what cannot run."""
        rate = self.optimizer.peak_lr
        check_fields(replace(self, optimizer=replace(self.optimizer, peak_lr=0.0 if rate is None else rate)))
        if self.auxiliary_lm < 0:
            raise InputError(f"auxiliary_lm {self.auxiliary_lm}: a number from 0 on")
        encoder = family_of(self.model).context == "bidirectional"
        if self.auxiliary_lm and (encoder or self.frozen):
            raise InputError(
                f"auxiliary_lm {self.auxiliary_lm}: "
                + ("an encoder has" if encoder else "a frozen model learns")
                + " no language-model loss beside the task's; give 0"
            )
        if self.head == "bilstm" and not encoder:
            raise InputError("head bilstm: it stands on an encoder's layers; a decoder has head linear")
        if self.features != "last" and self.head != "bilstm":
            raise InputError(f"features {self.features}: only head bilstm reads them; give --head bilstm too")
        if self.members_per_group < 0:
            raise InputError(f"members_per_group {self.members_per_group}: a number above 0, or 0 to have it chosen")
        layers = self.model.num_layers
        if self.transfer_layers is not None and not 0 <= self.transfer_layers <= layers:
            raise InputError(f"transfer_layers {self.transfer_layers}: from 0 to the model's {layers}")
        if not 0 <= self.reinit_layers <= layers:
            raise InputError(f"reinit_layers {self.reinit_layers}: from 0 to the model's {layers}")
        if self.reinit_layers and self.transfer_layers is not None:
            raise InputError("transfer_layers and reinit_layers are both given: give one of them")
        check_rate("head_dropout_rate", self.head_dropout_rate)


def check_fields(config: PretrainConfig | FinetuneConfig) -> None:
    """Refuse values that no run can have: numbers that are not finite, counts below 1, rates out of their range."""
    check_finite(to_json(config))
    check_positive(config, "batch_size", "num_steps", "length", *(["micro_batches"] * (config.micro_batches != "auto")))
    check_positive(config, "log_every", "eval_batch_size", "checkpoint_every", "keep_newest", "keep_every")
    config.model.check()
    config.optimizer.check()
    if config.execution.loss_chunks < 0:
        raise InputError(
            f"execution.loss_chunks must be a number above 0, or 0 to have it chosen, got "
            f"{config.execution.loss_chunks}; leave it out"
        )
    config.execution.layers_per_iteration(config.model.num_layers)
    if config.num_epochs is not None and not config.num_epochs > 0:
        raise InputError(f"num_epochs {config.num_epochs}: a number above 0")
    if config.eval_every < 0:
        raise InputError(f"eval_every {config.eval_every}: a number of steps, or 0")
    check_seed("seed", config.seed)


def check_finite(value: Any, name: str = "") -> None:
    """Refuse nan and infinity anywhere in a config as JSON."""
    if isinstance(value, dict):
        for key, item in value.items():
            check_finite(item, f"{name}.{key}" if name else key)
    elif isinstance(value, list):
        for item in value:
            check_finite(item, name)
    elif isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{name} {value}: a finite number")


def check_positive(config: Any, *names: str) -> None:
    """Refuse fields, their names in dots, that are below 1."""
    for name in names:
        value = operator.attrgetter(name)(config)
        if value is not None and value < 1:
            raise InputError(f"{name} {value}: a number above 0")


def check_seed(name: str, seed: int) -> None:
    """Keys are made from 32 bits."""
    if not 0 <= seed < 2**32:
        raise InputError(f"{name} {seed}: a whole number from 0 to {2**32 - 1}")


def check_batches(config: Any, mesh: Mesh) -> int:
    """Refuse batches that the mesh cannot deal out; the number of sequences in an evaluation batch."""
    check_batch(config.batch_size, 1 if config.micro_batches == "auto" else config.micro_batches, mesh)
    if config.eval_batch_size is not None:
        try:
            check_batch(config.eval_batch_size, 1, mesh)
        except InputError as error:
            raise InputError(f"eval_{error}") from None
    return config.eval_batch_size or config.batch_size


def check_sizes(length: int, loss_chunks: int, model: Any) -> None:
    """Refuse a length over the position table, or one that its loss chunks do not divide."""
    longest = build(model).max_length
    if not 1 <= length <= longest:
        most = "at least 1" if longest == UNLIMITED else f"from 1 to model.num_positions, {longest}"
        raise InputError(f"length must be {most}, got {length}; give another")
    if loss_chunks < 0 or (loss_chunks and length % loss_chunks):
        raise InputError(f"execution.loss_chunks {loss_chunks}: length {length} must be divisible by it (0: chosen)")


# Section 4.1 of both GPT-1's and BERT's paper.
DEFAULT_EPOCHS, DEFAULT_BATCH_SIZE = 3.0, 32
DEFAULT_LENGTH = 512  # of tasks without a published one, where the model has no shorter limit


def filled(
    config: FinetuneConfig, paper: Mapping[str, float], longest: int | None = None
) -> tuple[FinetuneConfig, int, int]:
    """What neither the config nor the command line says, from the task's paper: length, batch size, epochs, rate.

    longest: positions of the model that may be used; all unless given. Returns the config with these, and once more its
    length and its batch size, which are never None.
    """
    longest = longest or build(config.model).max_length
    if config.optimizer.peak_lr is None:
        rate = float(paper.get("peak_lr", family_of(config.model).finetuning_rate))
        config = replace(config, optimizer=replace(config.optimizer, peak_lr=rate))
    if config.num_steps is None and config.num_epochs is None:
        config = replace(config, num_epochs=float(paper.get("num_epochs", DEFAULT_EPOCHS)))
    length = config.length or min(int(paper.get("length", min(longest, DEFAULT_LENGTH))), longest)
    batch_size = config.batch_size or int(paper.get("batch_size", DEFAULT_BATCH_SIZE))
    return replace(config, length=length, batch_size=batch_size), length, batch_size


def one_duration(config: Any, given: Set[str]) -> Any:
    """`config` with one of num_steps and num_epochs: the one given on the command line replaces the config file's.

    given: the fields named on the command line.
    """
    if config.num_steps is not None and config.num_epochs is not None:
        if ("num_steps" in given) == ("num_epochs" in given):
            raise InputError("num_steps and num_epochs are both given: give one of them")
        return replace(config, **{"num_epochs" if "num_steps" in given else "num_steps": None})
    return config


def kept_value(config: Any, saved: Mapping[str, Any] | None, name: str, *, derived_from: Sequence[str] = ()) -> Any:
    """`config` with the value of the field `name` that the run has saved, where nobody gives one (it is None).

    A run that goes on keeps the values that were derived for it at its first start, although another version may derive
    others. saved: the run's config.json, None for a new run. derived_from: where one of these fields has another value
    than the saved one, the value is left to be derived anew.
    """
    if saved is None or saved.get(name) is None or getattr(config, name) is not None:
        return config
    if any(to_json(getattr(config, field)) != saved.get(field) for field in derived_from):
        return config
    return replace(config, **{name: saved[name]})


def run_fields(optimizer: OptimizerConfig, *, fixed_steps: bool = False) -> tuple[str, ...]:
    """The fields that may change on resume; the length of a run is one where no rate and no phase depends on it."""
    return RUN_FIELDS + (() if fixed_steps or optimizer.depends_on_num_steps() else ("num_steps", "num_epochs"))


def resolved_json(config: PretrainConfig | FinetuneConfig, fingerprints: dict[str, Any]) -> dict:
    """The content of `config.json`: the kind of the run, every field, and the fingerprints of what it is made from."""
    kind = FINETUNING if isinstance(config, FinetuneConfig) else PRETRAINING
    return {"kind": kind} | to_json(config) | {"fingerprints": fingerprints}


def kind_of_run(saved: Mapping[str, Any]) -> str:
    """PRETRAINING or FINETUNING, by a run's config.json; before the file had its kind, a field of one alone told it."""
    return saved.get("kind", FINETUNING if "auxiliary_lm" in saved else PRETRAINING)
