"""Merging loaded parameters into fresh ones. Fails when something is silently dropped, cast, cut or left fresh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxlm.errors import InputError
from jaxlm.runs.trees import merge_parameters


def parameters(rows: int, layers: int = 4, *, head: int | None = None, value: float = 0.0) -> dict:
    tree = {
        "backbone": {
            "embeddings": {"tokens": np.full((rows, 3), value, np.float32)},
            "blocks": {
                "kernel": np.full((layers, 2, 2), value, np.float32),
                "bias": np.full(layers, value, np.float32),
            },
        }
    }
    return tree if head is None else tree | {"head": {"kernel": np.full((3, head), value, np.float32)}}


def test_everything_fits():
    merged = merge_parameters(parameters(5), parameters(5, value=1))
    assert jax.tree.all(jax.tree.map(lambda leaf: (leaf == 1).all(), merged))


def test_fresh_leaves_and_grown_tables_are_named():
    notes: list[str] = []
    fresh, loaded = parameters(8, head=2, value=0), parameters(5, head=7, value=1)
    merged = merge_parameters(
        fresh, loaded, allow_fresh=("head/.*",), grow={"backbone/embeddings/tokens": 0}, notes=notes
    )
    assert (merged["backbone"]["embeddings"]["tokens"][:, 0] == [1, 1, 1, 1, 1, 0, 0, 0]).all()
    assert merged["head"]["kernel"].shape == (3, 2) and not merged["head"]["kernel"].any()
    assert notes == ["fresh: head/kernel", "grown: backbone/embeddings/tokens from 5 to 8"]
    assert not fresh["backbone"]["embeddings"]["tokens"].any()  # the arguments stay as they are


def test_the_first_layers_are_taken_with_grow():
    merged = merge_parameters(parameters(5), parameters(5, layers=2, value=1), grow={"backbone/blocks/.*": 0})
    assert (merged["backbone"]["blocks"]["bias"] == [1, 1, 0, 0]).all()
    assert merged["backbone"]["blocks"]["kernel"].sum() == 8


@pytest.mark.parametrize(
    ("fresh", "loaded", "options", "listing"),
    [
        (parameters(5, head=2), parameters(5), {}, r"\+ head/kernel float32\[3, 2\]"),
        (parameters(5), parameters(5, head=2), {}, r"- head/kernel float32\[3, 2\]"),
        (parameters(8), parameters(5), {}, r"- .*tokens float32\[5, 3\] \+ .*tokens float32\[8, 3\]"),
        (parameters(5), parameters(8), {"grow": {".*tokens": 0}}, r"tokens float32\[8, 3\] \+ "),
        (
            parameters(5),
            parameters(5, layers=2),
            {"grow": {".*tokens": 0}},
            "- backbone/blocks/bias .* - backbone/blocks/kernel",
        ),
        (jax.tree.map(np.float16, parameters(5)), parameters(5), {}, r"float32\[5, 3\] \+ .* float16\[5, 3\]"),
    ],
)
def test_what_does_not_fit_is_listed(fresh, loaded, options, listing):
    with pytest.raises(InputError, match=listing) as caught:
        merge_parameters(fresh, loaded, **options)
    assert "\n" not in str(caught.value)


def test_a_grown_table_keeps_the_sharding_of_the_fresh_one():
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("fsdp",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
    fresh = {"tokens": jax.device_put(jnp.zeros((16, 4)), sharding)}
    loaded = {"tokens": jax.device_put(jnp.ones((13, 4)), NamedSharding(mesh, PartitionSpec()))}
    merged = merge_parameters(fresh, loaded, grow={"tokens": 0})["tokens"]
    assert merged.sharding.spec == sharding.spec
    assert (np.asarray(merged)[:, 0] == [1] * 13 + [0] * 3).all()
