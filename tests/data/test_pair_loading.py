"""Pairs on their way to a run: two lengths, validation, names of rows, and input of which no pair can be made."""

import dataclasses

import numpy as np
import pytest
from pair_store import PAIRS, epoch_of, pair_store, random_documents, rows_of, same, word_tokenizer
from toy_store import rows_per_epoch

from jaxlm.data.config import Packed
from jaxlm.data.layouts.layout import Reading
from jaxlm.data.loader import batch_at, batches, describe_rows, phase_at, phased_rows, phases
from jaxlm.data.rows import training_rows
from jaxlm.errors import InputError

DOCUMENTS = random_documents(60)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return pair_store(tmp_path_factory.mktemp("pairs") / "store", DOCUMENTS)


@pytest.mark.parametrize(
    ("documents", "changes", "rule"),
    [
        ([[5, 5], [5, 5]], {"sentences": "none"}, "keeps no sentences.*prepare it again with --sentences split"),
        ([[5, 5]], {}, "is one document.*data.random_share 0"),
        ([[5], [6], [7]], {}, "each of its 3 documents is one sentence.*--sentences split"),
        ([[1], [1]], {}, "no chunk of 2 tokens"),
        ([[5, 5], [5, 5]], {"length": 4}, "rows of pairs must have at least 5 slots .*, got 4"),
    ],
)
def test_what_no_pair_can_be_made_of_says_so(tmp_path, documents, changes, rule):
    store = pair_store(tmp_path / "s", documents, sentences=changes.pop("sentences", "lines"))
    with pytest.raises(InputError, match=rule) as caught:
        rows_of(store, **changes)
    assert "\n" not in str(caught.value)


def test_one_document_is_enough_where_no_pair_is_random(tmp_path):
    rows = rows_of(pair_store(tmp_path / "s", [[5, 5, 6]]), length=24, random_share=0.0)
    assert not rows.read(range(20)).next_labels.any()
    rows = rows_of(pair_store(tmp_path / "t", [[5], [6]]), length=24, random_share=0.0)
    assert not rows.read(range(20)).next_labels.any()


@pytest.mark.parametrize("missing", ["[CLS]", "[SEP]", "[MASK]"])
def test_a_vocabulary_without_its_special_tokens_is_refused(tmp_path, missing):
    specials = [name for name in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]") if name != missing]
    store = pair_store(tmp_path / "s", [[5, 5], [5, 5]], tokenizer=word_tokenizer(30, specials))
    with pytest.raises(InputError, match=f"has no {missing[1:-1]}, which pairs and masks need; prepare it again"):
        rows_of(store)


def test_phases_are_a_function_of_the_step():
    data = dataclasses.replace(PAIRS, short_length=16, short_share=0.9)
    found = phases(data, length=64, num_steps=1_000_000)
    assert [(phase.length, phase.first_step, phase.end_step) for phase in found] == [
        (16, 0, 900_000),
        (64, 900_000, 1_000_000),
    ]
    assert [phase_at(step, found).length for step in (0, 899_999, 900_000, 10**9)] == [16, 16, 64, 64]
    assert [phase.length for phase in phases(PAIRS, length=64, num_steps=10)] == [64]
    for share, lengths in ((0.0, [64]), (1.0, [16])):
        only = phases(dataclasses.replace(data, short_share=share), length=64, num_steps=10)
        assert [phase.length for phase in only] == lengths
    with pytest.raises(InputError, match=r"data\.short_length must be below length 64, got 64"):
        phases(dataclasses.replace(data, short_length=64), length=64, num_steps=10)
    assert [phase.length for phase in phases(Packed(), length=64, num_steps=10)] == [64]


def test_a_run_of_two_lengths_reads_on_across_the_switch(store):
    """The loader, by step: contents of each phase from its own row 0 on, whatever step a process starts at."""
    data = dataclasses.replace(PAIRS, short_length=16, short_share=0.75)
    make = lambda: phased_rows(data, Reading([store], length=64, seed=5, batch_size=4), 8)  # noqa: E731
    rows = make()
    short, long = (training_rows([store], data, length=length, seed=5) for length in (16, 64))
    expected = [batch_at(short, step, 4) for step in range(6)] + [batch_at(long, step, 4) for step in range(2)]
    for first in (0, 5, 6):
        stream = batches(make(), batch_size=4, host_rows=np.arange(4), first_step=first)
        for step in range(first, 8):
            assert same(next(stream), expected[step]), step
    assert [batch.ids.shape[1] for batch in expected] == [16] * 6 + [64] * 2
    assert same(rows.read([24]), long.read([0])) and rows.origin(25) == long.origin(1)
    assert describe_rows(rows, 6, 4).startswith("rows 24 to 27: ")


def test_a_bad_row_is_named_by_documents_and_tokens(store):
    rows = rows_of(store)
    said = describe_rows(rows, 3, 8, most=2)
    origin = rows.origin(24)[0]
    assert f"document {origin.first.document} token {origin.first.token} + document {origin.second.document}" in said
    assert "\n" not in said and ("(next)" in said or "(random)" in said)


@pytest.mark.parametrize("batch_size", [1, 4, 7])
def test_validation_sees_every_pair_once(store, tmp_path, batch_size):
    other = pair_store(tmp_path / "other", random_documents(7, 9))
    held_out = PAIRS.validation_rows(Reading([store, other], length=64, batch_size=batch_size))
    read = list(held_out)
    assert len(read) == len(held_out) and held_out.num_targets == sum(batch.pair_weights.sum() for batch in read)
    seeds = np.concatenate([batch.mask_seeds for batch in read])
    pairs = np.concatenate([batch.pair_weights.sum(axis=1) for batch in read])
    rows = sum(rows_per_epoch([store, other], PAIRS, 64))
    assert (pairs[:rows] > 0).all() and not pairs[rows:].any() and len(pairs) - rows < batch_size
    assert not read[-1].segments[pairs[-batch_size:] == 0].any()
    assert len({tuple(words) for words in seeds[:rows].tolist()}) == rows
    # The pairs of epoch 0 of seed 0, in the plan's order.
    batch, _ = epoch_of(rows_of(store))
    joined = np.concatenate([batch.ids for batch in read])
    np.testing.assert_array_equal(joined[: len(batch.ids)], batch.ids)


def test_validation_is_shared_among_processes(store):
    whole = PAIRS.validation_rows(Reading([store], length=64, batch_size=4))
    halves = [
        PAIRS.validation_rows(Reading([store], length=64, batch_size=4, host_rows=np.array(mine)))
        for mine in ([0, 1], [2, 3])
    ]
    for number, batch in enumerate(whole):
        joined = [
            np.concatenate(parts) for parts in zip(*(dataclasses.astuple(h[number]) for h in halves), strict=True)
        ]
        assert same(type(batch)(*joined), batch)
    with pytest.raises(IndexError):
        whole[len(whole)]
