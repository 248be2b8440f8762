"""Configs of the pretraining objectives."""

import typing
from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

from jaxlm.errors import InputError
from jaxlm.objectives.masking import MaskingConfig

Objectives = Literal["language_model", "masked_lm"]

_KIND = tyro.conf.arg(
    metavar="{" + ",".join(typing.get_args(Objectives)) + "}",
    help="Pretraining objective. language_model: the next token (Radford et al., 2018). masked_lm: masked tokens and, "
    "on rows of pairs, the next sentence (Devlin et al., 2019). Each objective has flags of its own: --help lists "
    "those of the objective that is given.",
)


@dataclass(frozen=True)
class LanguageModel:
    """Next-token prediction, for models that depend on earlier tokens alone."""

    kind: Annotated[Literal["language_model"], _KIND] = "language_model"

    def check(self) -> None:
        """Accept every value: there are no fields."""


@dataclass(frozen=True)
class MaskedLM:
    """Prediction of masked tokens and, on rows of pairs, of the next sentence (Devlin et al., 2019, section 3.1)."""

    kind: Annotated[Literal["masked_lm"], _KIND] = "masked_lm"
    masking: MaskingConfig = field(default_factory=MaskingConfig)
    next_sentence_coefficient: float = 1.0
    """Weight of the next-sentence loss on rows of pairs. 0: no next-sentence head."""

    def check(self) -> None:
        """Raise InputError for fractions and weights outside their range."""
        self.masking.check()
        if not self.next_sentence_coefficient >= 0:
            raise InputError(
                "objective.next_sentence_coefficient must be at least 0, got "
                f"{self.next_sentence_coefficient}; give 0 for no such loss"
            )


ObjectiveConfig = LanguageModel | MaskedLM
