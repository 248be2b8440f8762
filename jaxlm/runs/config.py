"""Choices of a run that command lines offer. This module does not import JAX."""

from typing import Literal

TrackerKind = Literal["wandb", "mlflow", "trackio"]
