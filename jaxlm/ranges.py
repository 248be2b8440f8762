"""Ranges of numbers: parts of the types of fields, `Annotated[float, Range(0, below=1)]`, checked in one place.

A number is checked when a command line, a call in Python or a config file has given it, before JAX is imported.
"""

import dataclasses
import functools
import math
import numbers
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from jaxlm.errors import InputError
from jaxlm.flags import name_of_flag

_Checked = TypeVar("_Checked")


@dataclass(frozen=True)
class Range:
    """Numbers from `least` to `most`, and, where these are given, above `above` and below `below`.

    fix: the end of the message about a number outside. Default: to give a larger or a smaller one.
    """

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    fix: str | None = None

    def check(self, name: str, value: Any) -> None:
        """Raise InputError for a number outside of the range, and for one that is not finite. name: of the field."""
        if not math.isfinite(value):
            raise InputError(f"{name} must be finite, got {value}; give a finite number")
        low = (self.least is not None and value < self.least) or (self.above is not None and value <= self.above)
        high = (self.most is not None and value > self.most) or (self.below is not None and value >= self.below)
        if low or high:
            fix = self.fix or ("give a larger one" if low else "give a smaller one")
            raise InputError(f"{name} must be {self}, got {value}; {fix}")

    def __str__(self) -> str:
        """The rule of messages: at least 1, from 0 to 1, above 0 and below 1."""
        bounds = {"at least": self.least, "above": self.above, "at most": self.most, "below": self.below}
        if None not in (self.least, self.most):
            bounds |= {"from": self.least, "to": self.most, "at least": None, "at most": None}
        shown = [(word, bound) for word, bound in bounds.items() if bound is not None]
        joint = " " if "from" in dict(shown) else " and "
        return joint.join(f"{word} {bound if isinstance(bound, int) else f'{bound:g}'}" for word, bound in shown)


Count = Annotated[int, Range(1)]
Natural = Annotated[int, Range(0)]
NotNegative = Annotated[float, Range(0)]
Positive = Annotated[float, Range(above=0)]
Fraction = Annotated[float, Range(0, 1)]
BelowOne = Annotated[float, Range(0, below=1)]
SEEDS = Range(0, 2**32 - 1)  # keys are made from 32 bits
Seed = Annotated[int, SEEDS]


def checked(config: _Checked, where: str = "") -> _Checked:
    """Return a dataclass whose numbers, with those of its parts, are finite and in their ranges; else InputError.

    where: the name of the dataclass in messages; "": its fields are named alone.
    """
    kind: Any = type(config)
    for name, hint in typed_fields(kind):
        value, part = getattr(config, name), name_of_flag(name, hint)
        full = ".".join(filter(None, (where, part)))
        if dataclasses.is_dataclass(value):
            checked(value, full)
            continue
        for number in value if isinstance(value, tuple | list) else (value,):
            if isinstance(number, numbers.Real) and not isinstance(number, bool):
                for limits in (Range(), *ranges_of(hint)):
                    limits.check(full, number)
    return config


@functools.cache
def typed_fields(kind: type) -> tuple[tuple[str, Any], ...]:
    """Return the names of the fields of a dataclass, in order, each with its type."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return tuple((field.name, hints[field.name]) for field in dataclasses.fields(kind))


def ranges_of(hint: Any) -> Iterator[Range]:
    """Yield the ranges in a type: its own, those of the members of a union, and those of the items of a tuple."""
    yield from (mark for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, Range))
    for part in typing.get_args(hint):
        yield from ranges_of(part)
