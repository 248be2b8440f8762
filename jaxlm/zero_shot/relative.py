"""Relative performance of zero-shot tasks: 0 at chance, 1 at a ceiling.

GPT-1's figure 2, right, normalizes the score of a task between a random guess and the best earlier result of a single
model (Radford et al., 2018, section 5). It prints neither; the ceilings here are those of the sources that are named.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxlm.errors import InputError


@dataclass(frozen=True)
class Scale:
    """The metric of a task that a curve shows, its value by chance, its ceiling, and the source of the ceiling. None:
    no ceiling is known."""

    protocol: str
    metric: str
    chance: float
    ceiling: float | None
    source: str


_GPT1 = "best earlier result in GPT-1's tables"
_GPT2 = "best earlier result in GPT-2's table 3"
SCALES: Mapping[str, Scale] = {
    "cola": Scale("paper", "matthews", 0.0, 0.350, f"{_GPT1} 4"),
    "sst2": Scale("paper", "accuracy", 0.5, 0.932, f"{_GPT1} 4"),
    "race": Scale("paper", "accuracy", 0.25, 0.533, f"{_GPT1} 3, an ensemble of nine models"),
    "dpr": Scale("paper", "accuracy_partial", 0.5, 0.764, "Peng, Khashabi and Roth, 2015"),
    "lambada": Scale("paper", "accuracy", 0.0, 0.5923, _GPT2),
    "cbt": Scale("paper", "accuracy", 0.1, 0.857, f"{_GPT2}, common nouns"),
    "wsc273": Scale("paper", "accuracy_partial", 0.5, None, ""),
    "blimp": Scale("paper", "accuracy_sum", 0.5, 0.964, "agreement of people by majority, Warstadt et al., 2020"),
    "codah": Scale("paper", "accuracy", 0.25, None, ""),
    "swag": Scale("paper", "accuracy", 0.25, None, ""),
    "story_cloze": Scale("paper", "accuracy", 0.5, None, ""),
}


def scales(ceilings: Sequence[str]) -> dict[str, Scale]:
    """Return the scales with other ceilings, each TASK=VALUE. InputError for an unknown task or a bad value."""
    found = dict(SCALES)
    for text in ceilings:
        name, _, value = text.partition("=")
        if name not in found:
            raise InputError(f"--ceiling must be TASK=VALUE with one of {', '.join(found)}, got {text!r}; write that")
        try:
            ceiling = float(value)
        except ValueError:
            raise InputError(f"--ceiling must be TASK=VALUE with a number, got {text!r}; write {name}=0.9") from None
        scale = found[name]
        if not ceiling > scale.chance:
            raise InputError(
                f"--ceiling of {name} must be above chance, {scale.chance:g}, got {value}; give a larger one"
            )
        found[name] = Scale(scale.protocol, scale.metric, scale.chance, ceiling, "given")
    return found


def relative(scale: Scale, value: float) -> float:
    """Return a value as a fraction of the way from chance to the ceiling."""
    assert scale.ceiling is not None
    return (value - scale.chance) / (scale.ceiling - scale.chance)
