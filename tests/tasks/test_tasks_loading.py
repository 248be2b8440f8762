"""Token sequences and batches: GPT-1's forms, the rule for cutting, and batches as a function of seed and step."""

import dataclasses
import functools
from types import SimpleNamespace

import numpy as np
import pytest

from jaxlm.errors import InputError
from jaxlm.tasks import (
    TASKS,
    Example,
    Size,
    Split,
    TaskData,
    TrainBatches,
    choose_lengths,
    encode_examples,
    encode_split,
    eval_batches,
    read_task,
    standard_sizes,
    steps_of_epochs,
)
from jaxlm.tasks.batches import choose_sizes
from jaxlm.tasks.input_formats import arrange, split_room

START, DELIMITER, EXTRACT, END = 1, 2, 3, 4


class Words:
    """A word of the form `7` is the token 107: enough of a tokenizer to see where each token went."""

    specials = {"pad": 0, "start": START, "delimiter": DELIMITER, "extract": EXTRACT, "end": END}

    def encode(self, text):
        return [100 + int(word) for word in text.split()]

    def encode_batch(self, texts):
        return [self.encode(text) for text in texts]


def sequences_of(task, length, texts, choices=()):
    encode = Words().encode
    ids = [*map(encode, texts)], [*map(encode, choices)]
    found, ends, cut = arrange(*ids, task.form, Words.specials, length, special_tokens=task.special_tokens)
    assert ends == [len(sequence) for sequence in found]  # a decoder's sequence has one segment
    return found, cut


def words(first, count):
    return " ".join(str(number) for number in range(first, first + count))


def tokens(first, count):
    return list(range(100 + first, 100 + first + count))


def sequences(form, texts, choices=(), length=512, **more):
    task = dataclasses.replace(TASKS["codah"], form=form, num_choices=len(choices), **more)
    return sequences_of(task, length, texts, choices)


def test_forms():
    assert sequences("single", ["5 6"]) == ([[START, 105, 106, EXTRACT]], False)
    assert sequences("entailment", ["5 6", "7"]) == ([[START, 105, 106, DELIMITER, 107, EXTRACT]], False)
    both = [[START, 105, 106, DELIMITER, 107, EXTRACT], [START, 107, DELIMITER, 105, 106, EXTRACT]]
    assert sequences("similarity", ["5 6", "7"]) == (both, False)
    choices = [[START, 105, DELIMITER, 108, EXTRACT], [START, 105, DELIMITER, 109, 110, EXTRACT]]
    assert sequences("choice", ["5"], ["8", "9 10"]) == (choices, False)
    with_question = [[START, 105, 106, DELIMITER, 108, EXTRACT], [START, 105, 106, DELIMITER, 109, EXTRACT]]
    assert sequences("choice", ["5", "6"], ["8", "9"]) == (with_question, False)
    assert sequences("entailment", ["", ""]) == ([[START, DELIMITER, EXTRACT]], False)


def test_forms_of_tokens_that_a_language_model_has_read():
    """Fails when a text begins or ends with another token than the end of a document, or loses room to none."""
    of = functools.partial(sequences, special_tokens="end")
    assert of("single", ["5 6"]) == ([[END, 105, 106]], False) and of("single", [""]) == ([[END]], False)
    assert of("single", [words(0, 10)], length=10) == ([[END, *tokens(0, 9)]], True)
    assert of("similarity", ["5", "7"]) == ([[END, 105, END, 107], [END, 107, END, 105]], False)
    assert of("choice", ["5"], ["8", "9"]) == ([[END, 105, END, 108], [END, 105, END, 109]], False)
    assert of("choice", [], ["8", words(0, 9)], length=8) == ([[END, 108], [END, *tokens(0, 7)]], True)
    assert of("entailment", [words(0, 9), "50"], length=8) == ([[END, *tokens(0, 5), END, 150]], True)
    with pytest.raises(InputError, match="special_tokens must be gpt1 for a tokenizer without an end-of-document"):
        arrange([[1]], [], "single", {"start": 1, "delimiter": 2, "extract": 3}, 8, special_tokens="end")


def test_single_texts_keep_their_beginning():
    assert sequences("single", [words(0, 8)], length=10) == ([[START, *tokens(0, 8), EXTRACT]], False)
    assert sequences("single", [words(0, 9)], length=10) == ([[START, *tokens(0, 8), EXTRACT]], True)


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [
        (5, 5, (5, 5)),  # fits
        (20, 3, (7, 3)),  # the shorter leaves its room
        (3, 20, (3, 7)),
        (20, 20, (5, 5)),
        (6, 5, (5, 5)),
        (20, 0, (10, 0)),
    ],
)
def test_pairs_share_the_room(first, second, kept):
    (sequence,), cut = sequences("entailment", [words(0, first), words(50, second)], length=13)
    assert sequence == [START, *tokens(0, kept[0]), DELIMITER, *tokens(50, kept[1]), EXTRACT]
    assert cut == (kept != (first, second))


def test_both_too_long_is_the_originals_rule():
    for context in (16, 128, 512):  # n_ctx // 2 - 2 tokens of each part; of an even length one is left over
        assert split_room(1000, 1000, context - 3) == (context // 2 - 1, context // 2 - 2)


def test_sharing_never_wastes_room():
    for first in range(12):
        for second in range(12):
            for room in range(2, 12):
                kept = split_room(first, second, room)
                assert kept[0] <= first and kept[1] <= second
                assert sum(kept) == min(room, first + second)


def test_choices_share_one_context():
    cut, was_cut = sequences("choice", [words(0, 20)], ["50", words(60, 4)], length=13)
    assert was_cut and [sequence[:7] for sequence in cut] == [[START, *tokens(0, 6)]] * 2
    assert cut[0][7:] == [DELIMITER, 150, EXTRACT] and cut[1][7:] == [DELIMITER, *tokens(60, 4), EXTRACT]
    article, _ = sequences("choice", [words(0, 20), words(30, 3)], [words(60, 4)] * 2, length=13)
    assert article[0] == [START, *tokens(0, 3), *tokens(30, 3), DELIMITER, *tokens(60, 4), EXTRACT]
    question, _ = sequences("choice", [words(0, 20), words(30, 30)], [words(60, 30)] * 2, length=13)
    assert question[0] == [START, *tokens(30, 5), DELIMITER, *tokens(60, 5), EXTRACT]


def test_lengths_below_a_pair_are_refused():
    with pytest.raises(InputError, match="length must be at least 5 .*, got 4"):
        sequences("single", ["5"], length=4)


def made(counts, task="cola", length=64, labelled=True):
    """A split whose example i has counts[i] words, all of them the number i."""
    names = TASKS[task].labels
    examples = tuple(
        Example((" ".join([str(i)] * count),), (), names[i % len(names)] if labelled else None)
        for i, count in enumerate(counts)
    )
    data = TaskData({"train": Split(examples, len(examples))}, names)
    return encode_split(TASKS[task], data, "train", Words(), length)


@pytest.fixture(scope="module")
def split():
    random = np.random.default_rng(0)
    return made(np.minimum(random.geometric(0.08, 501), 80))


def test_encoded_examples(split):
    assert len(split) == 501 and split.labelled and split.labels.tolist()[:3] == [0, 1, 0]
    assert split.longest.max() == 64 and split.truncated > 0
    (sequence,) = split.sequences(7)
    assert sequence[0] == START and sequence[-1] == EXTRACT and set(sequence[1:-1].tolist()) <= {107}
    by_one = [sequences_of(TASKS["cola"], 64, [" ".join([str(i)] * 70)])[0][0] for i in range(3)]
    assert [made([70] * 3).sequences(i)[0].tolist() for i in range(3)] == by_one
    assert not made([3, 4], labelled=False).labelled


def test_batches_hold_what_they_say(split):
    batch = TrainBatches(split, batch_size=32, num_steps=15, seed=0)[3]
    rows, (count, places, length) = np.arange(32), batch.ids.shape
    assert (count, places) == (32, 1) and batch.ids.dtype == np.int32 and batch.weights.tolist() == [1] * 32
    assert (batch.ids[rows, 0, batch.extract[:, 0]] == EXTRACT).all()
    assert ((np.arange(length) < batch.lengths[:, :1]) == (batch.ids[:, 0] != 0)).all()
    assert (batch.labels == split.labels[batch.index]).all()
    for row, index in enumerate(batch.index):
        assert batch.ids[row, 0, : batch.lengths[row, 0]].tolist() == split.sequences(index)[0].tolist()


@pytest.mark.parametrize("batch_size", [1, 7, 32, 500, 501])
def test_steps_are_the_originals(split, batch_size):
    num_steps = steps_of_epochs("gpt1", split, batch_size=batch_size, num_epochs=3)
    batches = TrainBatches(split, batch_size=batch_size, num_steps=num_steps, seed=0)
    assert len(batches) == max(1, 501 // batch_size) * 3
    for epoch in range(2):
        steps = range(epoch * batches.steps_per_epoch, (epoch + 1) * batches.steps_per_epoch)
        seen = np.concatenate([batches[step].index for step in steps])
        assert len(seen) == len(set(seen)) == (501 // batch_size) * batch_size  # all full, each example once at most
        assert (seen >= 0).all()


@pytest.mark.parametrize(
    ("examples", "batch_size", "num_epochs", "gpt", "bert"),
    [
        (2490, 32, 3, 231, 233),  # RTE
        (3668, 32, 3, 342, 343),  # MRPC
        (5749, 32, 3, 537, 538),  # STS-B
        (87599, 32, 3, 8211, 8212),  # SQuAD
        (130319, 48, 2, 5428, 5429),  # SQuAD 2.0
        (60, 32, 3, 3, 5),
        (20, 32, 3, 3, 1),
        (4, 32, 3, 3, 1),
    ],
)
def test_epochs_are_counted_as_each_models_code_counts_them(examples, batch_size, num_epochs, gpt, bert):
    """Fails on 2968321: a BERT's steps were floor(n / batch) * epochs, GPT-1's rule, so 231 on RTE for 233."""
    split = SimpleNamespace(num_examples=examples)
    counted = [steps_of_epochs(kind, split, batch_size=batch_size, num_epochs=num_epochs) for kind in ("gpt1", "bert")]
    assert counted == [gpt, bert]


def test_seed_orders_within_lengths_that_the_data_decides(split):
    one, other = (TrainBatches(split, batch_size=32, num_steps=45, seed=seed) for seed in (0, 1))
    lengths = [batch.ids.shape[-1] for batch in one]
    assert lengths == [batch.ids.shape[-1] for batch in other] == [one.size_at(step).length for step in range(len(one))]
    assert 2 <= len(set(lengths)) <= 4 and {(0, length) for length in lengths} <= set(one.sizes)
    assert any((one[step].index != other[step].index).any() for step in range(len(one)))
    epochs = [lengths[:15], lengths[15:30], lengths[30:]]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2]) and epochs[0] != epochs[1]


def test_batches_are_those_that_are_written_down():
    """A run that resumes under another order would see examples twice, and others never; these are 2968321's."""
    counts = np.random.default_rng(11).integers(1, 60, 21).tolist()
    batches = TrainBatches(made(counts), batch_size=4, num_steps=12, seed=3)
    found = {step: (batches[step].index.tolist(), batches[step].ids.shape[-1]) for step in (0, 1, 6)}
    assert found == {0: ([11, 17, 18, 2], 64), 1: ([14, 4, 1, 15], 40), 6: ([8, 12, 0, 7], 40)}


def test_any_step_alone_is_the_step_of_the_whole(split):
    in_order = list(TrainBatches(split, batch_size=32, num_steps=30, seed=5))
    for step in np.random.default_rng(1).permutation(len(in_order)):
        alone = TrainBatches(split, batch_size=32, num_steps=135, seed=5)[int(step)]
        assert (alone.index == in_order[step].index).all() and (alone.ids == in_order[step].ids).all()
    assert len(TrainBatches(split, batch_size=32, seed=5, num_steps=100)) == 100


def test_everything_is_trained_on_over_the_epochs(split):
    # Cutting off the tail of a sorted list would leave the same longest examples out for ever.
    batches = TrainBatches(split, batch_size=32, num_steps=450, seed=0)
    times = np.bincount(np.concatenate([batch.index for batch in batches]), minlength=501)
    assert times.min() >= 24 and times.max() <= 30
    longest = np.argsort(split.longest)[-50:]
    assert abs(times[longest].mean() - times.mean()) < 0.7


def test_a_set_smaller_than_a_batch():
    batches = TrainBatches(made([3, 9, 30]), batch_size=8, num_steps=3, seed=0)
    assert batches.steps_per_epoch == 1
    for batch in batches:
        assert batch.ids.shape == (8, 1, 32) and sorted(batch.index) == [-1] * 5 + [0, 1, 2]
        assert batch.weights.tolist() == [1.0] * 3 + [0.0] * 5
        assert not batch.ids[3:].any() and not batch.extract[3:].any()


@pytest.mark.parametrize(("count", "batch_size"), [(101, 8), (101, 101), (101, 128), (1, 4), (16, 8)])
def test_evaluation_sees_each_example_once(count, batch_size):
    encoded = made(np.random.default_rng(2).integers(1, 60, count))
    batches = list(eval_batches(encoded, batch_size=batch_size))
    assert len(batches) == -(-count // batch_size)
    index, weights = (np.concatenate([getattr(batch, name) for batch in batches]) for name in ("index", "weights"))
    assert sorted(index[index >= 0]) == list(range(count)) and ((index >= 0) == (weights == 1)).all()
    assert all(batch.ids.shape[0] == batch_size for batch in batches)
    assert len({batch.ids.shape for batch in batches}) <= 4


def test_evaluation_with_the_lengths_of_training():
    encoded = made([2, 20, 40, 61])
    shapes = [batch.ids.shape[-1] for batch in eval_batches(encoded, batch_size=1, sizes=(Size(0, 8), Size(0, 32)))]
    assert shapes == [64, 64, 32, 8]
    assert list(eval_batches(made([]), batch_size=4)) == []
    assert standard_sizes(Size(0, 512)) == tuple((0, length) for length in (32, 64, 128, 256, 512))
    assert standard_sizes(Size(0, 20)) == ((0, 20),) and standard_sizes(Size(40, 20)) == ((32, 20), (40, 20))


def padded(lengths, longest):
    return np.array(lengths)[np.searchsorted(lengths, longest)].sum()


def test_lengths_are_the_best_handful():
    from itertools import combinations

    longest = np.minimum(np.random.default_rng(4).geometric(0.05, 400) + 2, 100)
    chosen = choose_lengths(longest, 100)
    candidates = sorted({min(-(-n // 8) * 8, 100) for n in longest})
    options = [(*some, candidates[-1]) for k in range(4) for some in combinations(candidates[:-1], k)]
    assert padded(chosen, longest) == min(padded(option, longest) for option in options)
    assert choose_lengths(np.array([5, 6]), 512) == (8,) and choose_lengths(np.array([13]), 13) == (13,)
    assert chosen == choose_lengths(np.random.default_rng(6).permutation(longest), 100)


@dataclasses.dataclass(frozen=True)
class TwoSided:
    """What bucketing asks of rows with a source that is read apart; a batch is its rows and its size."""

    longest_source: np.ndarray
    longest: np.ndarray
    source_limit: int = 64
    length: int = 48

    def __len__(self):
        return len(self.longest)

    def batch(self, rows, size, batch_size):
        return rows, size


def two_sided(count):
    rng = np.random.default_rng(8)
    return TwoSided(rng.integers(1, 60, count), rng.integers(1, 40, count))


def test_two_sides_are_bucketed_by_both_lengths():
    """Fails when a batch does not hold one of its rows, when sizes are many, or when one side is left to the other."""
    encoded = two_sided(500)
    batches = TrainBatches(encoded, batch_size=16, num_steps=31, seed=0)
    found = [batches[step] for step in range(31)]
    for rows, size in [*found, *eval_batches(encoded, batch_size=16, sizes=batches.sizes)]:
        assert size.holds(encoded.longest_source[rows].max(), encoded.longest[rows].max()) and size in batches.sizes
    assert len(choose_sizes(encoded)) == 8 and len(batches.sizes) <= 11
    assert len(np.unique(np.concatenate([rows for rows, _ in found]))) == 31 * 16
    padded, whole = sum(16 * sum(size) for _, size in found), 500 * (60 + 40)
    used = int((encoded.longest_source + encoded.longest).sum())
    assert used / padded > 0.7 > 0.55 > used / whole
    alone = TwoSided(np.zeros(500, np.int64), encoded.longest)
    assert choose_sizes(alone) == tuple((0, length) for length in choose_lengths(encoded.longest, 48))


def test_several_sequences_an_example():
    pair = TASKS["mrpc"]
    encoded = encode_examples(pair, [Example(("5", "6 7"), (), "1"), Example(("8", "9"), (), "0")], Words(), 16)
    (batch,) = eval_batches(encoded, batch_size=2)
    assert batch.ids.shape == (2, 2, 8) and batch.labels.tolist() == [1, 0]
    assert batch.ids[0, 1, :6].tolist() == [START, 106, 107, DELIMITER, 105, EXTRACT]
    assert batch.extract.tolist() == [[5, 5], [4, 4]]
    score = encode_examples(TASKS["stsb"], [Example(("5", "6"), (), 2.5)], Words(), 16)
    assert score.labels.dtype == np.float32 and score.labels[0] == 2.5


@pytest.mark.data
def test_little_padding_is_computed_on_real_data(data_directory):
    task, data = read_task("sst2", str(data_directory / "glue/SST-2"))

    class Pieces(Words):
        def encode_batch(self, texts):
            return [[100] * len(text.split()) for text in texts]

    encoded = encode_split(task, data, "train", Pieces(), 128)
    batches = TrainBatches(encoded, batch_size=32, num_steps=67349 // 32, seed=0)
    assert batches.steps_per_epoch == len(batches)
    positions = sum(32 * batches.size_at(step).length for step in range(len(batches)))
    used = int(encoded.starts[-1])
    assert used / positions > 0.7  # padding all to the longest gives 0.2
