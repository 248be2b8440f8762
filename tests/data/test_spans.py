"""Corrupted rows against the definition of T5's code: lengths, alternation, uniform compositions, order of rows.

The numbers of test_lengths_are_those_of_t5 were computed with random_spans_helper of google-research's
text-to-text-transfer-transformer (t5/data/preprocessors.py).
"""

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import chisquare
from toy_runs import make_stores, sentences

from jaxlm.data import spans
from jaxlm.data.batch import RandomNumbers
from jaxlm.data.config import Spans
from jaxlm.data.layouts.layout import Reading
from jaxlm.data.store import open_store
from jaxlm.errors import InputError
from jaxlm.text import bytes_tokenizer, load_tokenizer, train_sentencepiece
from jaxlm.text.tokenizer import target_marks

LENGTH = 64


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path, _ = make_stores(tmp_path_factory.mktemp("stores"))
    return open_store(path)


def rows_of(store, data: Spans | None = None, **reading):
    data = Spans() if data is None else data
    return data.rows(Reading([store], LENGTH, 8, **reading))


def numbers(row: int) -> RandomNumbers:
    return RandomNumbers(np.array([1, 2], np.uint64), [0, row, 0, 0])


@pytest.mark.parametrize(
    ("length", "text", "target", "count"), [(64, 70, 14, 3), (128, 141, 29, 7), (256, 284, 58, 14), (512, 568, 114, 28)]
)
def test_lengths_are_those_of_t5(length, text, target, count):
    """Fails when a length is rounded otherwise, the end token is left out, or a span has no sentinel."""
    data = Spans()
    found = (data.text_length(length), data.target_length(length), data.most_sentinels(length))
    assert found == (text, target, count)
    assert spans.source_tokens(text, 0.15, 3.0) == length


def test_text_and_spans_alternate():
    """Fails when a row begins with a span, ends with text, or has another number of either."""
    for row in range(50):
        mask = spans.span_mask(568, 0.15, 3.0, numbers(row))
        runs = [value for value, _ in itertools.groupby(mask.tolist())]
        assert mask.sum() == 85 and runs == [False, True] * 28


def test_compositions_are_uniform():
    """Fails when a length depends on its place: all 20 compositions of 7 into 4 parts are equally likely."""
    found = Counter(tuple(spans.composition(7, 4, numbers(row)).tolist()) for row in range(4000))
    assert len(found) == 20 and all(sum(parts) == 7 and min(parts) > 0 for parts in found)
    assert chisquare(list(found.values())).pvalue > 1e-3


def test_source_and_target_give_the_text(store):
    """Fails when a token is lost or doubled, or a span has the sentinel of another one."""
    for corruption in ("spans", "tokens", "prefix"):
        data = Spans(corruption=corruption)
        tokenizer = data.with_special_tokens(store.tokenizer())
        rows, end = rows_of(store, data), tokenizer.specials["end"]
        batch, text = rows.read(range(8)), data.text_length(LENGTH)
        assert batch.source.shape == (8, LENGTH) and batch.ids.shape == (8, data.target_length(LENGTH))
        for row in range(8):
            source = batch.source[row, : batch.source_segments[row].sum()].tolist()
            target = batch.targets[row, : batch.segments[row].sum()].tolist()
            assert source.pop() == target.pop() == end
            assert batch.ids[row, : len(target) + 1].tolist() == [tokenizer.specials["pad"], *target]
            assert batch.weights[row].sum() == len(target) + 1
            (origin,) = rows.origin(row)
            first = int(store.document_starts[origin.document]) + origin.token
            assert restored(source, target, tokenizer.sentinels) == store.tokens[first : first + text].tolist()


def restored(source: list[int], target: list[int], sentinels: tuple[int, ...]) -> list[int]:
    """Return the text of a source and its target, read by the sentinels."""
    if not set(source) & set(sentinels):
        return source + target
    missing: dict[int, list[int]] = {}
    for token in target:
        if token in sentinels:
            missing[token] = []
            current = missing[token]
        else:
            current.append(token)
    assert list(missing) == list(sentinels[: len(missing)])
    return [token for one in source for token in (missing[one] if one in sentinels else [one])]


def test_rows_are_a_function_of_seed_epoch_and_row(store):
    """Fails when a process reads other rows than one process would, or an epoch has the spans of another."""
    rows = rows_of(store)
    whole, some = rows.read(range(8)), rows_of(store).read([5, 2])
    np.testing.assert_array_equal(some.source, whole.source[[5, 2]])
    np.testing.assert_array_equal(some.targets, whole.targets[[5, 2]])
    again, other = rows_of(store, seed=1).read(range(8)), rows.read(range(rows.rows, rows.rows + 8))
    assert (again.source != whole.source).any() and (other.source != whole.source).any()
    origins = Counter(str(rows.origin(row)) for row in range(rows.rows))
    assert set(origins.values()) == {1}, "an epoch has each text once"


def test_the_last_text_of_a_section_may_be_short(store):
    """Fails when it is dropped, or its padding counts."""
    data = Spans()
    (source,) = data.sources([store], length=LENGTH, seed=0)
    batch = data.empty(1, LENGTH)
    source.fill(source.rows - 1, batch, 0, 0)
    rest = store.num_tokens - (source.rows - 1) * data.text_length(LENGTH)
    assert 1 < rest < data.text_length(LENGTH)
    text = spans.source_tokens(rest, 0.15, 3.0)
    assert batch.source_segments.sum() == text and not batch.source[0, text:].any()


def test_sentinels_are_ids_that_no_text_has(tmp_path):
    """Fails when a sentinel can be spelt, is lost when it is saved, or changes the identity of the tokenizer."""
    plain = train_sentencepiece(sentences(60), 320)
    tokenizer = plain.with_sentinels(100)
    assert tokenizer.sentinels == tuple(range(419, 319, -1)) and tokenizer.size == 420  # as <extra_id_0> is 32,099
    assert tokenizer.with_sentinels(7) is tokenizer and tokenizer.fingerprint == plain.fingerprint
    text = "one <extra_id_0> two"
    assert tokenizer.encode(text) == plain.encode(text) and tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.pieces([419, 320]) == ["<extra_id_0>", "<extra_id_99>"] and tokenizer.decode([419]) == ""
    grown = bytes_tokenizer().with_sentinels(3).with_specials(["cls"])  # a role after the sentinels
    for number, one in enumerate((tokenizer, grown)):
        one.save(tmp_path / str(number))
        loaded = load_tokenizer(tmp_path / str(number))
        assert (loaded.sentinels, loaded.size, loaded.specials) == (one.sentinels, one.size, one.specials)


def test_more_spans_than_sentinels_are_refused(store):
    with pytest.raises(InputError, match="length must leave at most 100 spans"):
        Spans(mean_span=1.0).sources([store], length=1024, seed=0)


def test_a_tokenizer_without_an_end_is_refused():
    with pytest.raises(InputError, match="must have an end token"):
        target_marks({"pad": 0}, "store")
    assert target_marks({"pad": 3, "end": 7}, "store") == (3, 7)
    assert replace(Spans(), corruption="tokens").most_sentinels(512) == 77
