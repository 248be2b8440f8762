"""A published model in memory: its config, its parameters by our names, its tokenizer, and its task.

The shapes of our leaves are those that a converted checkpoint must fill. The rules between our leaves and the tensors
of the checkpoint are used strictly in both directions: each leaf has one rule, and each tensor is used exactly once;
differences are listed, - missing, + unexpected, with shapes. A leaf that is stacked over the layers has a tensor (or
several) for each of them.
"""

import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxlm.errors import InputError
from jaxlm.interop.files import FLOATS, Info, Planned
from jaxlm.models import build
from jaxlm.models.bert import BertConfig
from jaxlm.models.bert.model import MaskedLMHead, NextSentenceHead
from jaxlm.runs.trees import listed, named_leaves, nested_leaves
from jaxlm.tasks import Task
from jaxlm.text import Tokenizer

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """Conversion of tensors to a leaf of a given shape, and back: inverse of each other, bit for bit."""

    to_ours: Callable[[Sequence[np.ndarray], Shape], np.ndarray]
    to_theirs: Callable[[np.ndarray], list[np.ndarray]]


def _reshaped(tensors: Sequence[np.ndarray], shape: Shape) -> np.ndarray:
    return tensors[0].reshape(shape)


def linear(input_axes: int = 1) -> Layout:
    """Return the layout of PyTorch's nn.Linear weight (output, input) for a kernel (input …, output …)."""
    return Layout(lambda tensors, shape: tensors[0].T.reshape(shape), lambda leaf: [_matrix(leaf, input_axes).T])


def conv1d(input_axes: int = 1) -> Layout:
    """Return the layout of GPT's Conv1D weight (input, output), in OpenAI's files with a leading axis of one."""
    return Layout(_reshaped, lambda leaf: [_matrix(leaf, input_axes)])


# Vectors and tables: the same numbers in the same order.
SAME = Layout(_reshaped, lambda leaf: [leaf])
FLAT = Layout(_reshaped, lambda leaf: [leaf.reshape(-1)])
# Separate query, key and value, nn.Linear weights (D, D) and biases (D,), for (D, 3, H, K) and (3, H, K).
THREE_LINEARS = Layout(
    lambda tensors, shape: np.stack([tensor.T for tensor in tensors], axis=1).reshape(shape),
    lambda leaf: [leaf[:, k].reshape(leaf.shape[0], -1).T for k in range(3)],
)
THREE_BIASES = Layout(
    lambda tensors, shape: np.stack(tensors).reshape(shape), lambda leaf: [leaf[k].reshape(-1) for k in range(3)]
)


@dataclass(frozen=True)
class Rule:
    """A leaf of ours by its path, and the tensors that hold it; `{n}` in a name stands for each layer.

    depth: the field of the config with the number of these layers.
    """

    leaf: str
    theirs: tuple[str, ...]
    layout: Layout = SAME
    depth: str = "num_layers"

    @property
    def stacked(self) -> bool:
        """True if the leaf has a leading axis of layers."""
        return "{n}" in self.theirs[0]

    def names(self, layer: int) -> list[str]:
        """Return the tensors of one layer, or of the leaf if it has no layers."""
        return [name.format(n=layer) for name in self.theirs]

    def layers(self, model: Any) -> range:
        """Return the layers of a config with tensors of their own; one if the leaf has no layers."""
        return range(getattr(model, self.depth) if self.stacked else 1)

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
    rules: Sequence[Rule], shapes: Mapping[str, Shape], tensors: Tensors, names: Mapping[str, str], model: Any
) -> dict[str, np.ndarray]:
    """Return our leaves in float32, from `tensors`; `names` maps the current spelling of a tensor to its stored name.

    Every rule's tensors must be in `names`, and nothing else: InputError with a listing. One tensor at a time is in
    memory besides the leaves.
    """
    wanted: dict[str, tuple[Rule, Shape]] = {}
    for rule in rules:
        parts = rule.their_shapes(shapes[rule.leaf])
        for n in rule.layers(model):
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
        raise InputError(
            f"{_place_of(tensors)}: the tensors must fit the model (- missing, + unexpected), got "
            f"{listed(differences, 4)}; download the files again, or give those of another model"
        )
    leaves: dict[str, np.ndarray] = {}
    for rule in rules:
        leaf = np.empty(shapes[rule.leaf], np.float32)
        for n in rule.layers(model):
            part = leaf[n] if rule.stacked else leaf
            found = [
                tensors.read(names[name]).reshape(shape)
                for name, shape in zip(rule.names(n), rule.their_shapes(leaf.shape), strict=True)
            ]
            for name, values in zip(rule.names(n), found, strict=True):
                _check_finite(_place_of(tensors), names[name], values)
            part[...] = rule.layout.to_ours(found, part.shape)
        leaves[rule.leaf] = leaf
    return leaves


def planned_tensors(rules: Sequence[Rule], leaves: Mapping[str, Any], model: Any) -> list[Planned]:
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
        for n in rule.layers(model):
            for k, (name, shape) in enumerate(zip(rule.names(n), shapes, strict=True)):
                planned.append(Planned(name, shape, _values(rule, leaf, n, k)))
    return planned


@dataclass(frozen=True)
class Published:
    """A model that was read from `hf:DIR`, `openai:DIR`, `google:DIR`, `elmo:DIR` or `cove:FILE`.

    leaves: our path -> float32 array, `backbone/…` and `head/…`. dtype: safetensors' name of the type in the files.
    architecture: Hugging Face's class for it. task: the task of a fine-tuned model's head, with the label names of its
    config. parts: the parts besides the backbone. config: the values of its config.json, if it has one. notes:
    sentences about it. longest: the most tokens of a text that its tokenizer names; None: all positions.
    """

    name: str
    model: Any
    leaves: MutableMapping[str, np.ndarray]
    tokenizer: Tokenizer | None
    fingerprint: str
    architecture: str
    dtype: str
    parts: tuple[str, ...] = ()
    task: Task | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    longest: int | None = None

    @property
    def trained_length(self) -> int:
        """The number of positions that were trained: those of the model, or fewer if its tokenizer says so."""
        positions = build(self.model).max_length
        return min(positions, self.longest or positions)

    @property
    def params(self) -> dict[str, Any]:
        """The parameters as a tree: {"backbone": …}, and "head" if there is one."""
        return nested_leaves(self.leaves)


def backbone_shapes(model: Any) -> dict[str, Shape]:
    """Return `backbone/…` -> shape, without a BERT's pooler."""
    params = nn.unbox(jax.eval_shape(build(model).init, jax.random.key(0)))
    params.pop("pooler", None)
    return _shapes("backbone", params)


def part_shapes(model: Any, parts: Sequence[str], outputs: int) -> dict[str, Shape]:
    """Return path -> shape of the parts besides the backbone; `outputs` is the output size of a fine-tuned head."""
    d = model.width
    found: dict[str, Shape] = {}
    for part in parts:
        if part == "pooler":
            found |= {"backbone/pooler/kernel": (d, d), "backbone/pooler/bias": (d,)}
        elif part in ("masked_lm", "next_sentence"):
            assert isinstance(model, BertConfig)
            head = MaskedLMHead(model) if part == "masked_lm" else NextSentenceHead(model.init_std)
            params = jax.eval_shape(head.init, jax.random.key(0), jnp.zeros((1, 1, d)))["params"]
            found |= _shapes(f"head/{part}", nn.unbox(params))
        elif part == "lm_head":
            found |= {"head/classifier/kernel": (model.vocab_size, d)}
        else:
            found |= {"head/kernel": (d, outputs), "head/bias": (outputs,)}
    return found


def check_sizes(
    model: Any, rules: Sequence[Rule], infos: Mapping[str, Info], names: Mapping[str, str], what: str
) -> None:
    """Raise InputError, before anything is built, if the `model` that the file `what` describes does not fit.

    names: current spelling -> stored name, as for `read_leaves`. A model of a million layers, or of a size larger than
    any axis of a tensor, would take minutes or all memory before the listing of its differences.
    """
    prefixes = {rule.depth: rule.theirs[0].partition("{n}")[0] for rule in rules if rule.stacked}
    for depth, prefix in prefixes.items():
        found = {name.removeprefix(prefix).partition(".")[0] for name in names if name.startswith(prefix)}
        if len(found) != getattr(model, depth):
            kind = "" if depth == "num_layers" else f" ({depth})"
            raise InputError(
                f"{what}: the number of layers{kind} must be that of the tensors, {len(found)}, got "
                f"{getattr(model, depth)}; download the files again"
            )
    shapes = [infos[stored].shape for stored in names.values()]
    longest = max((size for shape in shapes if math.prod(shape) for size in shape), default=0)
    for name in ("vocab_size", "num_positions", "num_types", "width", "feed_forward_width"):
        if getattr(model, name, 0) > longest:
            raise InputError(
                f"{what}: {name} must be the size of a tensor's axis, at most {longest}, got {getattr(model, name)}; "
                "download the files again"
            )


def _matrix(leaf: np.ndarray, rows: int) -> np.ndarray:
    """Return a kernel whose first `rows` axes are its input as (input, output)."""
    return leaf.reshape(int(np.prod(leaf.shape[:rows])), -1)


def _place_of(tensors: Tensors) -> Path:
    """Return the file of the tensors, or the directory of several."""
    files = {info.file for info in tensors.infos.values()}
    if not files:
        return Path("the directory")
    return files.pop() if len(files) == 1 else min(files).parent


def _check_finite(place: Path, name: str, values: np.ndarray) -> None:
    """Raise InputError for a tensor with NaN or infinity, with the index of the first one. place: its file."""
    if not (right := np.isfinite(values)).all():
        at = np.unravel_index(int(np.argmin(right)), right.shape)
        raise InputError(
            f"{place}: the tensor {name} must be finite, got {values[at]} at {[int(i) for i in at]}; download it "
            "again, or use another checkpoint of it"
        )


def _values(rule: Rule, leaf: np.ndarray, layer: int, part: int) -> Callable[[], np.ndarray]:
    return lambda: rule.layout.to_theirs(np.asarray(leaf[layer] if rule.stacked else leaf))[part]


def _squeezed(shape: Shape) -> Shape:
    return tuple(size for size in shape if size != 1)


def _shapes(prefix: str, params: object) -> dict[str, Shape]:
    return {f"{prefix}/{name}": tuple(leaf.shape) for name, leaf in named_leaves(params).items()}
