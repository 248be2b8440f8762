"""Published models against Hugging Face's own: every layer, logits, gradients, and the same bits on the way back.

Fails when a tensor is read into another place, transposed wrongly, used twice or not at all; when a size, an activation
or an eps comes from a default; when an export has a tensor too many or a changed bit. What does not fit
is in test_published_bad.py.
"""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from parity import published_case as case
from safetensors.numpy import load_file, save_file

from jaxlm.errors import InputError
from jaxlm.inference.decoding import CachedModel, Prompt
from jaxlm.inference.strategies import Sampler, Sampling
from jaxlm.inference.token_outputs import IdRows, activations, model_outputs
from jaxlm.interop.exchange import exchange_of
from jaxlm.interop.huggingface import planned_export, write_export
from jaxlm.interop.published import Published, planned_tensors
from jaxlm.interop.sources import read_published
from jaxlm.models import build
from jaxlm.models.bert import BertConfig
from jaxlm.nn.config import Execution
from jaxlm.runs.trees import named_leaves, nested_leaves
from jaxlm.training.optimizer import OptimizerConfig, make_optimizer, schedule_of

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
LISTED = json.loads((GOLDEN / "published.json").read_text())
WHY = "needs PyTorch and transformers, the extra [parity]; the frozen twin in tests/golden runs without"


# Each kind of model and head once; the live test has all of them.
STEPPED = ("bert_pretraining", "bert_classification", "bert_choice", "bert_tagging", "bert_span", "openai_gpt", "gpt2")


@pytest.fixture(scope="session")
def frozen():
    with np.load(GOLDEN / "published.npz") as file:
        return {name: file[name] for name in file.files}


def make(directory: Path, name: str, rename=lambda key: key) -> Path:
    """The directory of a case as Hugging Face writes it, its numbers drawn by today's names of its tensors."""
    directory.mkdir(parents=True)
    listed = LISTED[name]
    (directory / "config.json").write_text(json.dumps(listed["config"]))
    tensors = {rename(key): case.tensor(key, shape) for key, shape in listed["tensors"].items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def found_by(published: Published, name: str, sizes: case.Sizes) -> dict[str, np.ndarray]:
    """What `published_torch.answers` says, from our model."""
    ids, segments = case.rows(sizes)
    encoder = isinstance(published.model, BertConfig)
    kind = None if published.task is None else published.task.kind
    rows = IdRows(ids, segments if encoder else None)
    arrays = activations(published.model, published.params, kind, rows)
    found = {}
    for key, values in arrays.items():
        for row, given in enumerate(ids):
            per_token = key.startswith("hidden") or values.ndim == 3
            found[f"{key}/{row}"] = values[row][: len(given)] if per_token else values[row]
            if per_token:
                assert not values[row][len(given) :].any(), "padding is not zero"
    gradient = gradient_of(published, kind, rows)
    rules = exchange_of(published.model).rules(published.parts, published.model)
    leaves = {leaf: values for leaf, values in gradient.items() if leaf in {rule.leaf for rule in rules}}
    for tensor in planned_tensors(rules, leaves, published.model):
        found[f"gradient/{tensor.name}"] = tensor.values()
    return found


def gradient_of(published: Published, kind: str | None, rows: IdRows) -> dict[str, np.ndarray]:
    """Of the sum over all rows of each output times its weights."""
    model = build(published.model, Execution(dtype="float32"))
    batch = padded_batch(rows)

    def total(params):
        outputs, summed = model_outputs(model, params, kind, *batch), 0.0
        for key in ("logits", "next_sentence_logits", "pooled"):
            if key in outputs and (key != "pooled" or published.architecture == "BertModel"):
                for row, given in enumerate(rows.ids):
                    values = outputs[key][row][: len(given)] if outputs[key].ndim == 3 else outputs[key][row]
                    summed = summed + jnp.sum(values * case.weights(f"{key}/{row}", values.shape))
        return summed

    gradient = jax.jit(jax.grad(total))(published.params)
    return {name: np.asarray(leaf) for name, leaf in named_leaves(gradient).items()}


def losses(published: Published, sizes: case.Sizes) -> np.ndarray:
    """What `published_torch.losses` says, from our model and our AdamW."""
    ids, segments = case.rows(sizes)
    kind = None if published.task is None else published.task.kind
    model = build(published.model, Execution(dtype="float32"))
    batch = padded_batch(IdRows(ids, segments if isinstance(published.model, BertConfig) else None))

    def loss_of(params):
        outputs, total = model_outputs(model, params, kind, *batch), 0.0
        for key in ("logits", "next_sentence_logits"):
            for row, given in enumerate(ids) if key in outputs else ():
                values = outputs[key][row][: len(given)] if outputs[key].ndim == 3 else outputs[key][row]
                wanted = case.target(f"{key}/{row}", values.shape)
                if values.shape[-1] == 1:
                    total = total + jnp.mean((values - wanted) ** 2)
                else:
                    chosen = jnp.take_along_axis(jax.nn.log_softmax(values), jnp.asarray(wanted)[..., None], axis=-1)
                    total = total - jnp.mean(chosen)
        return total

    settings = case.STEPS
    config = OptimizerConfig(
        peak_lr=sizes.rate,
        warmup=0,
        decay="constant",
        weight_decay=settings["decay"],
        clip_norm=settings["clip"],
        eps=settings["eps"],
        beta2=0.999,
    )
    names = named_leaves(published.params)
    tables = ("tokens", "positions", "types")
    still = {"head/bias"} if "score" in published.parts else set()  # Hugging Face's class has no such bias

    def boxed(name: str, leaf: np.ndarray) -> nn.LogicallyPartitioned:
        axis = "width" if name.endswith(("kernel", *tables)) else None
        return nn.LogicallyPartitioned(leaf, (axis,) * leaf.ndim)

    optimizer = make_optimizer(config, nested_leaves({name: boxed(name, leaf) for name, leaf in names.items()}))
    schedule = schedule_of(config, 20)

    @jax.jit
    def step(params, state):
        loss, gradient = jax.value_and_grad(loss_of)(params)
        leaves = {name: leaf * (name not in still) for name, leaf in named_leaves(gradient).items()}
        rate = optimizer.rate(state.count, schedule)
        updates, state = optimizer.transformation.update(nested_leaves(leaves), state, params, learning_rate=rate)
        return jax.tree.map(jnp.add, params, updates), state, loss

    params, state, seen = published.params, optimizer.transformation.init(published.params), []
    for _ in range(int(settings["steps"])):
        params, state, loss = step(params, state)
        seen.append(float(loss))
    return np.array(seen)


def padded_batch(rows: IdRows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """ids, what is no padding, and segments of all rows."""
    longest = max(map(len, rows.ids))
    ids, seen, types = (np.zeros((len(rows.ids), longest), np.int32) for _ in range(3))
    for row, given in enumerate(rows.ids):
        ids[row, : len(given)], seen[row, : len(given)] = given, 1
        types[row, : len(given)] = 0 if rows.segments is None else rows.segments[row]
    return ids, seen, types


def largest(ours: np.ndarray, theirs: np.ndarray) -> float:
    """The largest difference as a share of the largest number."""
    assert ours.shape == theirs.shape
    return float(np.abs(ours - theirs).max() / max(1e-6, np.abs(theirs).max()))


def with_prefix(name: str, key: str) -> str:
    """A tensor of a model without a head, by its name in one with a head."""
    kind, _ = case.CASES[name]
    return f"bert.{key}" if kind == "BertModel" and not key.startswith("bert.") else key


@pytest.mark.parametrize("name", case.CASES)
def test_frozen_twin(frozen, tmp_path, name):
    published = read_published(f"hf:{make(tmp_path / 'model', name)}")
    found = found_by(published, name, case.Sizes())
    wanted = {key.removeprefix(f"{name}/"): value for key, value in frozen.items() if key.startswith(f"{name}/")}
    wanted = {key: value for key, value in wanted.items() if key not in ("greedy", "losses")}
    for key, value in wanted.items():
        if key.startswith("gradient/"):
            ours = found[f"gradient/{with_prefix(name, key.removeprefix('gradient/'))}"]
            norm, product = case.summary(key, ours)
            if key.endswith(".key.bias"):  # the softmax takes it away: there is nothing but rounding
                assert max(norm, value[0]) < 1e-4, key
                continue
            # A sum over n random numbers: its rounding is judged by the gradient's norm.
            assert abs(norm - value[0]) <= 1e-4 * max(value[0], 1e-3), key
            assert value[0] < 1e-3 or abs(product - value[1]) < 2e-3, key
        else:
            assert largest(found[key], value) < 1e-5, key
    heads = {key.split("/")[0] for key in wanted if not key.startswith(("gradient", "hidden"))}
    assert heads, "no output is compared"


@pytest.mark.parametrize("name", case.CASES)
def test_the_same_bits_come_back(tmp_path, name):
    directory = make(tmp_path / "model", name)
    published = read_published(f"hf:{directory}")
    export = planned_export(
        published.model,
        published.leaves,
        published.task,
        architecture=published.architecture,
        config=published.config,
    )
    write_export(tmp_path / "back", export, tokenizer=None, dtype=published.dtype)
    before, after = load_file(directory / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert sorted(before) == sorted(after)
    assert all(np.array_equal(before[key], after[key]) for key in before)
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    given = LISTED[name]["config"]
    assert {key: config.get(key) for key in given} == given


@pytest.mark.parity
@pytest.mark.parametrize("name", case.CASES)
def test_live(tmp_path, name):
    """The sizes are odd ones; what is written loads without a missing or unexpected name."""
    pytest.importorskip("torch", reason=WHY)
    transformers = pytest.importorskip("transformers", reason=WHY)
    from parity import published_torch

    published_torch.save(name, case.ODD, tmp_path / "model")
    published = read_published(f"hf:{tmp_path / 'model'}")
    found = found_by(published, name, case.ODD)
    for key, value in published_torch.answers(name, case.ODD).items():
        where = f"gradient/{with_prefix(name, key.removeprefix('gradient/'))}" if key.startswith("gradient/") else key
        if key.endswith(".key.bias"):
            assert max(np.abs(found[where]).max(), np.abs(value).max()) < 1e-3, key
        else:
            assert largest(found[where], value) < (1e-4 if key.startswith("gradient/") else 1e-5), key
    export = planned_export(published.model, published.leaves, published.task, architecture=published.architecture)
    write_export(tmp_path / "back", export, tokenizer=None)
    cls = getattr(transformers, published.architecture)
    _, said = cls.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(said.values()), said
    assert published.architecture == case.CASES[name][0]


@pytest.mark.parametrize("name", STEPPED)
def test_twenty_steps_of_adamw(frozen, tmp_path, name):
    """Fails when a gradient, the clip, the decay or Adam itself differs: losses agree to 1e-4 as they fall,
    and to 1e-5 of a nat where next to nothing is left of them."""
    wanted = frozen[f"{name}/losses"]
    found = losses(read_published(f"hf:{make(tmp_path / 'model', name)}"), case.Sizes())
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    assert wanted[-1] < 0.9 * wanted[0]


@pytest.mark.parity
@pytest.mark.parametrize("name", [name for name in case.CASES if name != "bert"])
def test_twenty_steps_of_adamw_live(tmp_path, name):
    pytest.importorskip("torch", reason=WHY)
    pytest.importorskip("transformers", reason=WHY)
    from parity import published_torch

    published_torch.save(name, case.ODD, tmp_path / "model")
    found = losses(read_published(f"hf:{tmp_path / 'model'}"), case.ODD)
    np.testing.assert_allclose(found, published_torch.losses(name, case.ODD), rtol=1e-4, atol=1e-5)


def greedy(name: str, directory: Path) -> np.ndarray:
    """The ids after each prompt, all prompts in one batch, by a model of the longer position table."""
    directory.mkdir()
    config = LISTED[name]["config"] | {"n_positions": case.LONG.positions}
    (directory / "config.json").write_text(json.dumps(config))
    shapes = LISTED[name]["tensors"]
    tensors = {
        key: case.tensor(key, [case.LONG.positions, shape[1]] if "positions_embed" in key or "wpe" in key else shape)
        for key, shape in shapes.items()
    }
    save_file(tensors, directory / "model.safetensors")
    published = read_published(f"hf:{directory}")
    cached = CachedModel(build(published.model, Execution(dtype="float32")), published.params)
    prompts = [Prompt(prompt, 64) for prompt in case.prompts()]
    return np.stack(list(Sampler(cached, Sampling(temperature=0.0))(prompts)))[:, :, 0].T


@pytest.mark.parametrize("name", case.DECODERS)
def test_greedy_ids_are_hugging_faces(frozen, tmp_path, name):
    """Fails when the cache, the positions or the final norm of decoding differ from those of training."""
    assert np.array_equal(greedy(name, tmp_path / "model"), frozen[f"{name}/greedy"].astype(int))


@pytest.mark.parity
@pytest.mark.parametrize("name", case.DECODERS)
def test_greedy_ids_live(frozen, name):
    pytest.importorskip("torch", reason=WHY)
    pytest.importorskip("transformers", reason=WHY)
    from parity import published_torch

    assert np.array_equal(published_torch.greedy(name), frozen[f"{name}/greedy"].astype(int))


def test_both_gelus_are_told_apart(tmp_path):
    one, other = (read_published(f"hf:{make(tmp_path / name, name)}") for name in ("gpt2", "gpt2_exact"))
    assert (one.model.activation, other.model.activation) == ("gelu_tanh", "gelu_erf")
    assert one.model.norm_eps == case.Sizes().eps and one.model.feed_forward_width == case.Sizes().inner


@pytest.mark.parametrize(
    "rename",
    [
        lambda key: re.sub(r"(LayerNorm|ln_\w)\.weight", r"\1.gamma", re.sub(r"(LayerNorm)\.bias", r"\1.beta", key)),
        lambda key: f"module.{key}",
        lambda key: re.sub(r"^(bert|transformer)\.", "", key),
    ],
    ids=["gamma and beta", "module", "no prefix"],
)
@pytest.mark.parametrize("name", ["bert_masked_lm", "gpt2", "openai_gpt"])
def test_older_spellings(tmp_path, name, rename):
    today = read_published(f"hf:{make(tmp_path / 'today', name)}")
    older = read_published(f"hf:{make(tmp_path / 'older', name, rename)}")
    assert all(np.array_equal(today.leaves[leaf], older.leaves[leaf]) for leaf in today.leaves)
    assert today.leaves.keys() == older.leaves.keys() and today.architecture == older.architecture


def changed(directory: Path, change) -> Path:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def test_buffers_and_second_names_of_tied_tensors_are_no_parameters(tmp_path):
    def change(tensors):
        tensors["bert.embeddings.position_ids"] = np.arange(13)[None]
        tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"]
        tensors["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"]

    directory = make(tmp_path / "model", "bert_masked_lm")
    plain = read_published(f"hf:{directory}")
    assert plain.leaves.keys() == read_published(f"hf:{changed(directory, change)}").leaves.keys()

    def untie(tensors):
        tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"] + 1

    with pytest.raises(InputError, match=r"decoder.weight differs from bert.embeddings.word_embeddings.weight"):
        read_published(f"hf:{changed(directory, untie)}")


@pytest.mark.parametrize(
    ("name", "given", "found"),
    [
        ("bert_pretraining", "BertForMaskedLM", "BertForPreTraining"),  # as BERT's own are published
        ("bert", "BertForMaskedLM", "BertModel"),  # as sentence encoders are
        ("bert_span", None, "BertForQuestionAnswering"),
        ("bert_tagging", None, "BertForTokenClassification"),
        ("bert_choice", "BertForMultipleChoice", "BertForMultipleChoice"),
    ],
)
def test_the_tensors_say_which_class_it_is(tmp_path, name, given, found):
    directory = make(tmp_path / "model", name)
    edit_config(directory, architectures=None if given is None else [given])
    published = read_published(f"hf:{directory}")
    assert published.architecture == found
    export = planned_export(published.model, published.leaves, published.task, architecture=published.architecture)
    write_export(tmp_path / "back", export, tokenizer=None)
    before, after = load_file(directory / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert before.keys() == after.keys() and all(np.array_equal(before[key], after[key]) for key in before)


def test_a_classifier_of_no_class_is_refused(tmp_path):
    """Fails when classes and choices are told apart by a guess: their heads have the same names."""
    directory = make(tmp_path / "model", "bert_classification")
    edit_config(directory, architectures=["SomethingElse"])
    with pytest.raises(
        InputError, match="architectures must be one of .* the tensors of classifier, got 'SomethingElse'"
    ):
        read_published(f"hf:{directory}")


def test_shards_and_types(tmp_path):
    """Fails when a shard is left out, or a half-precision checkpoint comes back in another type."""
    whole = read_published(f"hf:{make(tmp_path / 'whole', 'gpt2')}")
    directory = make(tmp_path / "parts", "gpt2")
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    files = ["a.safetensors", "b.safetensors"]
    parts = [{key: value for k, (key, value) in enumerate(sorted(tensors.items())) if k % 2 == n} for n in range(2)]
    for file, part in zip(files, parts, strict=True):
        save_file(part, directory / file)
    index = {"weight_map": {key: file for file, part in zip(files, parts, strict=True) for key in part}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    sharded = read_published(f"hf:{directory}")
    assert all(np.array_equal(whole.leaves[leaf], sharded.leaves[leaf]) for leaf in whole.leaves)
    (directory / "b.safetensors").unlink()
    with pytest.raises(InputError, match="b.safetensors is missing"):
        read_published(f"hf:{directory}")
    for dtype, name in ((jnp.bfloat16, "BF16"), (np.float16, "F16")):
        half = make(tmp_path / name, "gpt2")
        tensors = {key: value.astype(dtype) for key, value in load_file(half / "model.safetensors").items()}
        save_file(tensors, half / "model.safetensors", metadata={"format": "pt"})
        published = read_published(f"hf:{half}")
        export = planned_export(published.model, published.leaves, None, architecture=published.architecture)
        write_export(tmp_path / f"{name}-back", export, tokenizer=None, dtype=published.dtype)
        back = load_file(tmp_path / f"{name}-back" / "model.safetensors")
        assert published.dtype == name
        assert all(back[key].dtype == dtype and back[key].tobytes() == tensors[key].tobytes() for key in tensors)


def edit_config(directory: Path, **values) -> None:
    config = json.loads((directory / "config.json").read_text())
    config = {key: value for key, value in (config | values).items() if value != "absent"}
    (directory / "config.json").write_text(json.dumps(config))
