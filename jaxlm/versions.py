"""Versions of the packages that decide what a program computes, and in which last bits."""

import importlib.metadata
import sys
from collections.abc import Iterable, Mapping

RECORDED = ("jaxlm", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
"""Packages whose versions a run records at each start, besides those of COMPILERS."""

PLATFORM_COMPILERS = {"cpu": (), "tpu": ("libtpu",), "gpu": ("jax-cuda12-plugin", "jax-cuda13-plugin")}
"""Packages that compile programs for a platform, besides jax and jaxlib."""

COMPILERS = ("jax", "jaxlib", *(package for packages in PLATFORM_COMPILERS.values() for package in packages))
"""Packages that compile programs: with other versions of them the last bits of a result may differ."""


def installed(packages: Iterable[str]) -> dict[str, str]:
    """Return the version of each of the packages that is installed."""
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def compilers(platform: str) -> dict[str, str]:
    """Return the versions of what compiles programs for a platform: `cpu`, `gpu` or `tpu`."""
    return installed(("jax", "jaxlib", *PLATFORM_COMPILERS[platform]))


def in_words(versions: Mapping[str, str]) -> str:
    """Return `jax 0.11.2, jaxlib 0.11.2`."""
    return ", ".join(f"{package} {version}" for package, version in versions.items())


def recorded() -> dict[str, str]:
    """Return the versions that a run records at a start: of Python, RECORDED and COMPILERS."""
    return {"python": ".".join(map(str, sys.version_info[:3]))} | installed(dict.fromkeys((*RECORDED, *COMPILERS)))


def compiler_changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return `package before -> now` for each of COMPILERS that both have in different versions."""
    both = [name for name in COMPILERS if name in before and name in now]
    return [f"{name} {before[name]} -> {now[name]}" for name in both if before[name] != now[name]]
