"""CODAH (Chen et al. 2019): four-way sentence completion, a separate data set in the format of SWAG.

The files have no header: category (empty in ten rows, and not used), prompt, four endings, and the index of the correct
one from 0. Quotes are plain characters.
"""

from jaxlm.tasks.builtin import PAPERS, BuiltIn
from jaxlm.tasks.task import Columns, Task

_ENDINGS = ("ending0", "ending1", "ending2", "ending3")

CODAH = BuiltIn(
    Task(
        name="codah",
        kind="choice",
        form="choice",
        metric="accuracy",
        metrics=("accuracy",),
        labels=("0", "1", "2", "3"),
        columns=Columns(
            texts=(("prompt", "context", "sentence"),),
            choices=tuple((name, f"choice{number}") for number, name in enumerate(_ENDINGS)),
            choice_list=("choices", "endings"),
            label=("label",),
        ),
        headerless=("category", "prompt", *_ENDINGS, "label"),
        papers=PAPERS,
        num_choices=4,
    ),
    {"train": ("train.tsv",), "dev": ("dev.tsv",), "test": ("test.tsv",)},
)
