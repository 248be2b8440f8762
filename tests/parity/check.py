"""The frozen numbers of the references, tests/golden/NAME_parity.npz: written, read, and compared with new ones."""

import functools
from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
WHY = "needs PyTorch, the extra [parity]; the frozen twin in tests/golden runs without"
Groups = dict[str, dict[str, np.ndarray]]


def file_of(name: str) -> Path:
    """Return the file of a family's frozen numbers."""
    return GOLDEN / f"{name}_parity.npz"


def freeze(name: str, groups: Groups) -> None:
    """Write the file: integers as they are, all other numbers, which are made in float64, as float32."""
    arrays = {
        f"{group}/{key}": np.asarray(value) for group, members in groups.items() for key, value in members.items()
    }
    floating = {key: np.float32(value) for key, value in arrays.items() if value.dtype.kind == "f"}
    np.savez_compressed(file_of(name), **arrays | floating)


@functools.cache
def frozen(name: str) -> Groups:
    """Return the groups of named arrays in the file; a group's name is the first part of an array's."""
    groups: Groups = {}
    with np.load(file_of(name), allow_pickle=False) as file:
        for key in file.files:
            group, member = key.split("/", 1)
            groups.setdefault(group, {})[member] = file[key]
    return groups


def assert_frozen(name: str, found: Groups) -> None:
    """Raise AssertionError if the statement in tests/parity was changed and the file was not written again."""
    for group, members in found.items():
        for key, value in members.items():
            np.testing.assert_allclose(frozen(name)[group][key], value, rtol=1e-6, atol=1e-6, err_msg=f"{group}/{key}")
