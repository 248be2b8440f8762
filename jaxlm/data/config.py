"""What a run reads: the stores, how they are mixed, and how their text is laid out in rows."""

from dataclasses import dataclass
from typing import Literal

from jaxlm.errors import InputError


@dataclass(frozen=True)
class DataConfig:
    """Token stores to train on and to be held against."""

    store: tuple[str, ...] = ()
    """Token stores to train on, made by jaxlm.prepare."""
    validation: tuple[str, ...] = ()
    """Token stores to evaluate on; every token is predicted once."""
    weights: tuple[float, ...] = ()
    """Shares of the training stores in the mixture, one a store; without them the weights given at preparation, or
    the numbers of tokens."""
    layout: Literal["windows", "packed"] = "windows"
    """windows: each row a stretch of the text as it stands, across documents. packed: whole documents (cut where they
    are longer) packed into rows, none seeing another."""

    def check(self) -> None:
        """Refuse weights that do not fit the stores."""
        if self.weights and len(self.weights) != len(self.store):
            raise InputError(
                f"data.weights has {len(self.weights)} values, data.store {len(self.store)}: give one a store"
            )
        for weight in self.weights:
            if not 0 < weight < float("inf"):
                raise InputError(
                    f"data.weights holds {weight}; a weight is a number above 0 (leave the store out instead)"
                )
