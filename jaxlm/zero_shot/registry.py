"""All zero-shot tasks by name."""

from collections.abc import Sequence

from jaxlm.errors import InputError
from jaxlm.wording import did_you_mean
from jaxlm.zero_shot.continuations import CONTINUATIONS, LAMBADA
from jaxlm.zero_shot.minimal_pairs import BLIMP
from jaxlm.zero_shot.prompted import PROMPTED
from jaxlm.zero_shot.pronouns import DPR, WSC273
from jaxlm.zero_shot.running_text import RUNNING_TEXTS
from jaxlm.zero_shot.task import ZeroShotTask

ZERO_SHOT_TASKS: dict[str, ZeroShotTask] = {
    task.name: task for task in (*CONTINUATIONS, DPR, WSC273, LAMBADA, BLIMP, *RUNNING_TEXTS, *PROMPTED)
}


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
