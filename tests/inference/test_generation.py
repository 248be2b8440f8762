"""Generation from texts: batches, samples, stop strings and beams of every causal family, on random parameters."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
import toy
import toy_run

from jaxlm.distributed.mesh import MeshConfig, make_mesh
from jaxlm.errors import InputError
from jaxlm.inference.decoding import CachedModel, Prompt
from jaxlm.inference.generation import GenerationSettings, Generator
from jaxlm.inference.loaded_run import load_run
from jaxlm.inference.strategies import BeamSearch, Sampling
from jaxlm.models import build
from jaxlm.models.lstm import LSTMConfig
from jaxlm.models.model import Inputs
from jaxlm.nn.config import Execution

PROMPTS = ["The cat sat", "A fox", "", "In the morning the bird sang in the tree.", "on"]
FAMILIES = {
    "gpt2": dataclasses.replace(toy_run.SIZES, norm="pre"),
    "lstm": LSTMConfig(width=16, units=24, init_std=0.5),
}


@pytest.fixture(scope="module")
def gpt_run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    store = toy_run.toy_store(directory / "s", toy_run.toy_tokenizer())
    return load_run(toy_run.pretrained(directory / "r", store))


@pytest.fixture(scope="module", params=FAMILIES)
def run(request, gpt_run):
    """A run of each kind of carry, with all positions trained; GPT-1 is in tests/interop/test_generate_published.py."""
    config = dataclasses.replace(FAMILIES[request.param], vocab_size=gpt_run.tokenizer.size)
    model = build(config, Execution(dtype="float32"))
    return dataclasses.replace(gpt_run, model=model, params=toy.random_params(config), trained_length=48)


def test_a_prompt_gives_the_same_alone_and_in_a_batch(run):
    """Fails when the padding of a shorter prompt, another row, the number of samples or of prompts changes a sample."""
    settings = GenerationSettings(
        length=20, num_samples=2, stop=("e c", "qu"), repetition_penalty=1.2, min_length=3, seed=4, batch_size=3
    )
    together = list(Generator(run, settings)(PROMPTS))
    assert [samples[0].prompt for samples in together] == PROMPTS
    alone = Generator(run, dataclasses.replace(settings, num_samples=1, batch_size=1))
    for number, (prompt, samples) in enumerate(zip(PROMPTS, together, strict=True)):
        ((first,),) = alone([prompt], number=number)
        assert first == samples[0] != dataclasses.replace(samples[1], sample=0)
        assert 3 <= len(first.tokens) <= 20 and first.text.endswith(first.generated)
    assert len({tuple(samples[0].tokens) for samples in together}) == len(PROMPTS)
    rest = Generator(run, settings)(PROMPTS, done=4)
    assert list(rest) == together[4:]


@pytest.mark.parametrize(("window", "penalty"), [(12, 1.0), (13, 1.3)])
def test_windows_slide(gpt_run, window, penalty):
    """The most likely tokens against full passes over each window. Fails when a window begins elsewhere, a cache stays
    after a slide, a position is not that of the window, or the penalty forgets what has left it."""
    config = dataclasses.replace(FAMILIES["gpt2"], vocab_size=gpt_run.tokenizer.size)
    model, params = build(config, Execution(dtype="float32")), toy.random_params(config)
    positions = np.arange(window)[None]
    run = dataclasses.replace(gpt_run, model=model, params=params, trained_length=window)
    settings = GenerationSettings(
        length=40, min_length=40, sampling=Sampling(0), repetition_penalty=penalty, beyond_length=True, batch_size=4
    )
    forbidden = sorted({*run.tokenizer.specials.values()})

    @jax.jit
    def full_pass(ids):
        outputs = model(params, Inputs(ids, positions))
        return outputs.states[0] @ outputs.output.tokens[0].T

    lengths = []
    for prompt, (sample,) in zip(PROMPTS, Generator(run, settings)(PROMPTS), strict=True):
        ids = run.with_prefix(run.tokenizer.encode(prompt))
        lengths.append(len(ids))
        for token in sample.tokens:
            start = 0
            while len(ids) - start > window:  # at least the later half of a full window is kept
                start += window - window // 2
            padded = np.zeros((1, window), np.int32)
            padded[0, : len(ids) - start] = ids[start:]
            logits = np.array(full_pass(padded)[len(ids) - start - 1])
            seen = sorted(set(ids))
            logits[seen] = np.where(logits[seen] < 0, logits[seen] * penalty, logits[seen] / penalty)
            logits[forbidden] = -np.inf
            ids = [*ids, int(np.argmax(logits))]
            assert ids[-1] == token
    assert min(lengths) < window < max(lengths) and len(sample.tokens) == 40


def test_a_window_does_not_depend_on_the_other_prompts(gpt_run):
    """Fails when a slide of another row, or of another sample, changes a sample that is drawn."""
    config = dataclasses.replace(FAMILIES["gpt2"], vocab_size=gpt_run.tokenizer.size)
    model = build(config, Execution(dtype="float32"))
    run = dataclasses.replace(gpt_run, model=model, params=toy.random_params(config), trained_length=10)
    settings = GenerationSettings(length=30, num_samples=2, seed=4, batch_size=3, beyond_length=True)
    alone = Generator(run, dataclasses.replace(settings, num_samples=1, batch_size=1))
    for number, (prompt, samples) in enumerate(zip(PROMPTS, Generator(run, settings)(PROMPTS), strict=True)):
        ((first,),) = alone([prompt], number=number)
        assert first == samples[0] and samples[1].tokens != first.tokens


def test_log_probabilities_are_those_of_a_full_pass(run):
    """Fails when they are those after the temperature, leave out a token, or belong to another sample."""
    settings = GenerationSettings(
        length=12, num_samples=3, sampling=Sampling(0.7, top_k=9), seed=1, log_probabilities=True
    )
    for prompt, samples in zip(PROMPTS[:2], Generator(run, settings)(PROMPTS[:2]), strict=True):
        begun = run.with_prefix(run.tokenizer.encode(prompt))
        for sample in samples:
            ids = np.array([[*begun, *sample.tokens]])
            outputs = run.model(run.params, Inputs(ids, np.arange(ids.shape[1])[None]))
            log_probs = jax.nn.log_softmax(run.model.logits(run.params, outputs.states[0], outputs.output))
            new = np.arange(len(begun), ids.shape[1])
            np.testing.assert_allclose(sample.log_probabilities, log_probs[new - 1, ids[0, new]], rtol=1e-5, atol=1e-5)
    assert "log_probabilities" not in next(iter(Generator(run, GenerationSettings(length=1))(["The cat"])))[0].to_json()


def test_beams_give_the_same_alone_and_in_a_batch(run):
    """Fails when the cache of a beam is taken from another prompt's, or a shorter search ends a longer one."""
    settings = GenerationSettings(length=9, beams=3, num_samples=3, batch_size=5)
    alone = Generator(run, dataclasses.replace(settings, batch_size=1))
    for prompt, samples in zip(PROMPTS, Generator(run, settings)(PROMPTS), strict=True):
        (lone,) = alone([prompt])
        assert [sample.tokens for sample in lone] == [sample.tokens for sample in samples]
        assert [sample.score for sample in lone] == pytest.approx([sample.score for sample in samples], abs=1e-5)
        assert lone[0].score >= lone[1].score >= lone[2].score


def test_a_search_of_all_continuations_finds_the_best():
    """A search as wide as there are continuations, against their probabilities from full passes. Fails when a sum of
    log-probabilities leaves out a token, or a state follows the wrong beam."""
    config = dataclasses.replace(FAMILIES["lstm"], vocab_size=4)
    model, params = build(config, Execution(dtype="float32")), toy.random_params(config, seed=2)
    ids = np.array([[1, 3, *rest] for rest in itertools.product(range(4), repeat=3)])
    outputs = model(params, Inputs(ids, np.broadcast_to(np.arange(5), ids.shape)))
    log_probs = np.asarray(jax.nn.log_softmax(model.logits(params, outputs.states, outputs.output)))[:, 1:4]
    totals = np.take_along_axis(log_probs, ids[:, 2:, None], axis=2).sum(axis=(1, 2))
    (found,) = BeamSearch(CachedModel(model, params), 64, length_penalty=0.0)([Prompt([1, 3], 3)])
    best = np.argsort(-totals)
    assert [one.score for one in found] == pytest.approx(totals[best].tolist(), abs=1e-5)
    assert found[0].tokens == ids[best[0], 2:].tolist()


class Pieces:
    """A stand-in tokenizer without bytes; texts are encoded by characters."""

    pieces = (*"abcdefghijklmnopqrstuvwxyz ", "th", "e c", "at ", "sat o", " on")
    size, specials = len(pieces), {}

    def encode_batch(self, texts):
        return [[self.pieces.index(character) for character in text] for text in texts]

    def decode(self, ids):
        return "".join(self.pieces[i] for i in ids)


def with_stops(generator, *stop):
    """The generator with these stop strings, which are not compiled in."""
    generator.settings = dataclasses.replace(generator.settings, stop=stop)
    return generator


def test_a_stop_string_ends_a_text_before_it(gpt_run):
    """The stops are parts of the text without stops, across tokens. Fails when a stop is in the output, a token after
    it is kept, or a stop in the prompt counts."""
    generator = Generator(dataclasses.replace(gpt_run, given_tokenizer=Pieces()), GenerationSettings(length=9))
    ((whole,),) = generator(["the cat"])
    assert not whole.ended and whole.stop is None and len(whole.tokens) == 9
    for first, length in itertools.product(range(len(whole.generated)), (1, 3)):
        stop = whole.generated[first : first + length]
        ((sample,),) = with_stops(generator, "the cat", stop)(["the cat"])
        at = whole.generated.find(stop)
        assert (sample.generated, sample.stop) == (whole.generated[:at], stop)
        assert sample.tokens == whole.tokens[: len(sample.tokens)] and not sample.ended
        made = [len(Pieces().decode(sample.tokens[:size])) for size in (len(sample.tokens) - 1, len(sample.tokens))]
        assert made[0] < at + len(stop) <= made[1]


def test_the_parts_of_a_streamed_text_are_the_text(gpt_run):
    """Fails when a part is lost, given twice, or given before it is certain that no stop string begins there."""
    generator = Generator(dataclasses.replace(gpt_run, trained_length=48), GenerationSettings(length=20))
    for stops in ((), ("e", "the cat")):
        parts: list[str] = []
        ((sample,),) = with_stops(generator, *stops)(["A naïve fox"], on_text=parts.append)
        assert "".join(parts) == sample.text and (stops or len(parts) > 9)


def test_beams_end_before_a_stop_string(gpt_run):
    """Fails when a beam runs on after its stop string, or the text of the best beam is not what is streamed."""
    searching = Generator(gpt_run, GenerationSettings(length=12, beams=3, num_samples=3))
    (free,) = searching(["The cat"])
    stop = free[0].generated[3:5]
    (samples,) = with_stops(searching, stop)(["The cat"])
    assert any(sample.stop == stop for sample in samples)
    assert not any(stop in sample.generated for sample in samples)


def test_any_mesh_gives_the_same_samples(gpt_run):
    """Fails when a cache is gathered within a device, or ids are read of one shard."""
    spread = load_run(gpt_run.name, mesh=make_mesh(MeshConfig(data=2, fsdp=2, tensor=2)))
    settings = GenerationSettings(length=6, beams=3, repetition_penalty=1.3)
    one, other = (list(Generator(some, settings)(PROMPTS[:3])) for some in (gpt_run, spread))
    assert [samples[0].tokens for samples in one] == [samples[0].tokens for samples in other]


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"length": 5, "min_length": 6}, "--min-length must be at most --length 5, got 6"),
        ({"stop": ("a", "")}, "--stop must not be empty"),
        ({"stop": "ab"}, "--stop must be a list of texts, got 'ab'"),
        ({"beams": 2, "num_samples": 3}, "--num-samples must be at most --beams 2, got 3"),
        ({"length_penalty": 2.0}, "--length-penalty must be given with --beams, got 2.0 without"),
        ({"beams": 2, "sampling": Sampling(top_k=5)}, "--beams must be 1 with sampling, got 2"),
    ],
)
def test_settings_out_of_range_are_refused(settings, rule):
    with pytest.raises(InputError, match=rule):
        GenerationSettings(**settings).check()


def test_a_continuation_without_room_is_refused_before_the_first(gpt_run):
    """Fails when the length of a later prompt is checked after earlier ones were generated."""
    longest = " ".join(PROMPTS[:4])
    with pytest.raises(InputError, match=r"prompt 2 of \d+ tokens and 8 new ones are .*--beyond-length"):
        Generator(gpt_run, GenerationSettings(length=8))(["The cat", longest])
