"""The config of the optimizer and its learning-rate schedule. This module does not import JAX."""

import math
import typing
from dataclasses import dataclass
from typing import Annotated, Literal

from jaxlm.errors import InputError
from jaxlm.ranges import BelowOne, NotNegative, Positive, Range

Decay = Literal[
    "cosine",
    "linear",
    "constant",
    "inverse_sqrt",
    "constant_inverse_sqrt",
    "polynomial",
    "warmup_stable_decay",
    "slanted_triangular",
    "one_plus_root",
    "halved_by_validation",
]


@dataclass(frozen=True)
class OptimizerConfig:
    """Configuration of an optimizer and its learning-rate schedule. Defaults: GPT-1's pretraining (section 4.1)."""

    kind: Literal["adamw", "openai_adam", "bert_adamw", "sgd", "adagrad", "adafactor"] = "adamw"
    """adamw: bias-corrected, decoupled decay. openai_adam, bert_adamw: as in GPT-1's and BERT's code, with a learning
    rate of 0 in the first update; BERT's does not correct the bias. sgd: with momentum; the decay is added to the
    gradient. adagrad: as in TensorFlow, decoupled decay. adafactor: as for T5; peak_lr is relative to the size of each
    parameter, and eps is not used."""
    peak_lr: NotNegative | None = 2.5e-4
    """Highest learning rate. None: the task's, in fine-tuning."""
    warmup: Annotated[float, Range(0, fix="give 0 for no warmup")] = 2000.0
    """Linear warmup in steps, or below 1 as a fraction of the run. A fraction of a step is rounded down by bert_adamw,
    kept by openai_adam and rounded up by the others."""
    decay: Decay = "cosine"
    """Decay of the learning rate from the peak to `floor`. cosine, linear, polynomial: at the last step. constant: no
    decay. inverse_sqrt: with the inverse root of the step, in units of the warmup. constant_inverse_sqrt: the peak for
    10,000 steps, then with the inverse root of the step (T5). warmup_stable_decay: the peak for the fraction `stable`
    of the steps after the warmup, then polynomial. slanted_triangular: linear from `floor` to the peak during the
    warmup, and linear back, as in ULMFiT (warmup 0.1, floor 0.03125). one_plus_root: divided by 1 + 0.005 times the
    root of the step, during the warmup too, which begins at 0 (CVT). halved_by_validation: a half after each evaluation
    whose validation loss is above that of the evaluation before (CoVe)."""
    floor: BelowOne = 0.0
    """Lowest learning rate of the decay, as a fraction of peak_lr."""
    power: Positive = 1.0
    """Power of polynomial and warmup_stable_decay. 1: linear."""
    stable: BelowOne = 0.8
    """Fraction of the steps after the warmup at the peak, with warmup_stable_decay."""
    beta1: BelowOne = 0.9
    """Decay rate of Adam's first moment."""
    beta2: BelowOne = 0.999
    """Decay rate of Adam's second moment."""
    eps: NotNegative = 1e-8
    """Constant added to the root of the second moment, in Adam and adagrad."""
    weight_decay: NotNegative = 0.01
    """Weight decay of matrices and tables. Biases and norms are not decayed."""
    clip_norm: NotNegative = 1.0
    """Largest global norm of the gradient. 0: no clipping."""
    layer_decay: Annotated[float, Range(above=0, fix="give 1 for the same rate everywhere")] = 1.0
    """Divisor of the learning rate from each layer to the one below. The head has the full rate, the embeddings have
    the lowest. 1: the same rate everywhere."""
    momentum: BelowOne = 0.0
    """Momentum of sgd. 0: no momentum and no optimizer state."""
    initial_accumulator: NotNegative = 0.1
    """Initial value of adagrad's sums of squared gradients."""

    def check(self) -> None:
        """Raise InputError for a value that the chosen optimizer or decay does not use, and for a division by 0."""
        for name, (choice, users) in _USERS.items():
            value, default, chosen = getattr(self, name), getattr(OptimizerConfig, name), getattr(self, choice)
            if value != default and chosen not in users:
                rule = f"{default:g} with optimizer.{choice} {chosen}"
                raise InputError(f"optimizer.{name} must be {rule}, got {value:g}; leave it out")
        if self.kind == "adagrad" and not (self.initial_accumulator or self.eps):
            raise InputError("optimizer.initial_accumulator must be above 0 where optimizer.eps is 0; give 0.1")

    def warmup_steps(self, num_steps: int) -> float:
        """Return the warmup in steps of a run of `num_steps`; openai_adam's need not be whole."""
        steps = self.warmup * num_steps if self.warmup < 1 else self.warmup
        if self.decay == "slanted_triangular":
            return math.floor(steps + 1e-9)
        if self.kind == "openai_adam":
            return steps
        return math.floor(steps + 1e-9) if self.kind == "bert_adamw" else math.ceil(steps - 1e-9)

    def warmup_note(self, num_steps: int) -> str | None:
        """Return a note on a warmup that is longer than a run of `num_steps`, else None."""
        steps = self.warmup_steps(num_steps)
        if steps <= num_steps:
            return None
        return (
            f"--optimizer.warmup is {steps:g} steps, but the run has {num_steps}: the learning rate never reaches its "
            "peak; give fewer steps, or a fraction of the run below 1"
        )

    @property
    def follows_validation(self) -> bool:
        """True if the learning rate depends on the evaluations of the run."""
        return self.decay == "halved_by_validation"

    def depends_on_num_steps(self) -> bool:
        """Return True if the learning rate of a step depends on the length of the run."""
        fixed = ("constant", "inverse_sqrt", "constant_inverse_sqrt", "one_plus_root", "halved_by_validation")
        return self.kind == "openai_adam" or self.decay not in fixed or 0 < self.warmup < 1


_WITHOUT_FLOOR = ("constant", "one_plus_root", "halved_by_validation")
# Fields that only some optimizers or decays use: the field that chooses, and the choices.
_USERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "momentum": ("kind", ("sgd",)),
    "floor": ("decay", tuple(name for name in typing.get_args(Decay) if name not in _WITHOUT_FLOOR)),
    "power": ("decay", ("polynomial", "warmup_stable_decay")),
    "stable": ("decay", ("warmup_stable_decay",)),
}
