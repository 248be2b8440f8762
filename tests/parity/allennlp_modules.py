"""Modules of AllenNLP 0.9.0 in PyTorch, executed as they are; nothing of jaxlm.

`ALLENNLP` is a directory with the sources, allenai/allennlp at v0.9.0. What the modules import besides PyTorch and
NumPy is replaced by the caller, as it reads files and data sets.
"""

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any


def executed(names: Sequence[str], stubs: Mapping[str, Mapping[str, Any]]) -> dict[str, ModuleType]:
    """Return modules by the last part of their names.

    names: below allennlp, each after those that it imports. stubs: the members of modules that are replaced.
    """
    root = Path(os.environ["ALLENNLP"])
    replaced = {"overrides": {"overrides": lambda method: method}} | dict(stubs)
    packages = {name.rpartition(".")[0] for name in (*replaced, *(f"allennlp.{name}" for name in names))} - {""}
    packages |= {name.rpartition(".")[0] for name in packages} - {""}
    for name in packages:
        sys.modules[name] = ModuleType(name)
    for name, members in replaced.items():
        module = sys.modules.setdefault(name, ModuleType(name))
        vars(module).update(members)
    found = {}
    for name in names:
        spec = importlib.util.spec_from_file_location(
            f"allennlp.{name}", root / "allennlp" / f"{name.replace('.', '/')}.py"
        )
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[f"allennlp.{name}"] = module
        package, _, last = f"allennlp.{name}".rpartition(".")
        setattr(sys.modules[package], last, module)
        spec.loader.exec_module(module)
        found[last] = module
    return found
