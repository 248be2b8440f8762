"""ELMo's language model against its authors' code: AllenNLP 0.9.0 (residual, all layers, gradients), and bilm-tf.

tests/golden/elmo_parity.npz is written by tests/parity/freeze_elmo.py in float64 with the modules of AllenNLP as they
were released, and elmo_steps_parity.npz by freeze_elmo_steps.py with PyTorch's LSTM and Adagrad. Published vectors of
bilm-tf's own test, ten batches with a carried state, are compared with real data.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parity import elmo_case as case
from parity.check import WHY, assert_frozen, frozen

from jaxlm.config import load_config
from jaxlm.data.batch import Batch
from jaxlm.models.elmo import FAMILY, ELMoConfig
from jaxlm.models.elmo.model import empty_state
from jaxlm.models.model import Inputs, Model
from jaxlm.nn.config import Execution
from jaxlm.nn.recurrence import LSTMState
from jaxlm.nn.sampled_softmax import Sample, SampledOutput
from jaxlm.objectives.bidirectional_lm import bidirectional_language_model
from jaxlm.runs.trees import named_leaves
from jaxlm.text.characters import PADDING, character_ids
from jaxlm.training.config import PretrainConfig
from jaxlm.training.optimizer import make_optimizer
from jaxlm.training.step import make_train_step, new_state, settings_of

SIZES = case.Sizes()
CONFIG = ELMoConfig(
    num_layers=SIZES.num_layers,
    width=2 * SIZES.projection,
    units=SIZES.units,
    filters=SIZES.filters,
    character_width=SIZES.character_width,
    num_characters=SIZES.num_characters,
    num_highways=SIZES.num_highways,
    cell_clip=SIZES.cell_clip,
    projection_clip=SIZES.projection_clip,
)
MODEL = Model(FAMILY, CONFIG, Execution(dtype="float32"))
APPLIED = jax.jit(lambda params, inputs, carry: MODEL(params, inputs, carry, layers=True))


def rows_of(sentences: list[np.ndarray], room: int = 0, front: bool = False) -> tuple[Inputs, np.ndarray]:
    """Return the rows of a batch, `room` longer than the longest, and where the real tokens are."""
    length = max(map(len, sentences)) + room
    characters = np.full((len(sentences), length, sentences[0].shape[1]), PADDING, np.int32)
    segments = np.zeros(characters.shape[:2], np.int32)
    for row, sentence in enumerate(sentences):
        place = slice(length - len(sentence), length) if front else slice(0, len(sentence))
        characters[row, place], segments[row, place] = sentence, 1
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), segments.shape)
    return Inputs(np.zeros_like(segments), positions, segments, characters=characters), segments > 0


def layers_of(params, inputs: Inputs, real: np.ndarray, carry) -> tuple[np.ndarray, LSTMState]:
    """Return the layers of the real tokens (N + 1, tokens of all rows, 2 P), and the carry."""
    outputs = APPLIED(params, inputs, carry)
    assert not np.any(np.asarray(outputs.layers)[:, ~real]), "padding has a state"
    np.testing.assert_array_equal(outputs.states, outputs.layers[-1])
    return np.asarray(outputs.layers)[:, real], outputs.carry


@pytest.mark.parametrize(("room", "front"), [(0, False), (2, False), (0, True), (3, True)])
def test_all_layers_and_the_carried_state_are_those_of_allennlp(room, front):
    """Fails when the activation precedes the pool, a highway's gate has the other sense, the forget bias is missing or
    added twice, the residual is carried or clipped, or padding in front or at the end moves a state. The second batch
    has fewer rows, and the states of the others stay.
    """
    wanted = frozen("elmo")["forward"]
    params, carry = {"backbone": case.to_tree(case.make_tensors(SIZES, 1), SIZES)}, empty_state(CONFIG, 3)
    for number, sentences in enumerate(case.make_batches(SIZES, 2)):
        marked = [case.with_marks(sentence) for sentence in sentences]
        found, carry = layers_of(params, *rows_of(marked, room, front), carry)
        _, real = rows_of(marked)
        np.testing.assert_allclose(found, wanted[f"layers_{number}"][:, real], rtol=0, atol=1e-5)
        np.testing.assert_allclose(carry.h, wanted[f"h_{number}"], rtol=0, atol=1e-5)
        np.testing.assert_allclose(carry.c, wanted[f"c_{number}"], rtol=0, atol=1e-5)
    assert np.abs(wanted["c_0"]).max() == pytest.approx(SIZES.cell_clip), "no cell was clipped"


def test_the_gradient_is_that_of_allennlp():
    """Fails when a derivative of the convolutions, the highways, the clips or the residual is wrong."""
    tensors = case.make_tensors(SIZES, 1)
    first, second = ([case.with_marks(sentence) for sentence in batch] for batch in case.make_batches(SIZES, 2))
    tree, (inputs, real) = case.to_tree(tensors, SIZES), rows_of(second)
    _, carry = layers_of({"backbone": tree}, *rows_of(first), empty_state(CONFIG, 3))
    weights = case.make_weights(SIZES, (SIZES.num_layers + 1, *real.shape, CONFIG.width), 3)

    def loss(tree):
        return jnp.sum(weights * MODEL({"backbone": tree}, inputs, carry, layers=True).layers)

    found = jax.jit(jax.grad(loss))(jax.tree.map(jnp.asarray, tree))
    wanted = case.to_tree(frozen("elmo")["gradient"], SIZES)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for (path, gradient), value in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True
    ):
        assert np.abs(gradient - value).max() < 1e-4 * max(np.abs(value).max(), 1e-3), jax.tree_util.keystr(path)


def test_the_characters_are_those_of_bilm():
    """Fails when a long word loses its end, is not cut after 48 bytes, or a mark of a sentence is spelt out."""
    np.testing.assert_array_equal(character_ids(case.WORDS), frozen("elmo")["characters"]["ids"])


@pytest.mark.parametrize("name", ["sampled", "full"])
def test_the_loss_over_a_sample_is_that_of_allennlp(name):
    """Fails when a sampled target is counted twice, or the expected count is not subtracted from both scores.

    AllenNLP's SampledSoftmaxLoss, TensorFlow's in PyTorch, is given the sample and its expected counts.
    """
    sizes, wanted = case.Softmax(), frozen("elmo")["softmax"]
    given = case.make_softmax(sizes, 4)
    layer = SampledOutput(sizes.vocab_size, sizes.width, 0.1)
    sample = Sample(jnp.array(sizes.ids), jnp.float32(sizes.time)) if name == "sampled" else None

    def loss(table, bias, states):
        params = {"head": {"classifier": {"kernel": table, "bias": bias}}}
        return layer.loss(params, states, sample, given["targets"], np.ones(given["targets"].shape, np.float32))[0]

    found, gradients = jax.value_and_grad(loss, (0, 1, 2))(*(given[part] for part in ("table", "bias", "states")))
    np.testing.assert_allclose(found, wanted[f"{name}_loss"], rtol=1e-5)
    for part, gradient in zip(("table", "bias", "states"), gradients, strict=True):
        value = wanted[f"{name}_{part}"].reshape(gradient.shape)
        np.testing.assert_allclose(gradient, value, rtol=1e-4, atol=1e-5, err_msg=part)


def batch_of(given: dict[str, np.ndarray], way: str, backward: Batch | None = None) -> Batch:
    targets = given[f"{way}_targets"]
    positions = np.tile(np.arange(targets.shape[1], dtype=np.int32), (len(targets), 1))
    ones, zeros = np.ones(targets.shape, np.float32), np.zeros_like(targets)
    return Batch(zeros, targets, positions, None, ones, characters=given[way], backward=backward)


def test_ten_steps_of_adagrad_are_those_of_pytorch():
    """The optimizer is that of pretrain/elmo. Fails when the sums of Adagrad begin at 0 or a constant is added to them,
    the gradient is clipped before the loss is multiplied, a state is not carried, or the forget gate's 1 is trained.
    """
    training, wanted = case.Training(), frozen("elmo_steps")
    sizes, recipe = training.sizes, load_config("pretrain/elmo", PretrainConfig)
    config = ELMoConfig(
        vocab_size=training.vocab_size,
        num_layers=sizes.num_layers,
        width=2 * sizes.projection,
        units=sizes.units,
        filters=sizes.filters,
        character_width=sizes.character_width,
        num_characters=sizes.num_characters,
        num_highways=sizes.num_highways,
        cell_clip=sizes.cell_clip,
        projection_clip=sizes.projection_clip,
        dropout_rate=0.0,
        negatives=0,
    )
    model = Model(FAMILY, config, Execution(dtype="float32"))
    head = case.make_softmax_layer(training, 7)
    params = {"backbone": case.to_tree(case.make_tensors(sizes, 5), sizes), "head": {"classifier": head}}
    params = jax.tree.map(jnp.asarray, params)
    assert recipe.objective.scale == training.scale and recipe.optimizer.clip_norm == training.clip_norm

    def init(key):
        return {"backbone": model.init(key), "head": model.output_layer.init(key)}

    optimizer = make_optimizer(recipe.optimizer, jax.eval_shape(init, jax.random.key(0)))
    objective = bidirectional_language_model(model, scale=training.scale)
    step = jax.jit(make_train_step(objective, optimizer))
    state, settings = (
        new_state(params, optimizer, 0, empty_state(config, training.rows)),
        settings_of(recipe.optimizer, training.steps),
    )
    losses, norms = [], []
    for given in case.make_training_batches(training, 6):
        state, metrics = step(state, batch_of(given, "forward", batch_of(given, "backward")), settings)
        losses.append(float(metrics["nll"]))
        norms.append(float(metrics["gradient_norm"]))
    np.testing.assert_allclose(losses, wanted["steps"]["loss"], rtol=0, atol=1e-4)
    np.testing.assert_allclose(norms, wanted["steps"]["norm"], rtol=1e-4)
    assert min(norms) < training.clip_norm < max(norms) and losses[-1] < losses[0]
    found = named_leaves(state.params["backbone"]) | named_leaves(state.params["head"])
    assert found.keys() == wanted["after"].keys()
    for name, value in wanted["after"].items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-4, err_msg=name)


@pytest.mark.parity
def test_the_script_gives_the_frozen_steps():
    """Fails when the statement in tests/parity was changed and the file was not written again."""
    pytest.importorskip("torch", reason=WHY)
    from parity import elmo_torch

    assert_frozen("elmo_steps", elmo_torch.answers(case.Training()))
