"""The map holds: imports go downward, each library has one owner, files stay small and are named after what they hold.

Read from the sources with `ast`, imports inside functions included; nothing is imported.
"""

import ast
import configparser
import functools
import graphlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 500
MAX_LINES_OF_FUNCTION = 60
# Longer ones: functions of the Python interface, whose docstrings are long, and functions that hold others.
LONG_FUNCTIONS = {"prepare_store", "run_pretraining", "run_finetuning", "_train", "plan"}
LONG_FUNCTIONS |= {"make_train_step", "train_step"}

# The packages from the ground up. A module imports from its own package or from those before it.
FLOORS = (
    "leaves",
    "jaxlm.distributed",
    "jaxlm.reading",
    "jaxlm.text",
    "jaxlm.data",
    "jaxlm.tasks",
    "jaxlm.nn",
    "jaxlm.models",
    "jaxlm.objectives",
    "jaxlm.compiler",
    "jaxlm.runs",
    "jaxlm.interop",
    "jaxlm.training",
    "jaxlm.inference",
    "jaxlm.zero_shot",
    "jaxlm.finetuning",
    "jaxlm.evaluation",
    "jaxlm.views",
    "jaxlm.views.report",
    "api",
    "commands",
    "console script",
)
LEAVES = {
    "errors",
    "version",
    "config",
    "flags",
    "wording",
    "files",
    "host",
    "progress",
    "hub",
    "cuda",
    "completion",
    "ranges",
    "storage",
}
LEAVES |= {"nvidia"}
COMMANDS = {"prepare", "pretrain", "finetune", "predict", "evaluate", "generate", "show", "convert", "aot", "bench"}
COMMANDS |= {"doctor", "report"}

# Rooms that know nothing of their neighbours on the same floor or of some below.
STRANGERS = {
    "jaxlm.reading": ["jaxlm.distributed", "jax", "flax"],
    "jaxlm.text": ["jax", "flax"],
    "jaxlm.nn": ["jaxlm.text", "jaxlm.data", "jaxlm.tasks"],
    "jaxlm.models": ["jaxlm.text", "jaxlm.tasks"],
    "jaxlm.data": ["jaxlm.distributed", "jax"],
    "jaxlm.tasks": ["jaxlm.distributed", "jax", "flax"],
}
# A library and the rooms that may import it.
OWNERS = {
    "orbax": ["jaxlm.runs"],
    "sentencepiece": ["jaxlm.text"],
    "sentencex": ["jaxlm.data.sentences"],
    "tokenizers": ["jaxlm.text"],
    "spacy": ["jaxlm.text"],
    "ftfy": ["jaxlm.text"],
    "tensorflow": ["jaxlm.data.sources"],
    "tensorflow_datasets": ["jaxlm.data.sources"],
    "grain": ["jaxlm.data"],
    "ray": ["jaxlm.data.ray_engine"],
    "jax.experimental.pallas": ["jaxlm.nn.flash_kernel"],
    "pyarrow": ["jaxlm.reading.columns"],
    "symusic": ["jaxlm.reading.midi"],
    "h5py": ["jaxlm.interop.elmo"],
    "mido": [],
    "markdown_it": ["jaxlm.views.report"],
    "sacrebleu": ["jaxlm.tasks.metrics.generated"],
    "rouge_score": ["jaxlm.tasks.metrics.generated"],
    "tensorboardX": ["jaxlm.runs.metrics_log"],
    "etils": ["jaxlm.runs.checkpoints", "jaxlm.runs.remote", "jaxlm.runs.directory"],
    "fsspec": ["jaxlm.storage"],
    "gcsfs": [],
    "s3fs": [],
    "transformers": ["jaxlm.interop"],
    "huggingface_hub": ["jaxlm.hub"],
    "wandb": ["jaxlm.runs.trackers"],
    "mlflow": ["jaxlm.runs.trackers"],
    "trackio": ["jaxlm.runs.trackers"],
    "torch": ["jaxlm.interop"],
    "lm_eval": ["jaxlm.evaluation"],
    "pickle": [],
    "cloudpickle": [],
    "dill": [],
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted((ROOT / "jaxlm").rglob("*.py"))}


def within(name: str, room: str) -> bool:
    return name == room or name.startswith(room + ".")


def imports_of(source: str, module: str) -> list[tuple[str, int, bool]]:
    """Absolute names that a module imports, with the line, and whether it happens when the module is imported."""
    tree = ast.parse(source)
    lazy = {
        id(inner)
        for outer in ast.walk(tree)
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef)
        or (isinstance(outer, ast.If) and isinstance(outer.test, ast.Name) and outer.test.id == "TYPE_CHECKING")
        for inner in ast.walk(outer)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno, id(node) not in lazy) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} line {node.lineno}: a relative import; write the whole name"
            for alias in node.names:
                # `from jaxlm.data import rows` imports a module, `from jaxlm.data.batch import Batch` a name of one.
                whole = f"{node.module}.{alias.name}"
                found.append((whole if whole in FILES else str(node.module), node.lineno, id(node) not in lazy))
    return found


@functools.cache
def imports() -> dict[str, list[tuple[str, int, bool]]]:
    """The imports of each module, read when the first test asks: every worker collects this file."""
    return {module: imports_of(path.read_text(encoding="utf-8"), module) for module, path in FILES.items()}


def floor(module: str) -> int | None:
    """Return the index of a module's floor; None where the map does not know it."""
    parts = module.split(".")
    if parts == ["jaxlm"]:
        return FLOORS.index("api")
    if parts == ["jaxlm", "__main__"]:
        return FLOORS.index("console script")
    if len(parts) == 2 and parts[1] in LEAVES:
        return FLOORS.index("leaves")
    if len(parts) == 2 and parts[1] in COMMANDS:
        return FLOORS.index("commands")
    rooms = [".".join(parts[:depth]) for depth in (3, 2)]  # a package within a package may have a floor of its own
    return next((FLOORS.index(room) for room in rooms if room in FLOORS), None)


def test_every_module_has_a_floor():
    strays = [module for module in FILES if floor(module) is None]
    assert not strays, f"packages without a floor in the map of tests/test_layers.py: {strays}"


def test_imports_go_downward():
    wrong = [
        f"{module} line {line}: imports {name}, from floor {floor(module)} up to {floor(name)}"
        for module, found in imports().items()
        for name, line, _ in found
        if within(name, "jaxlm") and name in FILES and (floor(name) or 0) > (floor(module) or 0)
    ]
    assert not wrong, "\n".join(wrong)


def test_imports_exist():
    """A name that starts with jaxlm is a module of ours (a forgotten rename would fail only when that line runs)."""
    wrong = [
        f"{module} line {line}: there is no {name}"
        for module, found in imports().items()
        for name, line, _ in found
        if within(name, "jaxlm") and name not in FILES
    ]
    assert not wrong, "\n".join(wrong)


def test_no_cycles_at_import():
    graph = {
        module: {name for name, _, at_import in found if at_import and name in FILES and name != module}
        for module, found in imports().items()
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the modules of the cycle
    assert len(graph) == len(FILES)


def test_nobody_imports_a_command():
    commands = {f"jaxlm.{name}" for name in COMMANDS}
    wrong = [
        f"{module} line {line}: imports the command {name}"
        for module, found in imports().items()
        for name, line, _ in found
        if name in commands
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("room", STRANGERS)
def test_rooms_know_no_strangers(room):
    wrong = [
        f"{module} line {line}: {room} must not know {stranger}"
        for module, found in imports().items()
        if within(module, room)
        for name, line, _ in found
        for stranger in STRANGERS[room]
        if within(name, stranger)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("library", OWNERS)
def test_libraries_have_one_owner(library):
    wrong = [
        f"{module} line {line}: imports {name}, which belongs to {OWNERS[library] or 'nobody'}"
        for module, found in imports().items()
        for name, line, _ in found
        if within(name, library) and not any(within(module, owner) for owner in OWNERS[library])
    ]
    assert not wrong, "\n".join(wrong)


def test_files_are_small_and_named_for_what_they_hold():
    python = [path for top in ("jaxlm", "configs", "launch", "tests") for path in sorted((ROOT / top).rglob("*.py"))]
    assert len(python) > 10
    long = {str(path.relative_to(ROOT)): n for path in python if (n := len(path.read_bytes().splitlines())) > MAX_LINES}
    assert not long, f"over {MAX_LINES} lines: {long}"
    vague = [path.name for path in python if path.stem.strip("_") in {"utils", "util", "common", "helpers", "misc"}]
    assert not vague


def test_functions_are_short():
    """A longer function needs a name in LONG_FUNCTIONS, which no function should join."""
    long = {
        f"{module}.{node.name}": length
        for module, path in FILES.items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and (length := node.end_lineno - node.lineno + 1) > MAX_LINES_OF_FUNCTION  # type: ignore[operator]
    }
    wrong = {name: length for name, length in long.items() if name.rpartition(".")[2] not in LONG_FUNCTIONS}
    assert not wrong, f"over {MAX_LINES_OF_FUNCTION} lines: {wrong}"


def test_modules_say_what_they_are():
    silent = [
        module for module, path in FILES.items() if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not silent, f"no docstring: {silent}"


def test_setup_cfg_lists_every_package():
    """A package that setup.cfg forgets is missing from the wheel alone, where no checkout's test would see it."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    packages = {module for module, path in FILES.items() if path.name == "__init__.py"} | {"jaxlm.configs"}
    folders = {module_name(path.parent / "__init__.py") for path in FILES.values()} | {"jaxlm.configs"}
    assert packages == folders, f"no __init__.py in {sorted(folders - packages)}"
    assert set(setup["options"]["packages"].split()) == packages


def test_map_catches_what_it_should():
    """The reader of imports sees lazy ones, modules behind `from`, and relative ones."""
    lazy = "def f():\n    import orbax.checkpoint\nif TYPE_CHECKING:\n    import jax\n"
    source = "import a.b\nfrom jaxlm.data import config\nfrom jaxlm.data.batch import Batch\n" + lazy
    assert imports_of(source, "x") == [
        ("a.b", 1, True),
        ("jaxlm.data.config", 2, True),
        ("jaxlm.data.batch", 3, True),
        ("orbax.checkpoint", 5, False),
        ("jax", 7, False),
    ]
    with pytest.raises(AssertionError, match="relative"):
        imports_of("from . import y\n", "x")
    assert floor("jaxlm.errors") == 0 and floor("jaxlm") == FLOORS.index("api")
    assert floor("jaxlm") < floor("jaxlm.bench") < floor("jaxlm.__main__") == len(FLOORS) - 1
    assert floor("jaxlm.runs") < floor("jaxlm.training.loop") < floor("jaxlm.inference.decoding")
    assert floor("jaxlm.views.run") < floor("jaxlm.views.report.page") < floor("jaxlm.report")
    assert floor("jaxlm.unheard_of.thing") is None and floor("jaxlm.unheard_of") is None
