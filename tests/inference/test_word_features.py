"""Features of words from other models: what they are, the files that keep them, and runs that read them."""

import json

import jax
import numpy as np
import pytest
import toy_encoder
import toy_runs
from faults import HARMS, harm_file
from flax import linen as nn
from toy_runs import assert_one_line, make_word_stores, run_here

import jaxlm
from jaxlm import predict
from jaxlm.distributed.mesh import MeshConfig, make_mesh, use_mesh
from jaxlm.inference.word_features import with_features, word_features
from jaxlm.models import build
from jaxlm.models.bilstm import BiLSTMConfig
from jaxlm.models.model import Inputs, source_inputs
from jaxlm.tasks import encode_examples
from jaxlm.tasks.examples import TaggedSentence
from jaxlm.tasks.kinds.tags import Tagging
from jaxlm.text import tokenizer_from_spec

pytestmark = pytest.mark.usefixtures("two_devices")
toy_runs.COMMANDS["predict"] = predict.main
TASK = Tagging(name="toy", labels=("O", "B-X", "I-X"))
SENTENCES = ("bada zizi", "zizi", "bobo bada zizi bobo tutu")
T5 = "--model.num-encoder-layers 2 --model.num-layers 1 --model.width 16 --model.num-heads 2 --model.head-width 8"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A BERT with random parameters, a toy ELMo of a few steps, and the store of words that it read."""
    place = tmp_path_factory.mktemp("features")
    vocabulary = toy_encoder.write_vocabulary(place)
    bert = toy_encoder.pretrained(place / "bert", vocabulary)
    store, _ = make_word_stores(place)
    elmo = place / "elmo"
    ended = run_here("pretrain", "debug/elmo", "--run", elmo, "--data.store", store, "--num-steps", 2)
    assert ended.code == 0, ended.errors
    return {"bert": bert, "elmo": elmo, "store": store}


@pytest.fixture(scope="module")
def translators(runs, tmp_path_factory):
    """A toy MT-LSTM and a toy T5, of one encoder layer more than decoder layers, after a step."""
    place = tmp_path_factory.mktemp("translators")
    rows = place / "rows.tsv"
    rows.write_text("source\ttarget\n" + "bada zizi bobo\tbobo zizi bada\n" * 8)
    words = ["--custom.train", rows, "--custom.dev", rows, "--tokenizer", f"store:{runs['store']}", "--num-epochs", 1]
    words += "--task custom --custom.kind text --custom.text source --custom.label target --batch-size 8".split()
    sizes = f"{T5} --model.vocab-size 0 --model.feed-forward-width 32 --length 16 --options.target-length 8"
    for name, more in {"debug/mt_lstm": [], "finetune/t5": sizes.split()}.items():
        ended = run_here("finetune", name, "--run", place / name.split("/")[1], *words, *more)
        assert ended.code == 0, ended.errors
    return {"mt_lstm": place / "mt_lstm", "t5": place / "t5"}


def encoder_layers(run, text):
    """Return the word vectors and the last states of the encoder alone, of the words of a text (2, words, width)."""
    ids = [*run.tokenizer.encode(text), run.tokenizer.specials["end"]]
    found = run.model.module.apply({"params": run.params["backbone"]}, source_inputs(np.array([ids])), method="encode")[
        0
    ]
    last = found[-1] if isinstance(found, list) else found
    backbone = run.params["backbone"]["embeddings"]
    table = backbone["source_tokens" if "source_tokens" in backbone else "tokens"]
    first = np.zeros_like(last[0])
    first[:, : table.shape[1]] = table[np.array(ids)]
    return np.stack([first, last[0]])[:, :-1]


@pytest.mark.parametrize("name", ["mt_lstm", "t5"])
def test_features_of_a_translator_are_its_encoders_states(runs, translators, name, tmp_path):
    """The reference is the module's own encoder, for each sentence alone, which test_mt_lstm_parity and test_t5_parity
    compare with others' code. Fails when the states are the decoder's, the sentence is read without its end or with
    another's words, a direction is lost, or the command and the Python API read something else.
    """
    (features,) = word_features([f"{translators[name]}:0,-1"], "none")
    mesh = make_mesh(MeshConfig())
    with use_mesh(mesh):
        found = with_features(encoded(runs["store"]), [features], mesh).features[0]
    model = jaxlm.load(str(translators[name]))
    wanted = [encoder_layers(model.run, text) for text in SENTENCES]
    np.testing.assert_allclose(np.swapaxes(found, 0, 1), np.concatenate(wanted, axis=1), rtol=0, atol=1e-6)
    assert features.shape == (2, model.run.model.config.width)

    assert [len(states) for states in model.hidden_states(list(SENTENCES))] == [3] * 3
    np.testing.assert_allclose(
        model.embed([SENTENCES[0]], "last")[0], model.hidden_states([SENTENCES[0]])[0][-1, -1], rtol=0, atol=1e-6
    )
    (tmp_path / "lines.txt").write_text("\n".join(SENTENCES) + "\n")
    command = ("--run", translators[name], "--input", tmp_path / "lines.txt", "--output", tmp_path / "out.jsonl")
    ended = run_here("evaluate", "features", *command, "--layers", 0, 2)
    assert ended.code == 0, ended.errors
    for line, one in zip((tmp_path / "out.jsonl").read_text().splitlines(), wanted, strict=True):
        tokens = json.loads(line)["features"][:-1]  # without the end
        values = [[layer["values"] for layer in token["layers"]] for token in tokens]
        np.testing.assert_allclose(np.swapaxes(values, 0, 1), one, rtol=0, atol=2e-6)
    assert_one_line(run_here("evaluate", "features", *command, "--layers", 3), 2, "layers must be from -3 to 2, got 3")


def encoded(store, sentences=SENTENCES):
    examples = [TaggedSentence(tuple(text.split())) for text in sentences]
    return encode_examples(TASK, examples, tokenizer_from_spec(f"store:{store}"), 16, "words")


@pytest.mark.parametrize("name", ["bert", "elmo"])
def test_a_word_has_the_states_of_its_first_token(runs, name):
    """The reference is the state of each token from the Python API, for each sentence alone.

    Fails when a word has the state of another token, of a special one, of another sentence or of another layer.
    """
    (features,) = word_features([f"{runs[name]}:0,-1"], "none")
    mesh = make_mesh(MeshConfig())
    with use_mesh(mesh):
        found = with_features(encoded(runs["store"]), [features], mesh).features[0]
    model, first = jaxlm.load(str(runs[name])), 0
    for text in SENTENCES:
        (states,) = model.hidden_states([text])
        tokens = [model.run.tokenizer.encode(word) for word in text.split()] if name == "bert" else text.split()
        at = 1 if name == "bert" else 0  # after CLS
        for own in tokens:
            np.testing.assert_allclose(found[first], states[[0, -1], at], rtol=0, atol=1e-6, err_msg=text)
            at, first = at + (len(own) if name == "bert" else 1), first + 1
    assert first == len(found)


def test_features_are_computed_once_and_read_to_the_bit(runs, tmp_path):
    """Fails when a file of another text, of other layers or of another model is read, or a bit is lost in it."""
    mesh = make_mesh(MeshConfig())
    split = encoded(runs["store"])

    def files():
        return {file.name: file.stat().st_mtime_ns for file in tmp_path.iterdir()}

    with use_mesh(mesh):
        some = word_features([str(runs["elmo"]), f"{runs['bert']}:1"], "none")
        computed = with_features(split, some, mesh)
        made = with_features(split, some, mesh, tmp_path)
        before = files()
        read = with_features(split, some, mesh, tmp_path)
        assert files() == before and len(before) == 2
        others = word_features([f"{runs['elmo']}:0,1"], "none")
        with_features(split, others, mesh, tmp_path)
        with_features(encoded(runs["store"], SENTENCES[:2]), some, mesh, tmp_path)
        assert len(files()) == 5
    for one in (made, read):
        for found, wanted in zip(one.features, computed.features, strict=True):
            np.testing.assert_array_equal(found, wanted)
    batch = read.batch(np.array([2, 1]), read.largest, 3)
    np.testing.assert_array_equal(batch.features[0][1, 0, :1], read.features[0][2:3])
    assert not np.any(batch.features[0][1, 0, 1:]) and not np.any(batch.features[0][2])


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_file_is_computed_again(runs, tmp_path, harm, caplog):
    """Fails when training reads what a disk error left in the file, or waits for a pipe."""
    mesh, split = make_mesh(MeshConfig()), encoded(runs["store"])
    some = word_features([f"{runs['bert']}:1"], "none")
    with use_mesh(mesh):
        (made,) = with_features(split, some, mesh, tmp_path).features
        (file,) = tmp_path.iterdir()
        harm_file(file, harm)
        (again,) = with_features(split, some, mesh, tmp_path).features
        assert [record.getMessage() for record in caplog.records if str(file) in record.getMessage()] == [
            f"{file} is damaged; its features are computed again"
        ]
        (kept,) = with_features(split, some, mesh, tmp_path).features
    np.testing.assert_array_equal(again, made)
    np.testing.assert_array_equal(kept, made)
    assert list(tmp_path.iterdir()) == [file] and len(caplog.records) == 1


def test_a_network_reads_features_in_training_and_prediction(runs, tmp_path):
    """Fails when a prediction has other features than the training had, or the mix is not trained."""
    sentences = toy_encoder.make_files(tmp_path / "files", "tagging")
    command = toy_encoder.arguments(tmp_path / "run", sentences, "tagging", "--tokenizer", f"store:{runs['store']}")
    command[0] = "debug/bilstm"
    ended = run_here("finetune", *command, "--word-features", f"{runs['elmo']}:all", runs["bert"])
    assert ended.code == 0, ended.errors
    tensors = jaxlm.load(str(tmp_path / "run")).params["backbone"]["embeddings"]
    assert np.any(tensors["mix_0"]["weights"]) and np.any(tensors["mix_1"]["gamma"] != 1)
    ended = run_here(
        *("predict", "--run", tmp_path / "run", "--input", sentences / "dev.jsonl", "--output", tmp_path / "out.jsonl")
    )
    assert ended.code == 0, ended.errors
    trained = [line for line in toy_encoder.lines(tmp_path / "run" / "predictions.jsonl") if line["split"] == "dev"]
    again = toy_encoder.lines(tmp_path / "out.jsonl")
    assert [line["prediction"] for line in trained] == [line["prediction"] for line in again]


def test_classes_of_texts_from_features_and_a_penalty(runs, tmp_path):
    """Fails when rows of one text lose their features, when the head reads padding, or when the penalty is not in the
    loss, is that of a part of the micro-batches, or is not a mean over weights of 0 at first.
    """
    files = toy_encoder.make_files(tmp_path / "files", "classification")
    penalty, tokenizer = 0.5, f"store:{runs['store']}"
    command = toy_encoder.arguments(tmp_path / "run", files, "classification", "--tokenizer", tokenizer)
    command[0] = "debug/bilstm"
    more = ("--head", "concat_pooling", "--word-features", runs["elmo"], "--mix-penalty", penalty, "--micro-batches", 2)
    ended = run_here("finetune", *command, *more)
    assert ended.code == 0, ended.errors
    losses, penalties = (toy_runs.metrics(tmp_path / "run", name) for name in ("task_loss", "mix_penalty"))
    for step, loss in toy_runs.metrics(tmp_path / "run").items():
        assert loss == pytest.approx(losses[step] + penalty * penalties[step], rel=1e-5)
    weights = np.asarray(jaxlm.load(str(tmp_path / "run")).params["backbone"]["embeddings"]["mix_0"]["weights"])
    assert penalties[1] == 0 < penalties[8] < 2 * np.sum(weights**2) < 8 * penalties[8]
    ended = run_here(
        *("predict", "--run", tmp_path / "run", "--input", files / "dev.jsonl", "--output", tmp_path / "out.jsonl")
    )
    assert ended.code == 0, ended.errors
    trained = [line for line in toy_encoder.lines(tmp_path / "run" / "predictions.jsonl") if line["split"] == "dev"]
    for before, again in zip(trained, toy_encoder.lines(tmp_path / "out.jsonl"), strict=True):
        assert before["prediction"] == again["prediction"]
        assert again["scores"] == pytest.approx(before["scores"], abs=1e-5)


def test_normed_features_keep_no_scale_and_no_padding():
    """Fails when features are not normed, by each layer over the real words of all rows, or the norm reads padding."""
    sizes = {"vocab_size": 7, "word_width": 2, "character_width": 0, "width": 4, "units": (3, 3)}
    model = build(BiLSTMConfig(**sizes, feature_norm="batch", feature_shapes=((2, 3),)))
    rng, lengths = np.random.default_rng(0), np.array([4, 1, 3])
    real = np.arange(4) < lengths[:, None]
    features = rng.standard_normal((3, 4, 2, 3)).astype(np.float32)
    ids, positions = rng.integers(7, size=(3, 4)), np.broadcast_to(np.arange(4), (3, 4))
    params = {"backbone": nn.unbox(model.init(jax.random.key(0)))}

    def states(features):
        return model(params, Inputs(ids, positions, real.astype(np.int32), features=(features,))).states

    found = states(features)
    layers = np.array([[3.0], [0.2]], np.float32)  # a scale of each
    np.testing.assert_allclose(states(features * layers + 5), found, atol=1e-5)
    np.testing.assert_allclose(states(np.where(real[..., None, None], features, 9.0)), found, atol=1e-6)
    assert not np.allclose(states(features * np.float32([1, 2, 3])), found, atol=1e-3)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{elmo}:0,3", "--word-features must have layers from -3 to 2 for"),
        ("{elmo}/none", "no such run directory"),
    ],
)
def test_features_that_are_not_there_are_refused(runs, tmp_path, given, said):
    command = ["debug/bilstm", "--run", tmp_path / "run", "--task", "custom", "--tokenizer"]
    command += [f"store:{runs['store']}", "--custom.kind", "tagging"]
    files = toy_encoder.make_files(tmp_path / "files", "tagging")
    command += ["--custom.train", files / "train.jsonl", "--custom.dev", files / "dev.jsonl"]
    ended = run_here("finetune", *command, "--word-features", given.format(**runs))
    assert_one_line(ended, 2, said)
    ended = run_here("finetune", "debug/finetune_bert", *command[1:], "--word-features", given.format(**runs))
    assert_one_line(ended, 2, "--word-features must be empty for an encoder (bert), which reads none")


def test_a_sentence_without_a_token_has_zeros(runs):
    """A variation selector alone has no WordPiece. Fails when the place of its first token is searched for."""
    (features,) = word_features([f"{runs['bert']}:-1"], "none")
    mesh = make_mesh(MeshConfig())
    with use_mesh(mesh):
        found = with_features(encoded(runs["store"], ("bada", "\ufe0f")), [features], mesh).features[0]
    assert np.any(found[0]) and not np.any(found[1:])
