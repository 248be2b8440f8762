"""Random second parts of pairs: whose documents, where in them, and that their lengths do not tell them from true ones.

Statistics use fixed seeds, with bounds that a right program with other seeds fails once in a million.
"""

import dataclasses
import hashlib
import itertools
from collections import Counter

import numpy as np
import pytest
from pair_store import epoch_of, pair_store, random_documents, rows_of, with_lengths
from scipy import stats
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.metrics import roc_auc_score

# SHA-256 of two epochs of all rows of `store`, as 192edfa makes them, by what differs from the defaults and length.
GOLDEN_ROWS = [
    ({}, 24, "afc1e1a41e0e0e1e"),
    ({}, 64, "ed85328df2735aae"),
    ({"chunks": "whole"}, 24, "b4f64b75e79b0e8f"),
    ({"chunks": "whole"}, 64, "9f866df53794c70c"),
    ({"one_sentence": "random", "short_target_drawn": "document"}, 24, "e433952252e5f9c5"),
    ({"one_sentence": "random", "short_target_drawn": "document"}, 64, "1b973a5e188bc1ea"),
    ({"random_share": 1.0, "pairs_per_row": 1}, 24, "f9cecb378843eb1c"),
    ({"random_share": 1.0, "pairs_per_row": 1}, 64, "29d30467c841c19c"),
    ({"random_candidates": 1}, 24, "2e016732f66a79aa"),
    ({"random_candidates": 1}, 64, "650993984bd3d589"),
]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return pair_store(tmp_path_factory.mktemp("pairs") / "store", random_documents(60))


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """A store whose 100 documents all have twenty sentences of two to nine words, and its rows."""
    lengths = np.random.default_rng(1).integers(2, 10, size=(100, 20)).tolist()
    store = pair_store(tmp_path_factory.mktemp("many") / "store", lengths)
    return store, rows_of(store, length=48)


@pytest.mark.parametrize(("changes", "length", "digest"), GOLDEN_ROWS)
def test_pairs_are_those_of_the_runs_that_were_made_with_them(store, changes, length, digest):
    """Every bit of two epochs: a run that resumes under another scheme would see other pairs."""
    rows = rows_of(store, length=length, seed=5, **changes)
    hashed = hashlib.sha256()
    for epoch in (0, 1):
        batch, _ = epoch_of(rows, epoch)
        for field in dataclasses.fields(batch):
            hashed.update(np.ascontiguousarray(getattr(batch, field.name)).astype("<u4").tobytes())
    assert hashed.hexdigest().startswith(digest)


def random_parts_of(origins, documents):
    """How often each document gave the second part of a random pair, which is never the document of the first."""
    pairs = Counter((origin.first.document, origin.second.document) for origin in origins if not origin.is_next)
    assert all(one != other for one, other in pairs)
    counts = np.zeros(documents, int)
    for (_, other), count in pairs.items():
        counts[other] += count
    return counts


def test_other_documents_are_uniform_and_other(many):
    store, rows = many
    first = rows_of(store, length=48, random_candidates=1)
    one, found = (
        [origin for epoch in range(40) for origin in itertools.chain(*epoch_of(some, epoch)[1])]
        for some in (first, rows)
    )
    assert stats.chisquare(random_parts_of(one, 100)).pvalue > 1e-6
    # Of several candidates the nearest in length is taken: one of these documents more often than another, none seldom.
    counts = random_parts_of(found, 100)
    assert counts.sum() > 5_000 and 0.5 < counts.min() / counts.mean() and counts.max() / counts.mean() < 2


def test_candidates_are_drawn_uniformly(many):
    """Each from any other document, beginning at any of its sentences from which it can be as long as is wanted."""
    store, rows = many
    (source,) = rows.sources
    parts, draws, counts, begun = source.random_parts, source._numbers(0, 0), np.zeros(100, int), Counter()
    starts = np.asarray(store.document_starts)
    for _ in range(1_500):
        begins, ends = parts._whole_sentences(*parts._other_documents(int(starts[3]), draws), 20, truncates=False)
        documents = np.searchsorted(starts, begins, side="right") - 1
        assert (ends <= starts[documents + 1]).all() and (ends - begins <= 20).all() and (ends >= begins).all()
        np.add.at(counts, documents, 1)
        begun.update(begins[documents == 40].tolist())
    assert counts[3] == 0 and stats.chisquare(np.delete(counts, 3)).pvalue > 1e-6
    sentences = np.asarray(store.sentence_starts)
    possible = sentences[(sentences >= starts[40]) & (sentences <= starts[41] - 20)].tolist()
    assert set(begun) == set(possible) and stats.chisquare(list(begun.values())).pvalue > 1e-6


def test_books_are_drawn_uniformly(store):
    """Also where the sentences of some are short, so that they have a stretch of any length."""
    rng = np.random.default_rng(0)
    books = with_lengths(store, [rng.integers(2, 6 if book < 10 else 40, size=100).tolist() for book in range(20)])
    (source,) = rows_of(books, length=48, chunks="whole").sources
    origins = [origin for epoch in range(8) for row in range(source.rows) for origin in source.origin(row, epoch)]
    drawn = np.array([origin.second.document for origin in origins if not origin.is_next])
    assert len(drawn) > 2_500 and abs(np.mean(drawn < 10) - 0.5) < 0.06


@pytest.mark.parametrize("chunks", ["whole", "filled"])
def test_the_end_of_a_long_sentence_does_not_tell_a_random_one(store, chunks):
    """Fails on 2968321: where a sentence was longer than its chunk a random part still ended with one, a true one not.

    So 97 % of random parts ended with a sentence, and 57 % of true ones, for books in rows of 32.
    """
    rng = np.random.default_rng(0)
    long = with_lengths(store, [rng.integers(20, 120, size=12).tolist() for _ in range(40)])
    (source,) = rows_of(long, length=24, chunks=chunks).sources
    borders = np.isin(np.arange(long.num_tokens + 1), long.sentence_starts)
    pairs = [
        pair
        for epoch in range(3)
        for row in range(source.rows)
        for pair in source._pairs(row, source._numbers(row, epoch))
    ]
    for place in ("second", "second_end"):
        true, random = (
            np.mean([borders[getattr(pair, place)] for pair in pairs if pair.is_next == label])
            for label in (True, False)
        )
        assert abs(true - random) < 0.06 and len(pairs) > 2_500, (place, true, random)
    sizes = [np.mean([p.second_end - p.second for p in pairs if p.is_next == label]) for label in (True, False)]
    assert 0.97 < sizes[0] / sizes[1] < 1.03


def test_the_end_of_a_pair_does_not_tell_a_random_one(many):
    """Sides begin and end with sentences as often in true and random pairs, or the task would be to see a full stop."""
    store, _ = many
    borders = np.zeros(store.num_tokens + 1, bool)
    borders[np.asarray(store.sentence_starts)] = True
    for chunks in ("whole", "filled"):
        rows = rows_of(store, length=48, chunks=chunks)
        shares = {True: [], False: []}
        for origin in (o for epoch in range(30) for o in itertools.chain(*epoch_of(rows, epoch)[1])):
            start = int(store.document_starts[origin.second.document]) + origin.second.token
            shares[origin.is_next].append((borders[start], borders[start + origin.second.tokens], origin.second.tokens))
        true, random = (np.mean(shares[label], axis=0) for label in (True, False))
        assert np.abs(true[:2] - random[:2]).max() < 0.06, (chunks, true, random)
        assert 0.97 < true[2] / random[2] < 1.03, (chunks, true, random)


def lengths_tell(make, pairs, repetitions=3, **changes):
    """The AUC with which boosted trees tell random pairs by the lengths of their parts, mean of some repetitions.

    make(half): the store that the trees learn from (0) or that they are tested on (1); pairs: of each, the first ones.
    """
    found = []
    for repetition in range(repetitions):
        seen = []
        for half in (0, 1):
            (source,) = rows_of(make(half), length=128, seed=repetition, **changes).sources
            rows = ((row, epoch) for epoch in itertools.count() for row in _random_order(source.rows, epoch))
            some = (pair for row, epoch in rows for pair in source._pairs(row, source._numbers(row, epoch)))
            taken = [
                (pair.first_end - pair.first, pair.second_end - pair.second, pair.is_next)
                for pair in itertools.islice(some, pairs)
            ]
            a, b, is_next = np.array(taken).T
            seen.append((np.stack([a, b, a + b], axis=1), is_next == 0))
        (x, label), (unseen, truth) = seen
        trees = HistGradientBoostingClassifier(random_state=0).fit(x, label)
        found.append(roc_auc_score(truth, trees.predict_proba(unseen)[:, 1]))
    return np.mean(found)


def _random_order(rows, epoch):
    return np.random.default_rng(epoch).permutation(rows).tolist()


def cut_into(lengths, fewest, most, rng):
    """The sentences of a document as documents of `fewest` to `most` sentences, which are drawn."""
    ends = np.cumsum(rng.integers(fewest, most + 1, size=len(lengths)))
    return [part for part in np.split(lengths, ends[ends < len(lengths)]) if len(part)]


# Documents that books are cut into: by the fewest and the most sentences, None for whole books.
DOCUMENTS_OF = {"books": None, "paragraphs": (2, 6), "short": (2, 3)}


@pytest.mark.parametrize("chunks", ["filled", "whole"])
@pytest.mark.parametrize("kind", DOCUMENTS_OF)
def test_lengths_do_not_tell_random_pairs(store, kind, chunks):
    """Trained and tested on other generated documents. Fails on 2968321 for all but books that fill rows."""

    def make(half):
        rng = np.random.default_rng(half)
        books = [rng.integers(5, 40, size=200) for _ in range(30)]
        cut = DOCUMENTS_OF[kind]
        return with_lengths(store, books if cut is None else [part for b in books for part in cut_into(b, *cut, rng)])

    assert lengths_tell(make, 4_000, repetitions=1, chunks=chunks) < 0.57


@pytest.fixture(scope="module")
def real_books(data_directory, tmp_path_factory):
    """A store, and the lengths of the sentences of each of the real books: those of valid, those of test."""
    from toy_store import write_store

    from jaxlm.text import tokenizer_from_spec

    vocabulary = data_directory / "vocab" / "bert" / "bert-base-uncased-vocab.txt"
    halves = []
    for split in ("valid", "test"):
        texts = [path.read_text(encoding="utf-8") for path in sorted((data_directory / "books" / split).glob("*.txt"))]
        path = tmp_path_factory.mktemp("books") / split
        store = write_store(path, texts, tokenizer_from_spec(f"wordpiece:{vocabulary}"), sentences="split")
        borders = np.searchsorted(store.sentence_starts, store.document_starts[1:-1])
        halves.append(np.split(np.diff(store.sentence_starts), borders))
    return store, halves


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "most", "chunks"),
    [
        ("books", 0.56, "filled"),
        ("paragraphs", 0.57, "whole"),
        ("short", 0.57, "filled"),
        pytest.param("books", 0.56, "whole", marks=pytest.mark.campaign),
        pytest.param("paragraphs", 0.57, "filled", marks=pytest.mark.campaign),
        pytest.param("short", 0.57, "whole", marks=pytest.mark.campaign),
    ],
)
def test_lengths_do_not_tell_random_pairs_of_books(real_books, kind, most, chunks):
    """Trained and tested on different real books. Fails on 2968321 for all but whole books that fill rows."""
    store, halves = real_books
    cut = DOCUMENTS_OF[kind]

    def make(half):
        rng = np.random.default_rng(half)
        books = halves[half]
        return with_lengths(store, books if cut is None else [part for b in books for part in cut_into(b, *cut, rng)])

    assert lengths_tell(make, 10_000, chunks=chunks) <= most
