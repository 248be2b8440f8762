"""The files of a published model: JSON, tensors in safetensors files, and a fingerprint.

Tensors are in one file or in several with an index, and are read and written one at a time.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxlm.errors import InputError
from jaxlm.files import atomic_file, open_regular, parse_json, read_regular

DEEPEST = 100  # maximum nesting; Python's JSON writer, which stores a config.json with the run, supports some hundreds
FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# safetensors' names of the types in which parameters are read and written.
FLOATS = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_NAMES = {dtype: name for name, dtype in FLOATS.items()}


def read_json(file: Path) -> Any:
    """Return the values of a JSON file. InputError, one line, if it is missing or damaged."""
    try:
        return parse_json(read_regular(file))
    except FileNotFoundError:
        raise InputError(f"{file.parent} has no {file.name}; give the directory of a whole published model") from None
    except OSError as error:
        raise InputError(f"{file} cannot be read ({error.strerror}); download it again") from error
    except ValueError as error:
        raise InputError(f"{file} is not JSON ({error}); download it again") from error


def read_object(file: Path) -> dict[str, Any]:
    """Return `read_json` of a file that must hold an object with finite numbers and limited nesting."""
    values = read_json(file)
    if not isinstance(values, dict):
        raise InputError(f"{file} is not a JSON object; download it again")
    inside: list[tuple[str, int, Any]] = [("", 0, values)]
    while inside:
        name, depth, value = inside.pop()
        if depth > DEEPEST:
            raise InputError(f"{file} is not JSON (it is nested too deeply); download it again")
        if isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"{file}: {name} must be a finite number, got {value}; download it again")
        if isinstance(value, dict | list):
            named = value.items() if isinstance(value, dict) else ((name, item) for item in value)
            inside += [(key, depth + 1, item) for key, item in named]
    return values


def files_fingerprint(files: Iterable[Path]) -> str:
    """Return the SHA-256 over the contents of files, in their order."""
    digest = hashlib.sha256()
    for file in files:
        with open_regular(file) as stream:
            while block := stream.read(1 << 24):
                digest.update(block)
    return digest.hexdigest()


@dataclass(frozen=True)
class Info:
    """A tensor as a file's header describes it. dtype: safetensors' name for it, for example F32."""

    shape: tuple[int, ...]
    dtype: str
    file: Path


class TensorFiles:
    """The tensors of a directory, by name; each is read on request.

    Raises InputError, one line, if there are none, if a file is damaged or missing, and for pickles, which are programs
    and never loaded.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        single, index = directory / FILE, directory / INDEX
        if single.is_file():
            self.files = [single]
        elif index.is_file():
            self.files = [directory / name for name in sorted(set(_weight_map(index).values()))]
        elif pickles := sorted(directory.glob("pytorch_model*.bin")):
            raise InputError(
                f"{pickles[0]} is a pickle, a program that runs when it is loaded: convert it to safetensors where "
                f'you trust it, with python -c "from transformers import AutoModel; '
                f"AutoModel.from_pretrained('{directory}').save_pretrained('{directory}-safe')\""
            )
        else:
            raise InputError(f"{directory} has no {FILE} (or {INDEX}); give the directory of a model")
        self.infos: dict[str, Info] = {}
        for file in self.files:
            for name, info in self._headers(file).items():
                if name in self.infos:
                    raise InputError(f"{file}: tensor {name} is also in {self.infos[name].file.name}")
                self.infos[name] = info
        if index.is_file() and not single.is_file():
            missing = sorted(set(_weight_map(index)) - set(self.infos))
            if missing:
                raise InputError(f"{index} names {missing[0]}, which is in none of its files; download them again")

    def read(self, name: str) -> np.ndarray:
        """Return a tensor in the file's own type."""
        from safetensors import SafetensorError, safe_open

        file = self.infos[name].file
        try:
            with safe_open(file, framework="numpy") as opened:  # reopened, or the whole file would stay in memory
                return opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise InputError(f"{file}: tensor {name} is not readable ({error}); download the file again") from error

    def _headers(self, file: Path) -> dict[str, Info]:
        from safetensors import SafetensorError, safe_open

        try:
            open_regular(file).close()
            with safe_open(file, framework="numpy") as opened:
                slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (it is no dictionary)
                return {name: Info(tuple(part.get_shape()), part.get_dtype(), file) for name, part in slices.items()}
        except FileNotFoundError:
            raise InputError(f"{file} is missing, though {INDEX} names it; download it again") from None
        except (SafetensorError, OSError, ValueError) as error:
            raise InputError(f"{file} is damaged or not a safetensors file ({error}); download it again") from error


@dataclass(frozen=True)
class Planned:
    """A tensor to write: its name and shape, and a function that returns its values."""

    name: str
    shape: tuple[int, ...]
    values: Callable[[], np.ndarray]


def write_tensors(path: Path, tensors: Iterable[Planned], dtype: np.dtype) -> None:
    """Write one safetensors file, with one tensor at a time in memory; it is written completely or not at all.

    (The library's own writer takes all tensors at once: a second copy of a model whose layout differs.)
    """
    ordered = sorted(tensors, key=lambda planned: planned.name)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for planned in ordered:
        size = int(np.prod(planned.shape, dtype=np.int64)) * dtype.itemsize
        offsets = [end, end + size]
        header[planned.name] = {"dtype": _NAMES[dtype], "shape": list(planned.shape), "data_offsets": offsets}
        end += size
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with atomic_file(path, "wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for planned in ordered:
            values = planned.values()
            if values.shape != planned.shape:
                raise ValueError(f"{planned.name} must have the planned shape {planned.shape}, got {values.shape}")
            file.write(np.ascontiguousarray(values.astype(dtype, copy=False)).tobytes())


def _weight_map(index: Path) -> dict[str, str]:
    try:
        names = parse_json(read_regular(index))["weight_map"]
        if not names or not all(map(_is_file_name, names.values())):
            raise ValueError("weight_map must give each tensor the name of a file next to it")
        return names
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{index} is damaged ({type(error).__name__}: {error}); download it again") from error


def _is_file_name(file: Any) -> bool:
    return isinstance(file, str) and Path(file).name == file and file not in ("", "..")
