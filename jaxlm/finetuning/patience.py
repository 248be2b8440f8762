"""Early end of a trial: the evaluations since the best one, which its checkpoints hold."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxlm.tasks import Task
from jaxlm.wording import counted


@dataclasses.dataclass
class Patience:
    """The evaluations of a trial since its best one.

    best: the best value of the selecting metric, None before the first evaluation. waited: evaluations since then.
    stopped_at: the step at which training ended early, None if it has not.
    """

    best: float | None = None
    waited: int = 0
    stopped_at: int | None = None

    def evaluated(self, task: Task, limit: int, step: int, metrics: Mapping[str, float]) -> None:
        """Count an evaluation; training ends at the `limit`-th in a row without a better value."""
        value = metrics[task.metric]
        if self.best is None or task.is_better(value, self.best):
            self.best, self.waited = value, 0
            return
        self.waited += 1
        if self.waited >= limit:
            self.stopped_at = step

    def note(self, task: Task) -> str:
        """Return a line about the end of training."""
        return (
            f"step {self.stopped_at}: training ends early, after {counted(self.waited, 'evaluation')} without a "
            f"{task.selects} {task.metric} better than {self.best:.4f}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values, for a checkpoint."""
        return dataclasses.asdict(self)
