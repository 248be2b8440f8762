"""JAX's plugin for NVIDIA GPUs, before JAX is imported: options that it needs, and no messages where there is no GPU.

The plugin also contains XLA's GPU compiler, which `jaxlm.aot` uses on machines without a GPU. There JAX prints a
traceback when it starts its devices, and the plugin's libraries print lines when they are loaded. This module does not
import JAX.
"""

import contextlib
import importlib.util
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path

PLUGINS = ("cuda12", "cuda13")
# NVIDIA's driver, the driver of WSL2, and the GPUs of NVIDIA's boards.
_DEVICES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/nvhost-gpu", "/dev/nvgpu")
_EXTRA = "--xla_backend_extra_options="
# jaxlib 0.10 compiles the addition of float32 in embeddings' gradients, on GPUs before Hopper, to a loop of
# compare-and-swap, which others measured 450 to 2,000 times slower than the addition that this option restores
# (openxla/xla 46225, jax 38806).
NATIVE_ADDITION = "-nvptx-allow-ftz-atomics"


def installed() -> list[str]:
    """Return those of PLUGINS that are installed."""
    return [name for name in PLUGINS if is_installed(f"jax_{name}_plugin")]


def has_gpu() -> bool:
    """Return True if the driver of an NVIDIA GPU is present on this machine."""
    return any(Path(path).exists() for path in _DEVICES)


def prepare() -> None:
    """Set XLA_FLAGS for the plugins that are installed, and hide them on machines without a GPU.

    It has no effect once JAX is imported.
    """
    found = installed() if "jax" not in sys.modules else []
    if not found:
        return
    os.environ["XLA_FLAGS"] = with_native_addition(os.environ.get("XLA_FLAGS", ""))
    if not has_gpu():
        for name in found:
            sys.modules[f"jax_{name}_plugin"] = None  # type: ignore[assignment]  # an import finds no such module
            hidden = types.ModuleType(f"jax_plugins.xla_{name}")
            hidden.initialize = lambda: None  # type: ignore[attr-defined]  # JAX calls it to register the devices
            sys.modules[hidden.__name__] = hidden


def with_native_addition(flags: str) -> str:
    """Return XLA_FLAGS with NATIVE_ADDITION among the extra options of the backend."""
    if NATIVE_ADDITION in flags:
        return flags
    words = flags.split()
    for number, word in enumerate(words):
        if word.startswith(_EXTRA):
            given = word.removeprefix(_EXTRA)
            words[number] = f"{_EXTRA}{given},{NATIVE_ADDITION}" if given else f"{_EXTRA}{NATIVE_ADDITION}"
            return " ".join(words)
    return " ".join([*words, f"{_EXTRA}{NATIVE_ADDITION}"])


def show() -> None:
    """Undo `prepare`'s hiding, for a program that compiles for GPUs. Call it before JAX is imported.

    XLA then reports errors alone: for a step that does not fit it would warn of that once more.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    for name in installed():
        for module in (f"jax_{name}_plugin", f"jax_plugins.xla_{name}"):
            sys.modules.pop(module, None)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Discard what libraries write to the process's standard error: the plugin's lines on a missing driver."""
    sys.stderr.flush()
    kept = os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)


def is_installed(module: str) -> bool:
    """Return True if a module is installed, also if `prepare` has hidden it."""
    if sys.modules.get(module, False) is None:
        return True
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
