"""What holds for T5 alone: its source, packing, generation as Hugging Face's, and layers of two stacks."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from parity import t5_case as case
from test_t5_parity import NAMES, expected, parts
from toy import packed, with_source

from jaxlm.inference.decoding import CachedModel, Prompt
from jaxlm.inference.strategies import BeamSearch, Sampler, Sampling
from jaxlm.models import build
from jaxlm.models.t5 import T5_1_1_BASE, T5_BASE, T5_LARGE, T5_SMALL, T5Config
from jaxlm.objectives.language_model import inputs_of
from jaxlm.training.optimizer import parameter_rules
from jaxlm.training.optimizer_variants import layer_groups

GENERATED = 64


@pytest.mark.parametrize(
    ("config", "parameters"),
    # Those of Hugging Face's models of these sizes; 222,903,552 are also the published count of the base model.
    [(T5_SMALL, 60_506_624), (T5_BASE, 222_903_552), (T5_LARGE, 737_668_096), (T5_1_1_BASE, 247_577_856)],
)
def test_published_sizes_have_the_published_number_of_parameters(config, parameters):
    model = build(config)
    shapes = jax.eval_shape(lambda key: (model.init(key), model.output_layer.init(key)), jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == parameters


def test_a_state_depends_on_all_of_its_own_source_alone():
    """Fails when the padding or another segment of a source is seen, or its last token is not."""
    model, params, _ = parts("t5")
    batch = with_source(packed(3, vocab_size=31), vocab_size=31)
    states = jax.jit(lambda source: model(params, inputs_of(batch.replace(source=source))).states)
    before = np.asarray(states(batch.source))
    for at in (0, 4, 5, 8, 9):
        source = np.array(batch.source)
        source[:, at] = (source[:, at] + 1) % 31
        changed = np.abs(np.asarray(states(source)) - before).max(-1)
        seen = (batch.segments > 0) & (batch.segments == batch.source_segments[:, at : at + 1])
        assert np.all(changed[seen] > 1e-6) and not np.any(changed[(batch.segments > 0) & ~seen])


def test_packed_rows_have_the_states_of_unpacked_ones():
    """Fails when a distance is counted across segments, or a segment of the target reads another source."""
    model, params, _ = parts("t5_1_1")
    batch = with_source(packed(3, vocab_size=31), vocab_size=31)
    whole = np.asarray(model(params, inputs_of(batch)).states)
    for row, segment in ((0, 1), (0, 2), (2, 2)):
        own, of_source = batch.segments[row] == segment, batch.source_segments[row] == segment
        alone = replace(
            batch,
            ids=batch.ids[row, own][None],
            positions=batch.positions[row, own][None],
            segments=None,
            source=batch.source[row, of_source][None],
            source_segments=None,
        )
        np.testing.assert_allclose(model(params, inputs_of(alone)).states[0], whole[row, own], atol=1e-5)


def prompts_of(name: str) -> list[Prompt]:
    rows = expected(name, "rows")
    lengths = rows["source_segments"].sum(axis=1)
    return [
        Prompt([case.PAD], GENERATED, source=ids[:length].tolist())
        for ids, length in zip(rows["source"], lengths, strict=True)
    ]


@pytest.mark.parametrize("name", NAMES)
def test_greedy_ids_are_hugging_faces(name):
    """Fails when the cache gives a token another distance, or the source is padded with tokens that are seen."""
    model, params, _ = parts(name)
    cached = CachedModel(model, params, end=case.END)
    steps = np.array([ids[:, 0] for ids in Sampler(cached, Sampling(temperature=0.0))(prompts_of(name))]).T
    found = np.pad(np.maximum(steps, 0), ((0, 0), (0, GENERATED - steps.shape[1])))
    wanted = expected(name, "generated")["greedy"]
    assert max(len(set(row)) for row in wanted.tolist()) > 5, "ids that repeat prove little"
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("name", NAMES)
def test_beams_are_hugging_faces(name):
    """Fails when a beam reads the source of another text: the keys of the sources stay where they are."""
    model, params, _ = parts(name)
    search = BeamSearch(CachedModel(model, params, end=case.END), 3)
    found = [hypotheses[0].tokens for hypotheses in search(prompts_of(name))]
    wanted = expected(name, "generated")["beams"].tolist()
    wanted = [ids[: ids.index(case.END) + 1] if case.END in ids else ids for ids in wanted]  # the rest is padding
    assert max(len(ids) for ids in wanted) > 20 and found == wanted


def test_layers_are_counted_through_both_stacks():
    """Fails when the decoder's first layer does not follow the encoder's last one, or a stack gets all rates."""
    model = build(T5Config(vocab_size=9, num_encoder_layers=3, num_layers=2, width=8, num_heads=2, head_width=4))
    shapes = jax.eval_shape(lambda: {"backbone": model.init(jax.random.key(0))})
    groups = layer_groups(model.family, model.config, decay=2.0, frozen_layers=1, gradual=True)
    found = {}
    for path, rule in jax.tree_util.tree_leaves_with_path(parameter_rules(shapes, groups)):
        found.setdefault(path[1].key, set()).add((rule.rate, rule.unfreeze_stage))
    assert found["encoder_blocks"] == {((0.0, 1 / 16, 1 / 8), (0, 4, 3))}
    assert found["decoder_blocks"] == {((1 / 4, 1 / 2), (2, 1))}
    assert found["embeddings"] == {(1 / 64, 5)}
