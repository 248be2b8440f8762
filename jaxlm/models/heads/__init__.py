"""Heads of tasks, one file for each form: `head.py` has what they share.

To add a head, write its file, with a function `make`, and describe it in `HEADS`. This package does not import JAX.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jaxlm.errors import InputError
from jaxlm.wording import either

if TYPE_CHECKING:
    from jaxlm.models.heads.head import Head


@dataclass(frozen=True)
class HeadForm:
    """What a config and a task must be to have a head.

    roles: the roles of the families that it reads; empty: all. kinds: the kinds of tasks; empty: all that have a head.
    fields: the fields of a config that only this head has, with the values that they have without it. without: the
    fields of a config that it does not have, with their values.
    """

    roles: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict, hash=False)
    without: Mapping[str, Any] = field(default_factory=dict, hash=False)


HEADS = {
    "linear": HeadForm(),
    "bilstm": HeadForm(roles=("encoder",), fields={"features": "last"}),
    "concat_pooling": HeadForm(roles=("decoder",)),
    "crf": HeadForm(roles=("encoder",), kinds=("tagging",), without={"label_smoothing": 0.0, "class_weights": ()}),
}


def heads_for(role: str) -> list[str]:
    """Return the names of the heads on families of a role."""
    return [name for name, form in HEADS.items() if not form.roles or role in form.roles]


def make_head(task: Any, config: Any, *, pooled: bool) -> "Head":
    """Return the head of a task (`jaxlm.tasks.Task`) in a run (`FinetuneConfig`). JAX is imported here.

    pooled: True if a model is read at the pooled first token of a sequence (BERT), not at its last token (GPT-1).
    Raises InputError for a kind of task without such a head.
    """
    kinds = HEADS[config.head].kinds
    if kinds and task.kind not in kinds:
        raise InputError(f"head must be linear for a {task.kind} task, got {config.head}; it is for {either(kinds)}")
    found: Head = importlib.import_module(f"jaxlm.models.heads.{config.head}").make(task, config, pooled=pooled)
    return found
