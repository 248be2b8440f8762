"""Masked language models on plain and packed text: RoBERTa's FULL-SENTENCES and DOC-SENTENCES (Liu et al., 2019)."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from toy_pairs import SPECIALS, STILL_BERT
from toy_runs import checksums, copy_at, make_stores, metrics, run_here, sentences

from jaxlm.config import load_config
from jaxlm.data.batch import Batch, mask_seeds
from jaxlm.data.config import Streams
from jaxlm.errors import InputError
from jaxlm.models import build
from jaxlm.models.model import Inputs
from jaxlm.objectives.masked_lm import MaskingConfig, masked_language_model
from jaxlm.text import train_wordpiece
from jaxlm.training.config import PretrainConfig

pytestmark = pytest.mark.usefixtures("two_devices")

MASKING, LENGTH = MaskingConfig(rate=0.3), 16


def rows_of(segments: list[list[int]], seed: int = 0) -> Batch:
    segments_BL = np.array(segments, np.int32)
    rng = np.random.default_rng(seed)
    ids = rng.integers(10, STILL_BERT.vocab_size, size=segments_BL.shape).astype(np.int32)
    positions = np.zeros_like(ids)
    for row, found in enumerate(segments_BL):
        for segment in set(found.tolist()):
            positions[row, found == segment] = np.arange((found == segment).sum())
    real = segments_BL > 0
    weights = real.astype(np.float32)
    return Batch(ids * real, ids * real, positions, segments_BL, weights, mask_seeds=mask_seeds(3, range(len(ids))))


def objective_of(model):
    return masked_language_model(
        model, None, masking=MASKING, specials=SPECIALS, continues=None, slots=lambda batch: batch.ids.shape[1]
    )


WINDOWS = [[1] * LENGTH, [1] * LENGTH]
PACKED = [[1] * 9 + [2] * 7, [1] * 5 + [2] * 4 + [0] * 7]


@pytest.mark.parametrize("segments", [WINDOWS, PACKED], ids=["windows", "packed"])
def test_the_loss_is_that_of_the_masked_tokens(segments):
    """Fails when another token is predicted, CLS or padding is chosen, or a segment lacks its CLS.

    The loss is computed once more from the model's logits at every position, in float64 on the host.
    """
    model, batch = build(STILL_BERT), rows_of(segments)
    body, words = jax.random.split(jax.random.key(1))
    params = {"backbone": nn.unbox(model.init(body)), "head": nn.unbox(model.output_layer.init(words))}
    objective = objective_of(model)
    prepared = objective.prepare(batch)
    sums, _ = objective.sums(params, prepared, None, None)
    masked, rows = prepared.masked, prepared.batch
    first = (batch.segments > 0) & (batch.positions == 0)
    assert (np.asarray(rows.ids)[first] == SPECIALS.cls).all() and (np.asarray(rows.ids) == batch.ids)[~first].all()
    outputs = model(params, Inputs(masked.ids_BL, batch.positions, batch.segments))
    logits = np.asarray(model.logits(params, outputs.states, outputs.output), np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    total, count = 0.0, 0
    for row in range(len(batch.ids)):
        for place, weight in zip(np.asarray(masked.where_BM[row]), np.asarray(masked.weights_BM[row]), strict=True):
            if weight:
                assert batch.segments[row, place] > 0 and not first[row, place]
                total -= log_probs[row, place, batch.ids[row, place]]
                count += 1
    expected = sum(max(1, round(0.3 * n)) for row in segments for s in {*row} - {0} if (n := row.count(s)))
    assert count == expected == float(objective.weights(prepared)["masked_lm_loss"])
    assert float(sums["masked_lm_loss"]) == pytest.approx(total, rel=1e-5)


def test_masks_differ_between_rows_and_epochs_and_are_the_same_for_any_process():
    """Fails when seeds repeat, or depend on which rows are asked for together."""
    seeds = mask_seeds(7, range(200))
    assert len({tuple(row) for row in seeds.tolist()}) == 200
    np.testing.assert_array_equal(mask_seeds(7, [150, 3]), seeds[[150, 3]])
    assert not np.array_equal(mask_seeds(8, range(200)), seeds)
    batch = rows_of(WINDOWS)
    chosen = [
        objective_of(build(STILL_BERT)).prepare(batch.replace(mask_seeds=jnp.asarray(mask_seeds(0, numbers)))).masked
        for numbers in ([0, 1], [2, 3], [0, 1])
    ]
    assert not np.array_equal(chosen[0].where_BM, chosen[1].where_BM)
    np.testing.assert_array_equal(chosen[0].ids_BL, chosen[2].ids_BL)


@pytest.mark.parametrize("layout", ["windows", "packed"])
def test_a_run_on_text_resumes_to_the_bit(tmp_path, layout):
    """Fails when the masks of a step depend on where the run was begun."""
    stores = make_stores(tmp_path / "stores", train_wordpiece(sentences(40), 200))
    run = tmp_path / "run"
    words = ["debug/bert", "--data.layout", layout, "--data.store", stores[0], "--data.validation", stores[1]]
    words += "--length 32 --num-steps 6 --checkpoint-every 3 --log-every 1 --eval-every 3 --model.width 16".split()
    ended = run_here("pretrain", *words, "--run", run)
    assert ended.code == 0, ended.errors
    assert "no next-sentence loss, since rows are not pairs" in ended.errors
    again = copy_at(run, 3, tmp_path / "again")
    assert run_here("pretrain", *words, "--run", again).code == 0
    assert metrics(again) == metrics(run) and checksums(again) == checksums(run)
    assert metrics(again, "validation_loss") == metrics(run, "validation_loss")


def test_streams_have_no_masks():
    """Fails when a bidirectional model is let onto streams, where it would carry nothing."""
    config = load_config("debug/bert", PretrainConfig)
    with pytest.raises(InputError, match="data.layout must be pairs, windows or packed .*, got streams"):
        replace(config, data=Streams()).check()
