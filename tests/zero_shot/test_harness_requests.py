"""Requests of the lm-evaluation-harness without the harness: against single calls of the model, one text at a time."""

import jax
import numpy as np
import pytest
import toy_gpt2
import toy_run

from jaxlm.distributed.mesh import MeshConfig, make_mesh
from jaxlm.errors import InputError
from jaxlm.inference.loaded_run import load_run
from jaxlm.inference.scoring import Scored, Scorer
from jaxlm.models.model import Inputs
from jaxlm.zero_shot.harness_requests import GenerationRequests, HarnessRequests, continuation, rolling_windows

LONG = "and the bird sang in the tree of the hill"
PAIRS = [
    ("The cat", " sat on"),
    ("the cat  ", "sat"),  # its blanks belong to the continuation
    ("", "the dog lay"),
    ("In the", " morning"),
    (LONG, " and then"),  # longer than the trained length
    ("a", "n"),  # one id with its context merged
    ("the", " the"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return load_run(toy_gpt2.run(tmp_path_factory.mktemp("gpt2")))


@pytest.fixture(scope="module")
def requests(run):
    return HarnessRequests(run, batch_size=3)


@pytest.fixture(scope="module")
def generate(requests):
    return GenerationRequests(requests, seed=1)


@pytest.fixture(scope="module")
def scores(run):
    """(ids) -> the log-probabilities after each id but the last, float64 (len - 1, V), of a batch of one."""
    logits = jax.jit(lambda ids: (out := run.model(run.params, Inputs(ids, np.arange(ids.shape[1])[None]))) and out)

    def of(ids):
        padded = np.zeros((1, toy_gpt2.POSITIONS), np.int32)
        padded[0, : len(ids)] = ids
        outputs = logits(padded)
        found = np.asarray(run.model.logits(run.params, outputs.states, outputs.output), np.float64)[0, : len(ids)]
        found -= found.max(axis=-1, keepdims=True)
        return found - np.log(np.exp(found).sum(axis=-1, keepdims=True))

    return of


def expected(scores, ids, first):
    """The sum of the log-probabilities from index `first` on, and True if all are the likeliest."""
    table = scores(ids[:-1])[first - 1 :]
    targets = np.array(ids[first:])
    return table[np.arange(len(targets)), targets].sum(), bool((table.argmax(axis=-1) == targets).all())


def test_pairs_are_encoded_together_and_divided_after_the_context(requests, run):
    # Fails when the blanks of a context are scored, when the parts are encoded apart, or without the token in front.
    encode, end = run.tokenizer.encode, run.tokenizer.specials["end"]
    found = requests.encode_pairs([*PAIRS[:4], ("a", "nd b"), (" ", "the")])
    assert found[0] == (encode("The cat"), encode(" sat on"))
    assert found[1] == (encode("the cat"), encode("  sat"))
    assert found[2] == ([end], encode("the dog lay"))
    assert found[4] == (encode("a"), encode("and b")[1:])  # as the harness does: one id of both is not seen
    assert found[5] == ([end], encode(" the"))


def test_log_likelihoods_and_greedy_equal_single_calls(requests, run, scores):
    # Fails when sorted requests are not put back, when greedy is of one token only, or when the wrong end is dropped.
    pairs = [pair for pair in PAIRS if pair != ("a", "n")]
    greedy = []  # continuations that are greedy, and others that are so up to their last token
    for context in ("The cat", "the dog lay"):
        ids = run.tokenizer.encode(context)
        for _ in range(3):
            ids.append(int(scores(ids)[-1].argmax()))
        split = len(run.tokenizer.encode(context))
        greedy += [(ids[:split], ids[split:]), (ids[:split], [*ids[split:-1], (ids[-1] + 1) % 200])]
    encoded = requests.encode_pairs(pairs)
    want = []
    for context, rest in [*encoded, *greedy]:
        ids = [*context, *rest][-(toy_gpt2.LENGTH + 1) :]
        want.append(expected(scores, ids, len(ids) - len(rest)))
    found = [*requests.log_likelihoods(pairs), *requests.token_log_likelihoods(greedy)]
    np.testing.assert_allclose([value for value, _ in found], [value for value, _ in want], rtol=1e-5, atol=1e-4)
    assert [flag for _, flag in found] == [flag for _, flag in want]
    assert [flag for _, flag in found[-4:]] == [True, False, True, False]
    sequences = [Scored([*context, *rest], len(context)) for context, rest in encoded[:3]]
    again = Scorer(run.model, mesh=run.mesh, batch_size=2)(run.params, sequences)
    np.testing.assert_allclose([one.log_probability for one in again], [value for value, _ in found[:3]], rtol=1e-5)


def test_rolling_windows_are_those_of_the_harness():
    # The example of lm_eval/api/model.py: ten tokens, four positions. Fails when a token is scored twice or not at all.
    windows = [(list(one.ids), one.first) for one in rolling_windows(["BOS", *range(10)], 4)]
    assert windows == [(["BOS", 0, 1, 2, 3], 1), ([3, 4, 5, 6, 7], 1), ([5, 6, 7, 8, 9], 3)]
    for count in range(12):
        scored = [i for one in rolling_windows([-1, *range(count)], 4) for i in one.ids[one.first :]]
        assert scored == list(range(count))


def test_rolling_sums_over_windows(requests, run, scores):
    # Fails when windows of one text are added to another, or when the first token has no context.
    texts = [LONG, "", "The cat sat on the mat. " * 3, "a"]
    found = requests.rolling(texts)
    for text, total in zip(texts, found, strict=True):
        ids = [run.tokenizer.specials["end"], *run.tokenizer.encode(text)]
        want = sum(expected(scores, one.ids, one.first)[0] for one in rolling_windows(ids, toy_gpt2.LENGTH))
        assert total == pytest.approx(want, rel=1e-5, abs=1e-4)


def test_beyond_length_uses_all_positions_on_any_mesh(run, scores, tmp_path):
    # Fails when the trained length still truncates, or when the sharding changes a value.
    mesh = make_mesh(MeshConfig(data=2, fsdp=4))
    sharded = load_run(f"{run.path}@{run.step}", mesh=mesh)
    ((found, _),) = HarnessRequests(sharded, batch_size=8, beyond_length=True).log_likelihoods([(LONG, " and")])
    ids = [*run.tokenizer.encode(LONG), *run.tokenizer.encode(" and")]
    assert toy_gpt2.LENGTH < len(ids) - 1 <= toy_gpt2.POSITIONS
    assert found == pytest.approx(expected(scores, ids, len(run.tokenizer.encode(LONG)))[0], rel=1e-5)


def test_generation_is_greedy_after_the_end_of_its_context(generate, run, scores):
    # Fails when the beginning of a context is kept, when groups or sorting mix the answers, or at a wrong length.
    allowed = np.ones(run.tokenizer.size, bool)
    length, contexts = 6, ["The cat", LONG, "", "the dog lay on the rug"]
    found = generate([(text, {"max_gen_toks": length + (k % 2)}) for k, text in enumerate(contexts)])
    for k, (text, answer) in enumerate(zip(contexts, found, strict=True)):
        number = length + k % 2
        ids = (run.tokenizer.encode(text) or [run.tokenizer.specials["end"]])[-(toy_gpt2.LENGTH - number) :]
        made = []
        while len(made) < number and made[-1:] != [run.tokenizer.specials["end"]]:
            made.append(int(np.where(allowed, scores([*ids, *made])[-1], -np.inf).argmax()))
        assert answer == run.tokenizer.decode([*ids, *made])[len(run.tokenizer.decode(ids)) :]


def test_an_answer_ends_before_its_first_stop_string(generate):
    # Fails when the stop string stays, or when an answer depends on the stop strings of its neighbours.
    (whole,) = generate([("The cat", {"max_gen_toks": 9})])
    assert len(whole) > 4
    stop = whole[3:5]
    settings = [{"max_gen_toks": 9, "until": [stop, "\0"]}, {"max_gen_toks": 9, "until": whole[2]}, {"max_gen_toks": 9}]
    found = generate([("The cat", one) for one in settings])
    assert found == [whole[: whole.index(stop)], whole[: whole.index(whole[2])], whole]


def test_samples_depend_on_seed_and_index_only(requests, generate):
    # Fails when sorting by length or a batch changes the seed of a prompt.
    asked = {"do_sample": True, "temperature": 1.5, "max_gen_toks": 8}
    prompts = [(text, asked) for text in ("The cat", "a", LONG, "a")]
    found = generate(prompts)
    assert found[1] != found[3] and found == generate(prompts)
    assert generate([("the longest prompt of all", asked), *prompts[1:]])[1:] == found[1:]
    assert GenerationRequests(requests, seed=2)(prompts) != found


def test_arguments_of_generation():
    # Fails when greedy decoding samples, or when an argument is silently ignored.
    default = continuation({})
    assert (default.length, default.stop, default.sampling.temperature) == (256, (), 0.0)
    assert continuation({"do_sample": False, "temperature": 0.7, "until": "\n"}).sampling.temperature == 0
    assert continuation({"temperature": 0.7}).sampling.temperature == 0.7
    assert continuation({"do_sample": True}).sampling.temperature == 1
    found = continuation({"max_new_tokens": 3, "until": ["a", ""], "do_sample": True, "top_k": 2, "top_p": 0.5})
    assert (found.length, found.stop, found.sampling.top_k, found.sampling.top_p) == (3, ("a",), 2, 0.5)
    assert continuation({"num_beams": 1}) == default
    with pytest.raises(InputError, match="--gen_kwargs num_beams must be one of .* got num_beams=4; leave it out"):
        continuation({"num_beams": 4})


def test_bad_requests_are_one_line(requests, generate):
    with pytest.raises(InputError, match="must have tokens of its own after its context, got 'nd' after 'a'"):
        requests.log_likelihoods([("a", "nd")])
    with pytest.raises(InputError, match=r"at most 16 tokens, got \d+; leave the row out, or give --beyond-length"):
        requests.log_likelihoods([("a", LONG)])
    with pytest.raises(InputError, match="max_gen_toks must be from 1 to 15, .* got 256; .*--beyond-length"):
        generate([("a", {})])


def test_without_a_prefix_the_first_token_is_not_scored(run, scores):
    # As for GPT-1, which has no such token. Fails when a token gets a probability without any context.
    bare = HarnessRequests(run, batch_size=2, prefix=[])
    ids = run.tokenizer.encode("the dog lay")
    ((value, _),) = bare.log_likelihoods([("", "the dog lay")])
    assert value == pytest.approx(expected(scores, ids, 1)[0], rel=1e-5)
    assert bare.rolling(["the dog lay"])[0] == pytest.approx(value, rel=1e-5)
    with pytest.raises(InputError, match="must have tokens of its own"):
        bare.log_likelihoods([("", "a")])


def test_the_prefix_is_that_of_an_exported_tokenizer(tmp_path):
    # Fails when the order of the roles differs from bos_token, then eos_token.
    tokenizer = toy_run.toy_tokenizer()
    loaded = load_run(toy_run.pretrained(tmp_path / "run", toy_run.toy_store(tmp_path / "store", tokenizer)))
    assert HarnessRequests(loaded, batch_size=2).prefix == [tokenizer.specials["start"]]
