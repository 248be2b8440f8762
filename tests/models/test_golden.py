"""Golden tables: every parameter's path, shape, dtype, logical axes, initialiser, and whether it is decayed.

A table is the checkpoint contract, the sharding plan and the optimizer's mask in one diff: a change of any of them must
be meant. `pytest tests/models/test_golden.py --update-golden` rewrites the tables.
"""

import math
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import linen as nn
from toy import boxed_shapes, init_params
from toy_pairs import bert_shapes, init_bert

from jaxlm.data.config import Spans
from jaxlm.models import build
from jaxlm.models.awd_lstm import AWD_LSTM_PTB
from jaxlm.models.bert import BERT_BASE
from jaxlm.models.bilstm import CVT, BiLSTMConfig
from jaxlm.models.character_transformer import T12
from jaxlm.models.elmo import ELMO
from jaxlm.models.elmo import FAMILY as ELMO_FAMILY
from jaxlm.models.gpt import GPT1, GPT2
from jaxlm.models.heads.bcn import BCNHead, SelfBCNHead
from jaxlm.models.heads.bilstm import LSTMHead
from jaxlm.models.heads.cross_view import CrossViewHead
from jaxlm.models.heads.linear import PooledHead, SequenceHead, SpanHead, TaggingHead
from jaxlm.models.lstm import GPT1_LSTM
from jaxlm.models.model import Model
from jaxlm.models.mt_lstm import FAMILY as MT_LSTM_FAMILY
from jaxlm.models.mt_lstm import MT_LSTM
from jaxlm.models.t5 import T5_1_1_SMALL, T5_SMALL
from jaxlm.models.transformer_xl import ENWIK8
from jaxlm.models.views import OF_DIRECTIONS
from jaxlm.objectives.config import LanguageModel, SequenceToSequence
from jaxlm.training.config import PretrainConfig
from jaxlm.training.optimizer import parameter_rules
from jaxlm.training.pretraining import make_pretraining

pytestmark = pytest.mark.versions

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
CUT = 0.8796  # the deviation of a standard normal that is cut at two deviations


def is_box(leaf) -> bool:
    return isinstance(leaf, nn.LogicallyPartitioned)


def measured_initialiser(values: np.ndarray, *declared: float) -> str:
    """What was drawn: zeros, ones, uniform, normal or truncated normal; of the declared deviations that which fits."""
    if not values.any():
        return "zeros"
    if np.all(values == values.flat[0]) and values.flat[0] < 0:
        return f"all {values.flat[0]:g}"
    if np.all(values == 1):
        return "ones"
    if np.all((values == 0) | (values == 1)):
        return f"ones from {values.argmax()} to {values.size - values[::-1].argmax()}, else zeros"
    x = values.ravel().astype(np.float64)
    assert abs(x.mean()) < 5 * x.std() / math.sqrt(x.size), "the mean is not 0"
    if np.abs(x).max() < 1.8 * x.std():
        return f"uniform {np.abs(x).max():.3f}"
    shape = "normal" if np.abs(x).max() > 2.5 * x.std() else "truncated normal"
    fits = [std for std in declared if abs(x.std() / std - 1) < 5 / math.sqrt(2 * x.size)]
    return f"{shape} {round(fits[0], 5) if fits else round(float(x.std()), 5)}"


def table(boxed, drawn, *declared: float) -> str:
    """One line a parameter. `drawn`: the same tree with values, perhaps of a smaller model."""
    rows = [("path", "shape", "dtype", "axes", "initialiser", "decayed")]
    decayed = [rule.decayed for rule in jax.tree.leaves(parameter_rules(boxed))]
    leaves = jax.tree_util.tree_leaves_with_path(boxed, is_leaf=is_box)
    total = 0
    for (path, leaf), on, values in zip(leaves, decayed, jax.tree.leaves(drawn), strict=True):
        name = "/".join(entry.key for entry in path)
        shape, dtype = leaf.value.shape, leaf.value.dtype
        total += math.prod(shape)
        initialiser = measured_initialiser(np.asarray(values), *declared)
        row = ("x".join(map(str, shape)), str(dtype), " ".join(leaf.names), initialiser, "decayed" if on else "-")
        rows.append((name, *row))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, f"{total:,} parameters", ""])


def compare(name: str, text: str, update: bool) -> None:
    path = GOLDEN / name
    if update:
        path.write_text(text)
    assert path.read_text() == text, (
        f"{name} differs; if that is meant, run pytest tests/models/test_golden.py --update-golden"
    )


def test_gpt(update_golden):
    """Fails when a parameter of GPT-1 moves, changes its shape, axes or initialisation, or its decay."""
    small = replace(GPT1, vocab_size=2000, num_layers=2)  # values are drawn for fewer rows; deviations are the same
    drawn = jax.jit(lambda key: nn.unbox(init_params(small)(key)))(jax.random.key(0))
    for leaf in jax.tree.leaves(drawn["backbone"]["blocks"]):
        assert not leaf.any() or np.all(leaf == 1) or not np.array_equal(leaf[0], leaf[1]), "layers start alike"
    compare("gpt.txt", table(boxed_shapes(GPT1), drawn, GPT1.init_std), update_golden)


def test_gpt2(update_golden):
    """Fails when GPT-2 loses its final norm, or draws branch ends (1 / sqrt(2 N)) or positions (half) otherwise."""
    small = replace(GPT2, vocab_size=2000, num_positions=300, width=96, feed_forward_width=384)
    drawn = jax.jit(lambda key: nn.unbox(init_params(small)(key)))(jax.random.key(0))
    compare("gpt2.txt", table(boxed_shapes(GPT2), drawn, 0.02, 0.01, 0.02 / math.sqrt(24)), update_golden)


def test_lstm(update_golden):
    """Fails when the recurrent kernel is sharded or not decayed, or an initial value changes."""
    small = replace(GPT1_LSTM, vocab_size=2000)
    drawn = jax.jit(lambda key: nn.unbox(init_params(small)(key)))(jax.random.key(0))
    compare("lstm.txt", table(boxed_shapes(GPT1_LSTM), drawn, 0.02), update_golden)


def test_awd_lstm(update_golden):
    """Fails when a kernel is sharded otherwise or not decayed, a bias is missing, or an initial value changes."""
    small = replace(AWD_LSTM_PTB, vocab_size=2000)
    drawn = jax.jit(lambda key: nn.unbox(init_params(small)(key)))(jax.random.key(0))
    compare("awd_lstm.txt", table(boxed_shapes(AWD_LSTM_PTB), drawn), update_golden)


def test_character_transformer(update_golden):
    """Fails when a layer's positions, or a classifier of a loss, have other axes or initial values, or move."""
    objective = LanguageModel(intermediate_coefficient=1.0, second_target_coefficient=0.5)

    def init(config):
        return make_pretraining(PretrainConfig(model=config, objective=objective), None).init_params

    small = replace(T12, num_layers=3, num_positions=40, width=128, feed_forward_width=256)
    drawn = jax.jit(lambda key: nn.unbox(init(small)(key)))(jax.random.key(0))
    boxed = jax.eval_shape(init(T12), jax.random.key(0))
    compare("character_transformer.txt", table(boxed, drawn, T12.init_std), update_golden)


def test_transformer_xl(update_golden):
    """Fails when a kernel is sharded otherwise or not decayed, a bias is added, or an initial value changes."""
    small = replace(ENWIK8, num_layers=2)
    drawn = jax.jit(lambda key: nn.unbox(init_params(small)(key)))(jax.random.key(0))
    compare("transformer_xl.txt", table(boxed_shapes(ENWIK8), drawn, 0.02), update_golden)


def test_elmo(update_golden):
    """Fails when an initial value is not TensorFlow's, a gate's bias is not -2, or a kernel is sharded otherwise."""

    def init(config):
        model = Model(ELMO_FAMILY, config)
        return lambda key: {"backbone": model.init(key), "head": model.output_layer.init(key)}

    small = replace(ELMO, vocab_size=2000, width=512, units=1024)
    drawn = jax.jit(lambda key: nn.unbox(init(small)(key)))(jax.random.key(0))
    compare("elmo.txt", table(jax.eval_shape(init(ELMO), jax.random.key(0)), drawn), update_golden)


def test_bilstm(update_golden):
    """Fails when a gate's bias or a kernel begins elsewhere, or a kernel is sharded otherwise."""
    model = build(replace(CVT, vocab_size=3000))
    drawn = jax.jit(lambda key: nn.unbox({"backbone": model.init(key)}))(jax.random.key(0))
    boxed = jax.eval_shape(lambda key: {"backbone": build(CVT).init(key)}, jax.random.key(0))
    compare("bilstm.txt", table(boxed, drawn, 0.02), update_golden)


def test_mt_lstm(update_golden):
    """Fails when an initial value is beyond 0.1, a gate's bias begins at 1, or a kernel is sharded otherwise."""

    def init(config):
        model = Model(MT_LSTM_FAMILY, config)
        return lambda key: {"backbone": model.init(key), "head": model.output_layer.init(key)}

    drawn = jax.jit(lambda key: nn.unbox(init(replace(MT_LSTM, vocab_size=2000))(key)))(jax.random.key(0))
    compare("mt_lstm.txt", table(jax.eval_shape(init(MT_LSTM), jax.random.key(0)), drawn), update_golden)


def test_t5(update_golden):
    """Fails when a kernel has another deviation or is scaled twice, a bias table is decayed, or a stack is sharded
    otherwise. T5 1.1 has a gate and an output of its own.
    """

    def init(config):
        objective = SequenceToSequence()
        return make_pretraining(PretrainConfig(model=config, objective=objective, data=Spans()), None).init_params

    for name, config in (("t5", T5_SMALL), ("t5_1_1", T5_1_1_SMALL)):
        small = replace(config, vocab_size=3000, num_encoder_layers=2, num_layers=2)
        drawn = jax.jit(lambda key, small=small: nn.unbox(init(small)(key)))(jax.random.key(0))
        d, inner = config.width, config.num_heads * config.head_width
        declared = [round(size**-0.5, 5) for size in (d * 64, d, inner, config.feed_forward_width)]
        boxed = jax.eval_shape(init(config), jax.random.key(0))
        compare(f"{name}.txt", table(boxed, drawn, 1.0, *declared), update_golden)


def test_sequence_head(update_golden):
    """Fails when the head of fine-tuning changes: its kernel is decayed, its bias is not."""
    head = SequenceHead(kind="classification", outputs=3, dropout_rate=0.1, init_std=0.02)
    states = np.zeros((1, 1, 768), np.float32)
    init = lambda key: {"head": head.init(key, states, train=False)["params"]}  # noqa: E731
    boxed = jax.eval_shape(init, jax.random.key(0))
    compare("sequence_head.txt", table(boxed, nn.unbox(init(jax.random.key(0))), 0.02), update_golden)


def test_bert(update_golden):
    """Fails when a parameter of BERT or of its pretraining heads changes: the draw is cut at two sigma, unscaled."""
    small = replace(BERT_BASE, vocab_size=2000, num_layers=2)
    drawn = jax.jit(lambda key: nn.unbox(init_bert(small)(key)))(jax.random.key(0))
    for leaf in jax.tree.leaves(drawn["backbone"]["blocks"]):
        assert not leaf.any() or np.all(leaf == 1) or not np.array_equal(leaf[0], leaf[1]), "layers start alike"
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(drawn) if not np.all(leaf == 1)) < 0.04
    compare("bert.txt", table(bert_shapes(BERT_BASE), drawn, round(0.02 * CUT, 4)), update_golden)


def test_bert_heads(update_golden):
    """Fails when a head of fine-tuning changes: kernels are decayed, biases, and the weights of layers, are not."""
    states, lengths = np.zeros((5, 1, 1, 768), np.float32), np.ones((1, 1), np.int32)
    heads = {
        "classification": PooledHead("classification", 3, 0.1, 0.02),
        "span": SpanHead(0.02),
        "tagging": TaggingHead(9, 0.1, 0.02),
    }
    init = lambda head, *inputs: lambda key: head.init(key, *inputs, train=False)["params"]  # noqa: E731
    makers = {name: init(head, states[0]) for name, head in heads.items()}
    makers["feature_based"] = init(LSTMHead(heads["tagging"], "weighted_all"), states, lengths)
    make = lambda key: {name: maker(key) for name, maker in makers.items()}  # noqa: E731
    boxed, drawn = jax.eval_shape(make, jax.random.key(0)), jax.jit(lambda key: nn.unbox(make(key)))(jax.random.key(0))
    compare("bert_heads.txt", table(boxed, drawn, round(0.02 * CUT, 4)), update_golden)


def test_cross_view_head(update_golden):
    """Fails when a module of CVT's head has another input, or its kernels are not decayed, or not Glorot's."""
    head = CrossViewHead(23, 512, OF_DIRECTIONS)
    layers = head.example_inputs(BiLSTMConfig(width=1024))
    make = lambda key: head.init(key, *layers, train=False)["params"]  # noqa: E731
    boxed, drawn = jax.eval_shape(make, jax.random.key(0)), jax.jit(lambda key: nn.unbox(make(key)))(jax.random.key(0))
    compare("cross_view.txt", table(boxed, drawn), update_golden)


def test_bcn_head(update_golden):
    """Fails when a module of either form has another input, a kernel is not decayed, or begins elsewhere."""
    heads = {"pair": BCNHead("classification", 6, (0.0,) * 3, 8), "self": SelfBCNHead("classification", 6, (0.0,) * 3)}
    inputs = heads["self"].example_inputs(BiLSTMConfig(width=600))
    make = lambda key: {name: dict(head.init(key, *inputs, train=False)) for name, head in heads.items()}  # noqa: E731
    boxed, drawn = jax.eval_shape(make, jax.random.key(0)), jax.jit(lambda key: nn.unbox(make(key)))(jax.random.key(0))
    compare("bcn.txt", table(boxed, drawn), update_golden)


@pytest.mark.parametrize("std", [0.02, 0.049])
def test_the_table_can_tell(std):
    """Fails when the measurement would pass a deviation that is wrong by a few percent, or a truncated draw."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal(20_000)
    assert measured_initialiser(std * x, std) == f"normal {std}"
    assert measured_initialiser(1.05 * std * x, std) != f"normal {std}"
    assert measured_initialiser(std * x[np.abs(x) < 2] / x[np.abs(x) < 2].std(), std) == f"truncated normal {std}"
    assert measured_initialiser(rng.uniform(-std, std, 20_000), std) == f"uniform {std:.3f}"
    assert measured_initialiser(np.zeros(3), std) == "zeros" and measured_initialiser(np.ones(3), std) == "ones"
