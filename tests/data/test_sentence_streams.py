"""Streams of sentences against the batches of ELMo's code, and their order for any step, epoch and number of processes.

tests/golden/sentence_streams_parity.npz has the batches of allenai/bilm-tf, bilm/data.py (`BidirectionalLMDataset`),
which `tests/parity/freeze_sentence_streams.py` wrote.
"""

import dataclasses
import itertools
import random
from collections import Counter

import jax
import numpy as np
import pytest
from parity import sentence_streams_case as case
from parity.check import frozen
from toy_store import write_store

from jaxlm.data import sentence_streams
from jaxlm.data.config import SentenceStreams, check_order
from jaxlm.data.layouts.layout import Reading
from jaxlm.data.loader import batch_at, batches, describe_rows, phased_rows, phases, row_origins
from jaxlm.data.store import open_store
from jaxlm.errors import InputError
from jaxlm.text import load_tokenizer, train_sentencepiece, train_words
from jaxlm.text.characters import character_ids
from jaxlm.training.config import PretrainConfig
from jaxlm.views.targets import pretrain_lines

SIZE, LENGTH, BATCH = 25, 5, 4
FIELDS = ("ids", "targets", "positions", "segments", "weights")


def documents(count: int, seed: int) -> list[str]:
    """Documents of lines of words, blank lines among them; the rarest words have no id."""
    rng = random.Random(seed)
    words = [f"w{k}" for k in range(60)]
    line = lambda: " ".join(rng.choices(words, weights=range(60, 0, -1), k=rng.choice([0, 1, 3, 7, 12])))  # noqa: E731
    return ["\n".join(line() for _ in range(rng.randint(1, 6))) + " " + rng.choice(words) for _ in range(count)]


TEXTS = documents(12, 0), documents(5, 1)


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Two stores of the same vocabulary, the first one of two sections; their words without an id differ."""
    folder, tokenizer = tmp_path_factory.mktemp("stores"), train_words(TEXTS[0], SIZE)
    first = {"a": TEXTS[0][:7], "b": TEXTS[0][7:]}
    return [
        write_store(folder / "one", first, tokenizer, sentences="lines"),
        write_store(folder / "two", TEXTS[1], tokenizer, sentences="lines"),
    ]


@pytest.fixture(scope="module")
def sentences():
    """The words of each sentence of the two stores, in order."""
    return [line.split() for texts in TEXTS for text in texts for line in text.split("\n") if line.strip()]


def reading(stores, **changes):
    return Reading(stores, **{"length": LENGTH, "batch_size": BATCH, "characters": 20} | changes)


def rows_of(stores, **changes):
    return SentenceStreams().rows(reading(stores, **changes))


def marked(words, tokenizer, backward):
    """The ids and the spelling of a sentence, with its marks, in the order of a direction."""
    ids = [tokenizer.specials["start"], *tokenizer.encode(" ".join(words)), tokenizer.specials["end"]]
    spelt = ["<S>", *words, "</S>"]
    return (ids[::-1], spelt[::-1]) if backward else (ids, spelt)


def text_of(order, sentences, tokenizer, backward):
    """All inputs, targets and spellings of inputs of sentences in an order, one after the other."""
    found = [marked(sentences[number], tokenizer, backward) for number in order]
    inputs, targets = ([i for ids, _ in found for i in ids[part]] for part in (slice(-1), slice(1, None)))
    return np.array(inputs), np.array(targets), [word for _, spelt in found for word in spelt[:-1]]


def streams_of(read, name):
    """Return one field of consecutive batches, (B, steps * L, …)."""
    return np.concatenate([getattr(batch, name) for batch in read], axis=1)


def same(one, other):
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, strict=True), one, other)
    return True


def test_batches_are_those_of_elmo(tmp_path, monkeypatch):
    """Fails when an id, a character or the place of a sentence differs from the original's in some step.

    Both directions read the sentences in the order of the file; the words have up to 61 bytes, of which 48 are read.
    """
    tokenizer = train_words(case.make_documents(case.make_sentences()), case.VOCABULARY)
    store = write_store(tmp_path / "store", case.make_documents(case.make_sentences()), tokenizer, sentences="lines")
    found = frozen("sentence_streams")
    orders = {False: found["orders"]["forward"], True: found["orders"]["backward"]}
    monkeypatch.setattr(sentence_streams, "shuffled", lambda count, seed, version, epoch, backward: orders[backward])
    rows = SentenceStreams().rows(Reading([store], case.LENGTH, case.ROWS, characters=case.CHARACTERS))
    assert rows.unused == 0 and rows.windows.per_epoch == case.STEPS and len(found["batches"]) == 6
    for step in range(case.STEPS):
        batch = batch_at(rows, step, case.ROWS)
        for direction, suffix in ((batch, ""), (batch.backward, "_reverse")):
            for name, theirs in (
                ("ids", "token_ids"),
                ("targets", "next_token_id"),
                ("characters", "tokens_characters"),
            ):
                np.testing.assert_array_equal(getattr(direction, name), found["batches"][theirs + suffix][step])


@pytest.mark.parametrize("batch_size, length", [(1, 1), (4, 5), (3, 16), (7, 2)])
def test_each_epoch_has_each_sentence_once_in_each_direction(stores, sentences, batch_size, length):
    """Fails when a sentence is left out or read twice, a line break is read, or a row does not continue its stream.

    By plain enumeration: the sentences in the order of the epoch, one after the other, divided into streams.
    """
    rows = rows_of(stores, length=length, batch_size=batch_size)
    tokenizer = SentenceStreams().with_special_tokens(stores[0].tokenizer())
    steps, total = rows.windows.per_epoch, sum(len(words) + 1 for words in sentences)
    stream = total // (batch_size * length) * length
    assert steps == stream // length and rows.rows == steps * batch_size and rows.unused == total - stream * batch_size
    assert len(rows.sentences) == len(sentences)
    seen = set()
    for epoch in (0, 1, 4):
        read = [batch_at(rows, epoch * steps + step, batch_size) for step in range(steps)]
        for step, batch in enumerate(read):
            np.testing.assert_array_equal(batch.begins, [step == 0] * batch_size)
        for backward in (False, True):
            order = sentence_streams.shuffled(len(sentences), 0, 1, epoch, backward)
            assert sorted(order.tolist()) == list(range(len(sentences)))
            seen.add(tuple(order.tolist()))
            inputs, targets, spelt = text_of(order, sentences, tokenizer, backward)
            mine = [batch.backward for batch in read] if backward else read
            used = stream * batch_size
            np.testing.assert_array_equal(streams_of(mine, "ids").reshape(-1), inputs[:used])
            np.testing.assert_array_equal(streams_of(mine, "targets").reshape(-1), targets[:used])
            characters = streams_of(mine, "characters").reshape(used, -1)
            np.testing.assert_array_equal(characters, character_ids(spelt[:used], 20))
            for batch in mine:
                assert (batch.weights == 1).all() and (batch.segments == 1).all()
                np.testing.assert_array_equal(batch.positions, np.tile(np.arange(length), (batch_size, 1)))
                assert [getattr(batch, name).dtype for name in FIELDS] == [np.int32] * 4 + [np.float32]
    assert len(seen) == 6, "each epoch and each direction has an order of its own"


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_any_number_of_processes_and_any_start_give_the_same_rows(stores, processes):
    """Fails when a row depends on the process that reads it or on the steps before it, over the end of an epoch too."""
    whole = phased_rows(SentenceStreams(), reading(stores), 100)
    steps = whole.rows[0].windows.per_epoch
    parts = np.split(np.arange(BATCH), processes)
    rows = [phased_rows(SentenceStreams(), reading(stores), 100) for _ in parts]  # each process has its own
    first = steps - 3
    read = [
        batches(own, batch_size=BATCH, host_rows=mine, first_step=first) for own, mine in zip(rows, parts, strict=True)
    ]
    for step in range(first, first + 8):
        joined = jax.tree.map(lambda *leaves: np.concatenate(leaves), *[next(part) for part in read])
        assert same(joined, batch_at(whole, step, BATCH))


def test_seeds_and_epochs_have_other_orders_and_a_step_is_had_at_once(stores):
    one, other = rows_of(stores), rows_of(stores, seed=1)
    steps = one.windows.per_epoch
    assert (batch_at(one, 0, BATCH).ids != batch_at(other, 0, BATCH).ids).any()
    assert (batch_at(one, 0, BATCH).ids != batch_at(one, steps, BATCH).ids).any()
    far = 10**6 * steps + 2
    assert same(batch_at(one, far, BATCH), batch_at(rows_of(stores), far, BATCH))
    left_out = []
    for epoch in range(2):
        inputs = [batch_at(one, epoch * steps + step, BATCH).ids for step in range(steps)]
        left_out.append(Counter(np.concatenate(inputs).reshape(-1).tolist()))
    assert one.unused > 0 and left_out[0] != left_out[1], "the remainder is another one in each epoch"


def test_without_characters_a_batch_has_none(stores):
    """Fails when ids depend on the characters, or a batch without them has a leaf more."""
    batch = batch_at(rows_of(stores, characters=0), 3, BATCH)
    full = batch_at(rows_of(stores), 3, BATCH)
    assert batch.characters is batch.backward.characters is None and batch.backward.begins is None
    assert full.characters.shape == (BATCH, LENGTH, 20) and full.characters.dtype == np.int32
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(batch, name), getattr(full, name))
    assert same(full.backward.ids, batch.backward.ids)


@pytest.mark.parametrize("batch_size, length", [(1, 7), (4, 5), (9, 3), (500, 4)])
def test_validation_has_each_target_once_in_each_direction(stores, sentences, batch_size, length):
    """Fails when a target of the held-out text is left out or doubled, or its order changes."""
    held_out = SentenceStreams().validation_rows(reading(stores, batch_size=batch_size, length=length))
    tokenizer, read = SentenceStreams().with_special_tokens(stores[0].tokenizer()), list(held_out)
    for backward in (False, True):
        inputs, targets, spelt = text_of(range(len(sentences)), sentences, tokenizer, backward)
        assert held_out.num_targets == len(targets)
        mine = [batch.backward for batch in read] if backward else read
        counts = streams_of(mine, "weights") > 0
        np.testing.assert_array_equal(streams_of(mine, "ids")[counts], inputs)
        np.testing.assert_array_equal(streams_of(mine, "targets")[counts], targets)
        np.testing.assert_array_equal(streams_of(mine, "characters")[counts], character_ids(spelt, 20))
        assert (np.diff(counts.astype(int), axis=1) <= 0).all(), "padding is at the ends of the streams alone"
        assert not streams_of(mine, "segments")[~counts].any()
    for step, batch in enumerate(read):
        np.testing.assert_array_equal(batch.begins, [step == 0] * batch_size)


def test_validation_over_processes(stores):
    whole = SentenceStreams().validation_rows(reading(stores))
    parts = [np.array([0, 3]), np.array([2, 1])]
    read = [SentenceStreams().validation_rows(reading(stores, host_rows=mine)) for mine in parts]
    for step, expected in enumerate(whole):
        for own, mine in zip(read, parts, strict=True):
            assert same(own[step], jax.tree.map(lambda leaf, mine=mine: leaf[mine], expected))
    assert len(SentenceStreams().validation_rows(reading([]))) == 0


def test_sentence_pieces_are_read_too(tmp_path):
    """Fails when the layout needs words: without characters, it reads the pieces of any store with sentences."""
    tokenizer = train_sentencepiece(TEXTS[0], 310)
    store = write_store(tmp_path / "store", TEXTS[0], tokenizer, sentences="lines")
    batch = batch_at(rows_of([store], characters=0), 0, BATCH)
    assert SentenceStreams().with_special_tokens(tokenizer) is tokenizer
    assert tokenizer.specials["start"] in batch.ids and tokenizer.specials["end"] in batch.targets
    assert tokenizer.specials["start"] not in batch.targets and tokenizer.specials["end"] not in batch.ids
    with pytest.raises(InputError, match="keeps no spelling of words without an id.*--tokenizer words:SIZE"):
        rows_of([store])


def test_the_marks_are_no_part_of_the_tokenizers_identity(stores, tmp_path):
    """Fails when a run with the marks has another tokenizer than its stores, or loses the marks when it is saved."""
    plain = stores[0].tokenizer()
    tokenizer = SentenceStreams().with_special_tokens(plain)
    assert (tokenizer.specials["start"], tokenizer.specials["end"], tokenizer.size) == (SIZE, plain.specials["end"], 26)
    assert tokenizer.fingerprint == plain.fingerprint != plain.with_specials(["start"]).fingerprint
    assert tokenizer.with_marks(["start", "end"]) is tokenizer and plain.marks == ()
    for number, one in enumerate(
        (tokenizer, tokenizer.with_specials(["cls"]), plain.with_sentinels(2).with_marks(["sep"]))
    ):
        one.save(tmp_path / str(number))
        loaded = load_tokenizer(tmp_path / str(number))
        assert (loaded.marks, loaded.specials, loaded.size) == (one.marks, one.specials, one.size)
        assert loaded.fingerprint == one.fingerprint


def test_origins_name_the_sentences_of_a_row(stores, sentences):
    """Fails when the line of a log names another sentence than the row has."""
    rows = phased_rows(SentenceStreams(), reading(stores), 50)
    by_path = {str(store.path): store for store in stores}
    for step, row in itertools.product(range(0, 40, 7), range(BATCH)):
        batch, found = batch_at(rows, step, BATCH), row_origins(rows, step, BATCH)[row]
        for direction, backward in ((batch, False), (batch.backward, True)):
            named = []
            for origin in found:
                if origin.backward == backward:
                    store = by_path[origin.store]
                    first = int(store.document_starts[origin.document]) + origin.token
                    assert store.documents > 5 or origin.source == "memory"
                    named += [i for i in store.tokens[first : first + origin.tokens] if i != store.end]
            words = [i for i in direction.ids[row].tolist() if i not in (SIZE, stores[0].end)]
            assert words and not Counter(words) - Counter(map(int, named))
    said = describe_rows(rows, 3, BATCH)
    assert said.startswith(f"rows {3 * BATCH} to {4 * BATCH - 1}: ") and " more" in said
    assert f"{len(sentences)} sentences in {BATCH} streams of " in rows.rows[0].description()


def test_show_prints_both_directions(stores):
    data = SentenceStreams(store=tuple(str(store.path) for store in stores))
    config = PretrainConfig(data=data, length=LENGTH, batch_size=BATCH, num_steps=10)
    shown = "\n".join(pretrain_lines(config, 3, 1))
    assert "layout sentence_streams" in shown and ", backward, " in shown and "\n  backward\n" in shown
    assert "'<start>'" in shown or "'<end of document>'" in shown


def test_batches_for_measurements_have_both_directions():
    """Fails when a measured program has other leaves than that of training without characters."""
    empty, random_batch = SentenceStreams().empty(3, 4), SentenceStreams().random_batch(3, 4, 90)
    assert random_batch.backward.ids.shape == (3, 4) and not random_batch.begins.any()

    def shapes(batch):
        return {jax.tree_util.keystr(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(batch)}

    assert shapes(empty).items() >= shapes(random_batch).items()
    assert empty.backward.ids is not empty.ids, "each direction has arrays of its own"


def test_what_cannot_be_read_is_one_line(stores, tmp_path):
    without = write_store(tmp_path / "without", TEXTS[0], train_words(TEXTS[0], SIZE))
    for make in (SentenceStreams().rows, SentenceStreams().validation_rows):
        with pytest.raises(InputError, match="keeps no sentences, .* sentence_streams .*--sentences split .or lines."):
            make(reading([without]))
    with pytest.raises(InputError, match="keeps no sentences"):
        SentenceStreams().check_validation([open_store(without.path)], LENGTH)
    with pytest.raises(InputError, match=r"batch_size must be at most \d+ for .* sentences of .*, got 5000"):
        rows_of(stores, batch_size=5000)
    with pytest.raises(InputError, match=r"length must be at most \d+ for .* sentences of .*, got 50000"):
        rows_of(stores, length=50_000)
    with pytest.raises(InputError, match=r"data.weights must be left out with data.layout sentence_streams, got 1.0"):
        phases(SentenceStreams(weights=(1.0,)), length=3, num_steps=4)
    saved = {"data": {"layout": "sentence_streams"}, "fingerprints": {"data_order": 2}}
    with pytest.raises(InputError, match="data_order must be 1 for data.layout sentence_streams, got 2"):
        check_order(saved, "runs/elmo")


def test_epochs_are_steps(stores):
    data, rows = SentenceStreams(), rows_of(stores)
    assert data.steps_of_passes(reading(stores), 2) == 2 * rows.windows.per_epoch
    assert data.describe_rows(4) == "4 streams of sentences in each direction, in rows"
    assert dataclasses.replace(data, validation=("x",)).carries and not data.whole_text
