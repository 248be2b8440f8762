"""The kinds of tasks, one class each, by the names that `--custom.kind` and task.json give them."""

from jaxlm.tasks.kinds.generation import Generation
from jaxlm.tasks.kinds.spans import Spans
from jaxlm.tasks.kinds.tags import Tagging
from jaxlm.tasks.kinds.texts import Choice, Classification, LabelSets, Regression
from jaxlm.tasks.task import Task

KINDS: dict[str, type[Task]] = {
    "classification": Classification,
    "multilabel": LabelSets,
    "regression": Regression,
    "choice": Choice,
    "span": Spans,
    "tagging": Tagging,
    "text": Generation,
}
