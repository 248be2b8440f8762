"""Windows of varied lengths over streams: every input once an epoch, random access, and the distribution of lengths."""

import numpy as np
import pytest
from numbers_store import numbers_store

from jaxlm.data.config import LONGER, Streams
from jaxlm.data.layouts.layout import Reading
from jaxlm.data.loader import batch_at, phased_rows
from jaxlm.data.streams import StreamRows, VariedWindows


@pytest.mark.parametrize(("size", "length", "seed"), [(1000, 35, 0), (97, 12, 3), (5, 5, 1), (4000, 70, 2)])
def test_an_epoch_reads_each_input_once(size, length, seed):
    """Fails when windows overlap or leave a gap, an epoch repeats another, or a step depends on earlier calls."""
    windows, fresh = VariedWindows(size, length, seed), VariedWindows(size, length, seed)
    lengths, step = [], 0
    for epoch in range(4):
        end = 0
        while end < size:
            start, tokens = windows.place(step)
            assert start == end and windows.inputs(step) == epoch * size + start
            end, step = start + tokens, step + 1
            lengths.append(tokens)
        assert end == size and windows.steps(epoch + 1) == step
    assert max(lengths) <= length + LONGER
    for wanted in (step - 1, 0, step // 2):
        assert fresh.place(wanted) == windows.place(wanted)
    first = [windows.place(number) for number in range(windows.per_epoch)]
    second = [windows.place(windows.per_epoch + number) for number in range(windows.per_epoch)]
    assert size == 5 or first != second[: len(first)]
    assert VariedWindows(size, length, seed + 1).place(1) != windows.place(1) or size == 5


def test_lengths_are_drawn_as_in_the_original():
    """Fails when the share of short windows, the spread or a limit is another one."""
    windows = VariedWindows(2_000_000, 70, 0)
    lengths = np.array([windows.place(step)[1] for step in range(windows.per_epoch - 1)])
    short = lengths < 52
    assert short.mean() == pytest.approx(0.05, abs=0.005)
    assert lengths[short].mean() == pytest.approx(34.5, abs=0.5)  # int() cuts the fraction
    long = lengths[~short]
    assert long.mean() == pytest.approx(69.5, abs=0.2) and long.std() == pytest.approx(5, abs=0.2)
    assert lengths.max() == 80 and (lengths == 80).mean() == pytest.approx(0.95 * 0.0228, abs=0.004)
    assert min(VariedWindows(5000, 6, 1).place(step)[1] for step in range(300)) == 5


def test_rows_of_a_run_have_one_shape_and_all_tokens(tmp_path):
    """Fails when a row is cut or padded wrongly, a stream begins in the middle, or tokens are counted with padding."""
    store = numbers_store(tmp_path / "store", [400, 300, 111])
    text = np.asarray(store.tokens, np.int32)
    rows = StreamRows([store], 20, 3, "varied", seed=4)
    stream = (len(text) - 1) // 3
    found, seen = [[], [], []], 0
    for step in range(rows.windows.per_epoch):
        batch = batch_at(rows, step, 3)
        assert batch.ids.shape == (3, 20 + LONGER)
        real = batch.segments > 0
        assert (real == (batch.weights > 0)).all() and (real.sum(1) == real[0].sum()).all()
        assert batch.begins.tolist() == [step == 0] * 3
        for b in range(3):
            np.testing.assert_array_equal(batch.targets[b, : real[b].sum() - 1], batch.ids[b, 1 : real[b].sum()])
            found[b] += batch.ids[b][real[b]].tolist()
        seen += int(real.sum())
        assert rows.inputs(step + 1) * 3 == seen
    for b in range(3):
        assert found[b] == text[b * stream : (b + 1) * stream].tolist()
    assert rows.rows == rows.windows.per_epoch * 3 and "varied lengths" in rows.description()
    sizes = {"length": 20, "batch_size": 3, "seed": 4}
    data = Streams(windows="varied")
    steps = data.steps_of_passes(Reading([store], **sizes), 2.5)
    assert rows.windows.steps(2) < steps < rows.windows.steps(3)
    run = phased_rows(data, Reading([store], **sizes), steps)
    assert run.tokens_until(rows.windows.steps(2)) == [(20, 2 * 3 * stream)]
