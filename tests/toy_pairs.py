"""A toy BERT and rows of sentence pairs, packed and one by one. NumPy and jaxlm, nothing random that is not seeded."""

from dataclasses import replace

import jax
import numpy as np
from flax import linen as nn

from jaxlm.data.batch import PairBatch
from jaxlm.models import build
from jaxlm.models.bert import BertConfig, NextSentenceHead
from jaxlm.models.family import Inputs
from jaxlm.nn.execution import Execution
from jaxlm.objectives.masked_lm import masked_language_model
from jaxlm.objectives.masking import MaskingConfig, Specials

# Weights wide enough that attention is far from uniform and every parameter matters.
TOY_BERT = BertConfig(
    vocab_size=64, num_positions=32, num_layers=2, width=32, num_heads=4, feed_forward_width=64, init_std=0.3
)
STILL_BERT = replace(TOY_BERT, dropout_rate=0.0, embedding_dropout_rate=0.0, attention_dropout_rate=0.0)
LENGTH = TOY_BERT.num_positions
SPECIALS = Specials(cls=2, sep=3, mask=4)
FIRST_WORD = 5
CONTINUES = np.arange(64) % 3 == 0  # a third of the pieces continue a word
CONTINUES[:FIRST_WORD] = False
SLOTS = 8
PLAIN = Execution()


def init_bert(config: BertConfig):
    """A function from a key to the parameters of a pretraining run, boxed with their logical axes."""
    states = np.zeros((1, 1, config.width), np.float32)

    def init(key):
        model, next_sentence = build(config), NextSentenceHead(config.init_std).init(key, states)["params"]
        return {"backbone": model.init(key), "head": model.output_layer.init(key) | {"next_sentence": next_sentence}}

    return init


def bert_shapes(config: BertConfig):
    """The shapes of `init_bert`'s parameters, boxed."""
    return jax.eval_shape(init_bert(config), jax.random.key(0))


def random_tree(shapes, std: float, seed: int = 0):
    """Parameters of these shapes, all random, biases and gains too; made with NumPy, so nothing is compiled."""
    rng = np.random.default_rng(seed)

    def fill(path, x):
        name = path[-1].key
        deviation = 0.2 if name == "scale" or name.endswith("bias") else std
        return np.float32(deviation) * rng.standard_normal(x.shape, np.float32) + np.float32(name == "scale")

    return jax.tree_util.tree_map_with_path(fill, nn.unbox(shapes))


def random_bert(config: BertConfig, seed: int = 0):
    """Random parameters of a pretraining run."""
    return random_tree(bert_shapes(config), config.init_std, seed)


def make_pair(rng: np.random.Generator, length: int, vocab_size: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """CLS A SEP B SEP of `length` tokens, and its types."""
    border = int(rng.integers(2, length - 2))  # of the first SEP
    ids = rng.integers(FIRST_WORD, vocab_size, size=length).astype(np.int32)
    ids[0], ids[border], ids[-1] = SPECIALS.cls, SPECIALS.sep, SPECIALS.sep
    return ids, (np.arange(length) > border).astype(np.int32)


def pair_rows(rows: int, *, pairs: int = 3, length: int = LENGTH, vocab_size: int = 64, seed: int = 0) -> PairBatch:
    """Rows of 1 to `pairs` pairs and some padding."""
    rng = np.random.default_rng(seed)
    fields = {name: np.zeros((rows, length), np.int32) for name in ("ids", "types", "positions", "segments")}
    firsts, labels = np.zeros((rows, pairs), np.int32), np.zeros((rows, pairs), np.int32)
    weights = np.zeros((rows, pairs), np.float32)
    for row in range(rows):
        count = 1 + row % pairs
        used = length - int(rng.integers(0, 5))
        cuts = np.linspace(0, used, count + 1).astype(int)
        for number, (start, end) in enumerate(zip(cuts[:-1], cuts[1:], strict=True)):
            ids, types = make_pair(rng, end - start, vocab_size)
            fields["ids"][row, start:end], fields["types"][row, start:end] = ids, types
            fields["positions"][row, start:end] = np.arange(end - start)
            fields["segments"][row, start:end] = number + 1
            firsts[row, number], labels[row, number], weights[row, number] = start, rng.integers(2), 1
    seeds = rng.integers(2**32, size=(rows, 2), dtype=np.uint32)
    return PairBatch(**fields, firsts=firsts, next_labels=labels, pair_weights=weights, mask_seeds=seeds)


def inputs_of(batch: PairBatch) -> Inputs:
    """Return the inputs of a model for a batch, unmasked."""
    return Inputs(batch.ids, batch.positions, batch.segments, batch.types)


def one_by_one(batch: PairBatch, length: int = LENGTH) -> PairBatch:
    """The same pairs, one a row, each seeded as it was among its neighbours."""
    rows = []
    for row in range(len(batch.ids)):
        for pair in np.flatnonzero(batch.pair_weights[row]):
            places = np.flatnonzero(batch.segments[row] == pair + 1)
            cut = lambda x, row=row, places=places: np.pad(x[row, places], (0, length - len(places)))  # noqa: E731
            first, second = (int(word) for word in batch.mask_seeds[row])
            rows.append(
                PairBatch(
                    ids=cut(batch.ids),
                    types=cut(batch.types),
                    positions=cut(batch.positions),
                    segments=(cut(batch.segments) > 0).astype(np.int32),
                    firsts=np.zeros(1, np.int32),
                    next_labels=batch.next_labels[row, pair : pair + 1],
                    pair_weights=np.ones(1, np.float32),
                    mask_seeds=np.array([first, (second + int(pair)) % 2**32], np.uint32),
                )
            )
    return jax.tree.map(lambda *x: np.stack(x), *rows)


def pretraining(
    config: BertConfig,
    execution: Execution = PLAIN,
    *,
    masking: MaskingConfig | None = None,
    slots: int = SLOTS,
    coefficient: float = 1.0,
    loss_chunks: int = 0,
):
    """MLM + NSP of a toy BERT."""
    return masked_language_model(
        build(config, execution),
        NextSentenceHead(config.init_std) if coefficient else None,
        masking=MaskingConfig() if masking is None else masking,
        specials=SPECIALS,
        continues=CONTINUES,
        slots=lambda batch: slots,
        next_sentence_coefficient=coefficient,
        loss_chunks=loss_chunks,
    )
