"""Rules between our leaves and the tensors of a published checkpoint, used strictly in both directions.

Each of our leaves has one rule, and each tensor is used exactly once; differences are listed, - missing, + unexpected,
with shapes. A leaf that is stacked over the layers has a tensor (or several) for each of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from jaxlm.errors import InputError
from jaxlm.interop.files import FLOATS, Info, Planned
from jaxlm.runs.trees import listed

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """Conversion of tensors to a leaf of a given shape, and back: inverse of each other, bit for bit."""

    to_ours: Callable[[Sequence[np.ndarray], Shape], np.ndarray]
    to_theirs: Callable[[np.ndarray], list[np.ndarray]]


def _matrix(leaf: np.ndarray, rows: int) -> np.ndarray:
    """Return a kernel whose first `rows` axes are its input as (input, output)."""
    return leaf.reshape(int(np.prod(leaf.shape[:rows])), -1)


def linear(input_axes: int = 1) -> Layout:
    """Return the layout of PyTorch's nn.Linear weight (output, input) for a kernel (input …, output …)."""
    return Layout(
        lambda tensors, shape: tensors[0].T.reshape(shape),
        lambda leaf: [_matrix(leaf, input_axes).T],
    )


def conv1d(input_axes: int = 1) -> Layout:
    """Return the layout of GPT's Conv1D weight (input, output), in OpenAI's files with a leading axis of one."""
    return Layout(
        lambda tensors, shape: tensors[0].reshape(shape),
        lambda leaf: [_matrix(leaf, input_axes)],
    )


# Vectors and tables: the same numbers in the same order.
SAME = Layout(lambda tensors, shape: tensors[0].reshape(shape), lambda leaf: [leaf])
FLAT = Layout(lambda tensors, shape: tensors[0].reshape(shape), lambda leaf: [leaf.reshape(-1)])
# Separate query, key and value, nn.Linear weights (D, D) and biases (D,), for (D, 3, H, K) and (3, H, K).
THREE_LINEARS = Layout(
    lambda tensors, shape: np.stack([tensor.T for tensor in tensors], axis=1).reshape(shape),
    lambda leaf: [leaf[:, k].reshape(leaf.shape[0], -1).T for k in range(3)],
)
THREE_BIASES = Layout(
    lambda tensors, shape: np.stack(tensors).reshape(shape),
    lambda leaf: [leaf[k].reshape(-1) for k in range(3)],
)


@dataclass(frozen=True)
class Rule:
    """A leaf of ours by its path, and the tensors that hold it; `{n}` in a name stands for each layer."""

    leaf: str
    theirs: tuple[str, ...]
    layout: Layout = SAME

    @property
    def stacked(self) -> bool:
        """True if the leaf has a leading axis of layers."""
        return "{n}" in self.theirs[0]

    def names(self, layer: int) -> list[str]:
        """Return the tensors of one layer, or of the leaf if it has no layers."""
        return [name.format(n=layer) for name in self.theirs]

    def layers(self, num_layers: int) -> range:
        """Return the layers with tensors of their own; one if the leaf has no layers."""
        return range(num_layers if self.stacked else 1)

    def their_shapes(self, ours: Shape) -> list[Shape]:
        """Return the shapes of the tensors of one layer, from that of the leaf."""
        one = ours[1:] if self.stacked else ours
        return [part.shape for part in self.layout.to_theirs(np.broadcast_to(np.int8(0), one))]


class Tensors(Protocol):
    """Named tensors and their headers."""

    @property
    def infos(self) -> Mapping[str, Info]: ...

    def read(self, name: str) -> np.ndarray: ...


def read_leaves(
    rules: Sequence[Rule], shapes: Mapping[str, Shape], tensors: Tensors, names: Mapping[str, str], num_layers: int
) -> dict[str, np.ndarray]:
    """Return our leaves in float32, from `tensors`; `names` maps the current spelling of a tensor to its stored name.

    Every rule's tensors must be in `names`, and nothing else: InputError with a listing. One tensor at a time is in
    memory besides the leaves.
    """
    wanted: dict[str, tuple[Rule, Shape]] = {}
    for rule in rules:
        parts = rule.their_shapes(shapes[rule.leaf])
        for n in rule.layers(num_layers):
            wanted |= {name: (rule, shape) for name, shape in zip(rule.names(n), parts, strict=True)}
    differences = [f"- {name} {list(shape)}" for name, (_, shape) in wanted.items() if name not in names]
    for name, stored in names.items():
        info = tensors.infos[stored]
        if name not in wanted:
            differences.append(f"+ {stored} {list(info.shape)}")
        elif _squeezed(info.shape) != _squeezed(wanted[name][1]):
            differences.append(f"- {name} {list(wanted[name][1])} + {stored} {list(info.shape)}")
        elif info.dtype not in FLOATS or info.dtype == "F64":  # float32 cannot hold an F64's last bits
            differences.append(f"+ {stored} of type {info.dtype}, not F32, F16 or BF16")
    if differences:
        raise InputError(f"the tensors must fit the model (- missing, + unexpected): {listed(differences, 8)}")
    leaves: dict[str, np.ndarray] = {}
    for rule in rules:
        leaf = np.empty(shapes[rule.leaf], np.float32)
        for n in rule.layers(num_layers):
            part = leaf[n] if rule.stacked else leaf
            found = [
                tensors.read(names[name]).reshape(shape)
                for name, shape in zip(rule.names(n), rule.their_shapes(leaf.shape), strict=True)
            ]
            for name, values in zip(rule.names(n), found, strict=True):
                _check_finite(names[name], values)
            part[...] = rule.layout.to_ours(found, part.shape)
        leaves[rule.leaf] = leaf
    return leaves


def _check_finite(name: str, values: np.ndarray) -> None:
    """Raise InputError for a tensor with NaN or infinity, with the index of the first one."""
    if not (right := np.isfinite(values)).all():
        place = np.unravel_index(int(np.argmin(right)), right.shape)
        raise InputError(
            f"the tensor {name} must be finite, got {values[place]} at {[int(i) for i in place]}; download it again, "
            "or use another checkpoint of it"
        )


def planned_tensors(rules: Sequence[Rule], leaves: Mapping[str, Any], num_layers: int) -> list[Planned]:
    """Return the tensors for `write_tensors` from our leaves: every leaf by its rule, and every rule a leaf."""
    missing = [rule.leaf for rule in rules if rule.leaf not in leaves]
    unknown = sorted(set(leaves) - {rule.leaf for rule in rules})
    if missing or unknown:
        named = [*(f"- {name}" for name in missing), *(f"+ {name}" for name in unknown)]
        raise InputError(f"the parameters must fit the format (- missing, + unexpected): {listed(named, 8)}")
    planned = []
    for rule in rules:
        leaf = leaves[rule.leaf]
        shapes = rule.their_shapes(leaf.shape)
        for n in rule.layers(num_layers):
            for k, (name, shape) in enumerate(zip(rule.names(n), shapes, strict=True)):
                planned.append(Planned(name, shape, _values(rule, leaf, n, k)))
    return planned


def _values(rule: Rule, leaf: np.ndarray, layer: int, part: int) -> Callable[[], np.ndarray]:
    return lambda: rule.layout.to_theirs(np.asarray(leaf[layer] if rule.stacked else leaf))[part]


def _squeezed(shape: Shape) -> Shape:
    return tuple(size for size in shape if size != 1)
