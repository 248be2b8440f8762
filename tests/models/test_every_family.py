"""What holds for every family of models, at the toy sizes of its debug config; a new family is tested by its line.

Whole runs of every family are in test_family_runs, what holds for one family in a file of its name.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from flax import linen as nn
from paths import REPOSITORY
from toy import KEEP_GRADIENT, SETTINGS, assert_trees_close, packed, windows, with_source

from jaxlm.config import load_config
from jaxlm.distributed.devices import compiling_for
from jaxlm.distributed.mesh import MeshConfig, make_mesh
from jaxlm.inference.decoding import CachedModel, Prompt
from jaxlm.inference.scoring import Scored, Scorer
from jaxlm.inference.strategies import Sampler, Sampling
from jaxlm.models import FAMILIES, build, with_length, with_vocabulary, without_dropout
from jaxlm.models.model import Inputs, Model, source_inputs
from jaxlm.nn.config import Execution
from jaxlm.objectives.language_model import inputs_of
from jaxlm.text.characters import character_ids
from jaxlm.training.config import FinetuneConfig, PretrainConfig
from jaxlm.training.pretraining import make_pretraining
from jaxlm.training.step import make_train_step, new_state

PRETRAINED = [name for name, family in FAMILIES.items() if family.layouts]
DECODERS = [name for name, family in FAMILIES.items() if family.role in ("decoder", "encoder_decoder")]
LENGTH, VOCABULARY = 16, 64


def toy(name: str) -> PretrainConfig | FinetuneConfig:
    """Return the family's debug config with a toy vocabulary and without dropout."""
    config = load_config(f"debug/{name}", PretrainConfig if name in PRETRAINED else FinetuneConfig)
    model = without_dropout(with_vocabulary(with_length(config.model, LENGTH), VOCABULARY))
    return dataclasses.replace(config, model=model, length=LENGTH, batch_size=4)


def random_like(tree, seed: int = 0):
    """Return a tree of this shape, all of whose parameters are random: biases and gains matter too."""
    rng = np.random.default_rng(seed)

    def fill(path, x):
        return np.float32(0.3) * rng.standard_normal(x.shape, np.float32) + np.float32(path[-1].key == "scale")

    return jax.tree_util.tree_map_with_path(fill, nn.unbox(tree))


@functools.cache
def made(name: str) -> tuple[Model, dict]:
    """Return a family's toy model and random parameters, with those of its output layer."""
    model = build(toy(name).model)
    init = lambda key: {"backbone": model.init(key), "head": model.output_layer.init(key)}  # noqa: E731
    return model, random_like(jax.eval_shape(init, jax.random.key(0)))


def rows_for(name: str, rows: int):
    """Return a batch as the family reads it: rows of two documents if it can, each with a source if it has one."""
    family = FAMILIES[name]
    if family.role == "encoder_decoder":
        return with_source((packed if family.layouts else windows)(rows), vocab_size=VOCABULARY)
    batch = packed(rows) if "packed" in family.layouts else windows(rows)
    return with_ids(batch, batch.ids) if family.role == "bidirectional" else batch


def with_ids(batch, ids):
    """Return a batch with other ids, whose characters are those of the words w0, w1, …"""
    words = character_ids(f"w{i}" for i in np.ravel(ids))
    return batch.replace(ids=ids, characters=words.reshape(*ids.shape, -1))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_has_a_golden_table_and_parity_with_another_implementation(name):
    """Fails when a family is added without a table of its parameters, or without numbers of another program."""
    tests = REPOSITORY / "tests"
    for file in (f"golden/{name}.txt", f"golden/{name}_parity.npz", f"models/test_{name}_parity.py"):
        assert (tests / file).exists(), f"tests/{file} is missing; docs/adding.md says how it is made"


@pytest.mark.parametrize("name", FAMILIES)
def test_the_arithmetic_of_a_gpu_has_the_same_gradients(name):
    """Fails when sums in two stages, padded kernels or gathers for a GPU lose a row or a column.

    Both run here, on a CPU. The reference is JAX's own derivative of the other form.
    """
    config = toy(name)
    odd = {"awd_lstm": {"units": 23}, "lstm": {"width": 20}}.get(name, {})
    model = build(dataclasses.replace(config.model, **odd), Execution(dtype="float32", attention="xla"))
    params = random_like(jax.eval_shape(lambda key: {"backbone": model.init(key)}, jax.random.key(0)))
    inputs = inputs_of(rows_for(name, 4))
    found = []
    for platform in ("cpu", "gpu"):
        with compiling_for(platform):
            gradient = jax.jit(jax.grad(lambda params: jax.numpy.sum(jax.numpy.sin(model(params, inputs).states))))
            found.append(gradient(params))
    assert_trees_close(found[1], found[0], relative=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_state_depends_on_the_tokens_that_the_family_says(name):
    """Fails when a state sees a later token of a decoder, or another document of a packed row or its padding, or does
    not see its own token, an earlier one, or any token of an encoder's sequence.
    """
    (model, params), family = made(name), FAMILIES[name]
    batch = rows_for(name, 4)
    changed_to = with_ids if family.role == "bidirectional" else lambda batch, ids: batch.replace(ids=ids)
    states = jax.jit(lambda batch: model(params, inputs_of(batch)).states)
    before, real = np.asarray(states(batch)), batch.segments > 0
    for at in (0, 6, 11, LENGTH - 1):
        ids = np.array(batch.ids)
        ids[:, at] = (ids[:, at] + 1) % VOCABULARY
        changed = np.abs(np.asarray(states(changed_to(batch, ids))) - before).max(-1)
        seen = real & (batch.segments == batch.segments[:, at : at + 1])
        if family.sees(model.config) != "both":
            seen &= np.arange(LENGTH) >= at
        assert np.all(changed[seen] > 1e-6) and not np.any(changed[real & ~seen])


@pytest.mark.parametrize("name", DECODERS)
def test_decoding_and_scoring_are_those_of_whole_passes(name):
    """Fails when what a layer remembers is lost between steps, belongs to another row or to the padding of a shorter
    prompt, positions are not those of the decoded tokens, or the output layer's bias is left out.
    """
    model, params = made(name)
    rng = np.random.default_rng(5)
    sources = {3: rng.integers(VOCABULARY, size=9).tolist(), 7: rng.integers(VOCABULARY, size=4).tolist()}
    sources = sources if model.has_source else {3: (), 7: ()}
    prompts = [
        Prompt(rng.integers(VOCABULARY, size=size).tolist(), LENGTH - 7, source=source)
        for size, source in sources.items()
    ]
    sampler = Sampler(CachedModel(model, params, positions=64), Sampling(temperature=0.0))
    rows = np.array([row.tolist() for row in sampler(prompts, samples=2)])  # (steps, prompts, samples)
    assert (rows[..., 0] == rows[..., 1]).all()
    scorer = Scorer(model, mesh=make_mesh(MeshConfig(), jax.devices()[:1]), batch_size=2)

    @jax.jit
    def log_probs(ids, source):
        given = source_inputs(source[None]) if model.has_source else None
        outputs = model(params, Inputs(ids[None], np.arange(LENGTH)[None], source=given))
        return jax.nn.log_softmax(model.logits(params, outputs.states[0], outputs.output))

    for number, prompt in enumerate(prompts):
        ids = [*prompt.ids, *rows[:, number, 0].tolist()]
        scores = np.asarray(log_probs(np.pad(ids, (0, LENGTH - len(ids))), np.array(prompt.source)))[: len(ids)]
        assert scores.argmax(-1)[len(prompt.ids) - 1 : -1].tolist() == ids[len(prompt.ids) :]
        (found,) = scorer(params, [Scored(ids, source=prompt.source)])
        wanted = scores[np.arange(len(ids) - 1), ids[1:]].sum()
        assert found.log_probability == pytest.approx(float(wanted), rel=1e-5)


@pytest.mark.parametrize("name", [name for name in DECODERS if name in PRETRAINED])
def test_micro_batches_do_not_change_the_gradient_nor_the_carry(name):
    """Fails when the carry is not split as the rows are, or a term of the loss is weighted by its micro-batch."""
    config = toy(name)
    learner = make_pretraining(config, None)
    params = random_like(jax.eval_shape(learner.init_params, jax.random.key(0)))
    found = []
    for micro_batches in (1, 2):
        step = jax.jit(make_train_step(learner.objective, KEEP_GRADIENT, micro_batches=micro_batches))
        state = new_state(params, KEEP_GRADIENT, 0, learner.carry(4))
        losses = []
        for seed in range(2):
            batch = rows_for(name, 4) if name == "t5" else windows(4, seed=seed)
            batch = batch.replace(begins=np.array([True, False, False, True]))
            state, metrics = step(state, batch, SETTINGS)
            losses.append(float(metrics["loss"]))
        found.append((losses, state.opt_state, state.carry))
    whole, split = found
    assert split[0] == pytest.approx(whole[0], rel=1e-5)
    assert_trees_close(split[1], whole[1], relative=1e-5, absolute=1e-6)
    assert_trees_close(split[2], whole[2], relative=1e-5, absolute=1e-6)
