"""T5 from and to Hugging Face's directories, against numbers of the library itself (see tests/parity/freeze_t5.py).

The directories have the tensors of the parity cases by the library's names, and config.json as transformers 5.23 writes
it: with `tie_word_embeddings` true for an untied model too. Older files lack its new keys.
"""

import json

import numpy as np
import pytest
from parity import t5_case as case
from parity.check import frozen
from safetensors.numpy import load_file
from toy_published import write_t5 as write

from jaxlm.errors import InputError
from jaxlm.inference.token_outputs import IdRows, activations, read_ids
from jaxlm.interop.huggingface import planned_export, read, write_export

NAMES = list(case.CASES)


def expected(name: str, group: str) -> dict[str, np.ndarray]:
    return frozen("t5")[f"{name}:{group}"]


def rows_of(name: str) -> IdRows:
    rows = expected(name, "rows")
    lengths, sources = rows["segments"].sum(axis=1), rows["source_segments"].sum(axis=1)
    ids = [ids[:length].tolist() for ids, length in zip(rows["ids"], lengths, strict=True)]
    return IdRows(ids, source=[ids[:length].tolist() for ids, length in zip(rows["source"], sources, strict=True)])


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_hugging_faces(tmp_path, name):
    """Fails when a tensor goes to another layer or stack, is transposed, or an untied output is tied or scaled."""
    published = read(write(tmp_path, name), "hf:x")
    found = activations(published.model, published.params, None, rows_of(name))
    np.testing.assert_allclose(found["logits"], expected(name, "forward")["logits"], rtol=2e-5, atol=2e-5)
    assert f"hidden_{case.CASES[name].num_layers}" in found


@pytest.mark.parametrize("name", NAMES)
def test_a_round_trip_keeps_every_bit(tmp_path, name):
    """Fails when a tensor is renamed or cast, or a setting is lost; both keys about the output are written."""
    source = write(tmp_path / "in", name)
    published = read(source, "hf:x")
    export = planned_export(published.model, published.leaves, None, config=published.config)
    assert write_export(tmp_path / "out", export, tokenizer=None)
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert set(before) == set(after)
    for key, value in before.items():
        np.testing.assert_array_equal(after[key], value, err_msg=key)
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert values["tie_word_embeddings"] is (name == "t5") and values["scale_decoder_outputs"] is (name == "t5")
    assert values["decoder_start_token_id"] == 0 and values["architectures"] == ["T5ForConditionalGeneration"]
    assert read(tmp_path / "out", "hf:y").model == published.model


def test_old_files_are_read(tmp_path):
    """Fails when aliases count as tensors, an unused table is missed, or the output of old files is not scaled."""
    shared = case.make_tree(case.CASES["t5"], case.SEEDS["t5"])["backbone"]["embeddings"]["tokens"]
    aliases = {"encoder.embed_tokens.weight": shared, "decoder.embed_tokens.weight": shared}
    unused = {"decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": np.ones((12, 2), np.float32)}
    drop = ("scale_decoder_outputs", "feed_forward_proj", "initializer_factor")
    directory = write(tmp_path / "t5", "t5", drop=drop, tensors=aliases | unused)
    assert read(directory, "hf:x").model == read(write(tmp_path / "new", "t5"), "hf:y").model
    # T5 1.1 as it was published: an untied output, by both signs.
    old = write(tmp_path / "1.1", "t5_1_1", drop=("scale_decoder_outputs",), tie_word_embeddings=False)
    model = read(old, "hf:x").model
    assert (model.output, model.scaled_output) == ("untied", False)
    mt5 = write(tmp_path / "mt5", "t5_1_1", model_type="mt5", architectures=["MT5ForConditionalGeneration"])
    published = read(mt5, "hf:x")
    export = planned_export(
        published.model, published.leaves, None, config=published.config, architecture=published.architecture
    )
    write_export(tmp_path / "out", export, tokenizer=None)
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (values["model_type"], values["architectures"]) == ("mt5", ["MT5ForConditionalGeneration"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tensors": {"lm_head.weight": np.zeros((30, 10), np.float32)}}, r"lm_head.weight \[31, 10\]"),
        ({"num_decoder_layers": 4}, "number of layers must be that of the tensors, 2, got 4"),
        ({"num_layers": 5}, r"number of layers \(num_encoder_layers\) must be that of the tensors, 3, got 5"),
        ({"feed_forward_proj": "gated-silu"}, "feed_forward_proj must be one of relu, gated-gelu"),
        ({"d_ff": 0}, r"config\.json must describe a model: model\.feed_forward_width must be at least 1, got 0"),
        ({"d_kv": None}, "d_kv must be a number, got nothing"),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path, changes, said):
    with pytest.raises(InputError, match=said):
        read(write(tmp_path, "t5", **changes), "hf:x")


def test_activations_need_a_source(tmp_path):
    """Fails when ids without a source are taken for an encoder's, or a source of another number of rows."""
    model = read(write(tmp_path / "model", "t5"), "hf:x").model
    for values in ({"ids": [[0, 5]]}, {"ids": [[0, 5]], "source": [[4, 1], [4, 1]]}):
        (tmp_path / "ids.json").write_text(json.dumps(values))
        with pytest.raises(InputError, match='"source" must have one row per row of "ids"'):
            read_ids(tmp_path / "ids.json", model)
    (tmp_path / "ids.json").write_text(json.dumps({"ids": [[0, 5]], "source": [[4, 99]]}))
    with pytest.raises(InputError, match=r"source\[0\] must have whole numbers from 0 to 30, got 99"):
        read_ids(tmp_path / "ids.json", model)
