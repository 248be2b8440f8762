"""Tasks without fine-tuning, by name: how well a language model predicts the texts of a task.

A task is a function from a model and a file to measured values (`task.py`). The other modules hold the tasks, grouped
by what they do: `comparisons.py` compares texts, `running_text.py` scores whole ones, and `prompted.py` generates
answers. Radford et al., 2018 (section 5) and 2019 (section 3).
"""

from collections.abc import Sequence

from jaxlm.errors import InputError
from jaxlm.wording import did_you_mean
from jaxlm.zero_shot.comparisons import COMPARISONS
from jaxlm.zero_shot.prompted import PROMPTED
from jaxlm.zero_shot.running_text import RUNNING_TEXTS
from jaxlm.zero_shot.task import ZeroShotTask

ZERO_SHOT_TASKS: dict[str, ZeroShotTask] = {task.name: task for task in (*COMPARISONS, *RUNNING_TEXTS, *PROMPTED)}


def parse_tasks(specs: Sequence[str], flag: str = "--task") -> list[tuple[ZeroShotTask, str]]:
    """Return the task and the path of each NAME:PATH. InputError for another form or an unknown name."""
    found = []
    for spec in specs:
        name, colon, path = spec.partition(":")
        if not colon or not path:
            raise InputError(f"{flag} must be NAME:PATH, got {spec!r}; write for example lambada:lambada_test.jsonl")
        if name not in ZERO_SHOT_TASKS:
            hint = did_you_mean(name, ZERO_SHOT_TASKS, "give one of them")
            raise InputError(f"{flag} must name one of {', '.join(ZERO_SHOT_TASKS)}, got {name!r}; {hint}")
        found.append((ZERO_SHOT_TASKS[name], path))
    return found
