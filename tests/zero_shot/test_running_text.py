"""Language-model texts against a plain loop over windows, from the whole logits of a toy model in NumPy."""

import math
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import toy
import toy_pairs
from toy_run import toy_tokenizer

from jaxlm.distributed.mesh import MeshConfig, make_mesh
from jaxlm.errors import InputError
from jaxlm.models import build, without_dropout
from jaxlm.models.lstm import LSTMConfig
from jaxlm.models.model import Inputs
from jaxlm.models.transformer_xl import TransformerXLConfig
from jaxlm.nn.config import Execution
from jaxlm.progress import Progress
from jaxlm.zero_shot import running_text
from jaxlm.zero_shot.model import ZeroShotModel
from jaxlm.zero_shot.running_text import RUNNING_TEXTS, windows

TASKS = {task.name: task for task in RUNNING_TEXTS}
WIKI = (
    ' \n = The cat = \n \n The cat \'s hill , 1 @,@ 000 birds " sang " . \n <unk> lay in the mat ( well @-@ kept ) \n'
    " = = A dog = = \n = The fox = \n \n In the morning it saw a crow , in the tree . \n"
)
PLAIN = (
    '\n= The cat =\n\nThe cat\'s hill, 1,000 birds "sang".\n<unk> lay in the mat (well-kept)\n'
    "== A dog ==\n= The fox =\n\nIn the morning it saw a crow, in the tree.\n"
)


@pytest.fixture(scope="module")
def toy_model():
    """A model whose tokenizer has an end-of-text token, and (ids of at most 17) -> the log-probability of each after
    the first.
    """
    tokenizer = toy_tokenizer()
    assert "end" in tokenizer.specials
    config = replace(toy.STILL, vocab_size=tokenizer.size)
    model, params = build(config, Execution(dtype="float32")), toy.random_params(config)
    zero_shot = ZeroShotModel(
        model, tokenizer, mesh=make_mesh(MeshConfig(), jax.devices()[:1]), batch_size=4, show_progress=False
    )
    zero_shot.params = params
    positions = config.num_positions

    @jax.jit
    def logits(ids):
        outputs = model(params, Inputs(ids, np.arange(positions)[None]))
        return outputs.states[0] @ outputs.output.tokens[0].T

    def log_probs(ids):
        padded = np.zeros((1, positions), np.int32)
        padded[0, : len(ids) - 1] = ids[:-1]
        scores = np.asarray(logits(padded), np.float64)[: len(ids) - 1]
        table = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
        return table[np.arange(len(ids) - 1), list(ids[1:])]

    return zero_shot, log_probs


@pytest.mark.parametrize("name", ["lstm", "transformer_xl"])
def test_a_model_with_a_state_reads_the_text_as_one_stream(tmp_path, name):
    """Fails when a row begins without the state of the one before, a token is scored twice, or the first id counts."""
    tokenizer = toy_tokenizer()
    sizes = {"vocab_size": tokenizer.size, "num_layers": 2, "width": 8}
    config = LSTMConfig(**sizes, units=6, dropout_rate=0.0, embedding_dropout_rate=0.0)
    if name == "transformer_xl":
        config = TransformerXLConfig(**sizes, num_heads=2, feed_forward_width=8, memory_length=9, same_length=True)
        config = without_dropout(config)
    model = build(config, Execution(dtype="float32"))
    params = {"backbone": toy_pairs.random_tree(jax.eval_shape(model.init, jax.random.key(0)), 0.4)}
    path = write(tmp_path / "wiki.test.raw", WIKI)
    ids = np.array([tokenizer.encode(PLAIN)])
    outputs = model(params, Inputs(ids[:, :-1], np.arange(ids.shape[1] - 1)[None]))
    table = jax.nn.log_softmax(model.logits(params, outputs.states, outputs.output))[0]
    loss = -float(np.sum(np.asarray(table, np.float64)[np.arange(ids.shape[1] - 1), ids[0, 1:]]))
    for row_length in (7, 1000):
        zero_shot = ZeroShotModel(
            model,
            tokenizer,
            mesh=make_mesh(MeshConfig(), jax.devices()[:2]),
            batch_size=4,
            stream_length=row_length,
            show_progress=False,
        )
        zero_shot.params = params
        found = run(zero_shot, "wikitext2", path)["token_perplexity"]
        assert found.value == pytest.approx(math.exp(loss / (ids.shape[1] - 1)), rel=1e-5)
        assert found.how["tokens"] == ids.shape[1] - 1 and found.how["row_length"] == row_length
    windows = run(zero_shot, "wikitext2", path, context_length=16, stride=16)["token_perplexity"]
    assert windows.how["context_length"] == 16 and windows.value != found.value


def loss_of(log_probs, ids, length, stride):
    """The loss of all ids but the first: of `length` ids in a first window, then of `stride` in each further one."""
    loss, at, end = 0.0, 1, min(length + 1, len(ids))
    while at < len(ids):
        begin = max(0, end - 1 - length)
        loss -= log_probs(ids[begin:end])[at - begin - 1 :].sum()
        at, end = end, min(end + stride, len(ids))
    return loss


def run(model, name, path, **options):
    chosen = SimpleNamespace(**({"stride": None, "context_length": None} | options))
    found = list(TASKS[name].measure(model, path, chosen))
    return {one.metric: one for one in found}


def write(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize(("length", "stride"), [(None, None), (16, 5), (7, 7), (7, 1)])
def test_a_text_per_word_byte_and_character_of_the_file(toy_model, tmp_path, length, stride):
    """Fails when a token is scored twice or never, when a window has another context, when a unit is counted on the
    detokenized text, or when line ends are no words.
    """
    model, log_probs = toy_model
    path = write(tmp_path / "wiki.test.raw", WIKI)
    found = run(model, "wikitext2", path, context_length=length, stride=stride)
    ids = model.tokenizer.encode(PLAIN)
    assert len(ids) > 60
    loss = loss_of(log_probs, ids, length or 16, stride or length or 16)
    words, lines, size = len(WIKI.split()), WIKI.count("\n"), len(WIKI.encode())
    expected = {
        "word_perplexity": math.exp(loss / (words + lines)),
        "word_perplexity_without_line_ends": math.exp(loss / words),
        "bits_per_byte": loss / size / math.log(2),
        "bits_per_character": loss / len(WIKI) / math.log(2),
        "token_perplexity": math.exp(loss / (len(ids) - 1)),
    }
    assert {metric: one.value for metric, one in found.items()} == pytest.approx(expected, rel=1e-4)
    for one in found.values():
        assert one.how["stride"] == (stride or length or 16) and one.how["context_length"] == (length or 16)
        assert one.how["not_invertible"] == 0 and one.how["detokenizer"] == "wikitext"
        assert one.how["tokens"] == len(ids) - 1
        assert one.examples == one.scored == lines and one.stderr > 0
    assert f"({words + lines})" in found["word_perplexity"].how["unit"]


@pytest.mark.parametrize("stride", [16, 3])
def test_progress_follows_the_scored_tokens(toy_model, tmp_path, monkeypatch, stride):
    """Fails when bytes count that are only read, which the first batch does with all of this text, or when a batch of a
    block is not told by itself.
    """
    model, _ = toy_model
    told = []
    monkeypatch.setattr(Progress, "update", lambda self, done: told.append(done))
    path = write(tmp_path / "wiki.test.raw", WIKI * 4)
    tokens = run(model, "wikitext2", path, stride=stride)["token_perplexity"].how["tokens"]
    batches = -(-(tokens - 16 + stride) // stride // model.batch_size)
    assert len(told) in (batches + 1, batches + 2) and told == sorted(told)
    assert told[0] < 1.5 * len(WIKI * 4) / batches and told[-1] == len((WIKI * 4).encode())


def test_lines_that_do_not_come_back_are_counted(toy_model, tmp_path):
    model, _ = toy_model
    path = write(tmp_path / "ptb.test.txt", " it was n't \n don't go \n the cat \n don't \n")
    assert run(model, "ptb", path)["word_perplexity"].how["not_invertible"] == 2


def test_bytes_and_characters_without_a_detokenizer(toy_model, tmp_path, monkeypatch):
    """Fails when enwik8 is decoded away, or when of a whole data set more than its test part is scored."""
    model, log_probs = toy_model
    text = "the naïve cat\nlay , on the mat " * 3
    path = write(tmp_path / "enwik8", text.encode())
    found = run(model, "enwik8", path)
    loss = loss_of(log_probs, model.tokenizer.encode(text), 16, 16)
    assert found["bits_per_byte"].value == pytest.approx(loss / len(text.encode()) / math.log(2), rel=1e-4)
    assert found["bits_per_character"].value == pytest.approx(loss / len(text) / math.log(2), rel=1e-4)
    assert found["bits_per_byte"].how["detokenizer"] == "none"
    letters = "the cat sat on the mat " * 4
    monkeypatch.setattr(running_text, "WHOLE", 10 + len(letters))
    monkeypatch.setattr(running_text, "TEST", len(letters))
    part = run(model, "text8", write(tmp_path / "part", letters))["bits_per_character"]
    whole = run(model, "text8", write(tmp_path / "whole", "a" * 10 + letters))["bits_per_character"]
    assert whole.value == part.value and "test set" in whole.how["filters"] and "filters" not in part.how
    broken = run(model, "enwik8", write(tmp_path / "broken", b"the cat \xff\xfe sat"))["bits_per_byte"]
    assert broken.how["not_invertible"] == 2


@pytest.mark.parametrize("left", [[], [0]])
@pytest.mark.parametrize(("length", "stride"), [(1, 1), (4, 4), (4, 1), (5, 3)])
def test_windows_score_each_id_once_with_enough_before_it(left, length, stride):
    """Fails when the parts in which the ids come change a window."""
    for count in range(25):
        ids = [*left, *range(1, count + 1)]
        found = list(windows([ids[len(left) :]], left, length=length, stride=stride))
        scored = [i for window in found for i in window.ids[window.first :]]
        assert scored == ids[1:]
        for number, window in enumerate(found):
            assert len(window.ids) <= length + 1
            if number:
                assert window.first >= min(length - stride + 1, len(ids))
        parts = [[i] for i in ids[len(left) :]]
        assert list(windows(parts, left, length=length, stride=stride)) == found


@pytest.mark.parametrize(
    ("options", "content", "message"),
    [
        ({"context_length": 17}, WIKI, "--context-length must be at most 16"),
        ({"context_length": 8, "stride": 9}, WIKI, "--stride must be at most the context length 8"),
        ({}, "", "must have text, got an empty file"),
        ({}, b"\xff", "line 1: byte 0xff at offset 0 is not UTF-8"),
        ({}, None, "No such file or directory"),
    ],
)
def test_bad_input_is_one_line(toy_model, tmp_path, options, content, message):
    path = tmp_path / "file"
    if content is not None:
        write(path, content)
    with pytest.raises(InputError, match=message) as raised:
        run(toy_model[0], "wikitext2", path, **options)
    assert "\n" not in str(raised.value)
