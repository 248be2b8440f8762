"""OpenAI's and Google's own releases, against what their code says of names, order and shapes.

Fails when a variable is read into another place, when the optimizer's state is taken for the model, when the flat
vector's pieces are cut wrongly, and when a damaged file is not refused in one line. The TensorFlow checkpoints in
tests/golden were written by TensorFlow.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from parity import bundle_case as case
from toy_runs import assert_one_line, run_here

from jaxlm.errors import InputError
from jaxlm.interop.files import Bundle
from jaxlm.interop.sources import LAYER, read_published

TENSORFLOW = Path(__file__).resolve().parents[1] / "golden" / "tensorflow"
WIDTH, LAYERS = case.WIDTH, case.LAYERS


@pytest.mark.parametrize(
    ("prefix", "variables"),
    [("bert/bert_model.ckpt", case.bert_variables()), ("gpt2/model.ckpt", case.gpt2_variables())],
    ids=["bert", "gpt2"],
)
def test_a_bundle_is_read_as_tensorflow_wrote_it(prefix, variables):
    bundle = Bundle(TENSORFLOW / prefix)
    assert sorted(bundle.infos) == sorted(variables)
    for name, values in variables.items():
        found = bundle.read(name)
        assert found.dtype == values.dtype and np.array_equal(found, values), name


def test_googles_bert():
    published = read_published(f"google:{TENSORFLOW / 'bert'}")
    model, variables, leaves = published.model, case.bert_variables(), published.leaves
    assert model.norm_eps == 1e-12 and model.activation == "gelu_tanh"
    assert (model.num_layers, model.num_heads, model.vocab_size) == (LAYERS, 2, case.VOCABULARY)
    assert published.parts == ("pooler", "masked_lm", "next_sentence")
    x = case.numbers("x", (5, WIDTH))
    for n in range(LAYERS):  # a product with the kernel is the original's x @ kernel (modeling.py, dense_layer)
        for k, name in enumerate(("query", "key", "value")):
            kernel = leaves["backbone/blocks/attention/qkv_kernel"][n, :, k].reshape(WIDTH, WIDTH)
            wanted = variables[f"bert/encoder/layer_{n}/attention/self/{name}/kernel"]
            np.testing.assert_allclose(x @ kernel, x @ wanted, rtol=1e-6)
        out = leaves["backbone/blocks/feed_forward/out_kernel"][n]
        assert np.array_equal(out, variables[f"bert/encoder/layer_{n}/output/dense/kernel"])
        scale = leaves["backbone/blocks/attention_norm/scale"][n]
        assert np.array_equal(scale, variables[f"bert/encoder/layer_{n}/attention/output/LayerNorm/gamma"])
    assert np.array_equal(leaves["backbone/pooler/kernel"], variables["bert/pooler/dense/kernel"])
    assert np.array_equal(leaves["head/next_sentence/kernel"], variables["cls/seq_relationship/output_weights"].T)
    assert np.array_equal(leaves["head/masked_lm/output_bias"], variables["cls/predictions/output_bias"])
    used = sum(leaf.size for leaf in leaves.values())
    assert used == sum(v.size for name, v in variables.items() if "adam" not in name and name != "global_step")


def test_openais_gpt2():
    published = read_published(f"openai:{TENSORFLOW / 'gpt2'}")
    variables, leaves = case.gpt2_variables(), published.leaves
    assert published.model.norm == "pre" and published.model.num_positions == case.POSITIONS
    assert np.array_equal(leaves["backbone/embeddings/positions"], variables["model/wpe"])
    assert np.array_equal(leaves["backbone/final_norm/scale"], variables["model/ln_f/g"])
    for n in range(LAYERS):
        qkv = leaves["backbone/blocks/attention/qkv_kernel"][n].reshape(WIDTH, -1)
        assert np.array_equal(qkv, variables[f"model/h{n}/attn/c_attn/w"][0])
        assert np.array_equal(leaves["backbone/blocks/feed_forward/in_bias"][n], variables[f"model/h{n}/mlp/c_fc/b"])
    assert sum(leaf.size for leaf in leaves.values()) == sum(values.size for values in variables.values())


def gpt1_release(directory: Path) -> dict[str, np.ndarray]:
    """Ten pieces of one vector, cut where OpenAI's are not: within arrays. The arrays by Hugging Face's names."""
    directory.mkdir()
    width, inner = 128, 512
    sizes = {
        "attn.c_attn.weight": (1, width, 3 * width),
        "attn.c_attn.bias": (3 * width,),
        "attn.c_proj.weight": (1, width, width),
        "mlp.c_fc.weight": (1, width, inner),
        "mlp.c_fc.bias": (inner,),
        "mlp.c_proj.weight": (1, inner, width),
    }
    arrays = {
        "positions_embed.weight": case.numbers("p", (11, width)),
        "tokens_embed.weight": case.numbers("t", (31, width)),
    }
    for n in range(2):
        arrays |= {f"h.{n}.{name}": case.numbers(f"{n}{name}", sizes.get(name, (width,))) for name in LAYER}
    vector = np.concatenate([values.ravel() for values in arrays.values()])
    for k, piece in enumerate(np.array_split(vector, 10)):
        np.save(directory / f"params_{k}.npy", piece)
    (directory / "params_shapes.json").write_text(json.dumps([list(values.shape) for values in arrays.values()]))
    return arrays


def test_openais_gpt1(tmp_path):
    arrays = gpt1_release(tmp_path / "gpt1")
    published = read_published(f"openai:{tmp_path / 'gpt1'}")
    leaves = published.leaves
    assert (published.model.num_layers, published.model.num_heads, published.model.vocab_size) == (2, 2, 31)
    assert np.array_equal(leaves["backbone/embeddings/tokens"], arrays["tokens_embed.weight"])
    assert np.array_equal(leaves["backbone/embeddings/positions"], arrays["positions_embed.weight"])
    for n in range(2):
        qkv = leaves["backbone/blocks/attention/qkv_kernel"][n].reshape(128, -1)
        assert np.array_equal(qkv, arrays[f"h.{n}.attn.c_attn.weight"][0])
        assert np.array_equal(leaves["backbone/blocks/feed_forward_norm/bias"][n], arrays[f"h.{n}.ln_2.bias"])
        out = leaves["backbone/blocks/feed_forward/out_kernel"][n]
        assert np.array_equal(out, arrays[f"h.{n}.mlp.c_proj.weight"][0])
    assert sum(leaf.size for leaf in leaves.values()) == sum(values.size for values in arrays.values())


@pytest.mark.data
def test_the_published_shapes_are_gpt1(data_directory):
    """Fails when the real list of shapes does not give the model of the paper."""
    from jaxlm.interop.sources import _shapes

    shapes = _shapes(data_directory / "vocab" / "openai-gpt" / "params_shapes.json")
    assert len(shapes) == 2 + 12 * len(LAYER) and shapes[:2] == [[512, 768], [40478, 768]]
    assert sum(int(np.prod(shape)) for shape in shapes) == 116_534_784


def test_what_is_damaged_is_refused_in_one_line(tmp_path):
    gpt1_release(tmp_path / "gpt1")
    piece = tmp_path / "gpt1" / "params_4.npy"
    whole = piece.read_bytes()
    for spoil, said in (
        (lambda: piece.write_bytes(whole[:99]), "params_4.npy is damaged"),
        (lambda: np.save(piece, np.zeros(3, np.float32)), "hold"),
        (piece.unlink, "params_4.npy is missing"),
    ):
        spoil()
        ended = run_here("convert", "import", f"openai:{tmp_path / 'gpt1'}", "--run", tmp_path / "run")
        assert_one_line(ended, 2, said)
    for file, said in (("bert_model.ckpt.index", "is damaged"), ("bert_model.ckpt.data-00000-of-00001", "ends within")):
        directory = tmp_path / file
        shutil.copytree(TENSORFLOW / "bert", directory)
        (directory / file).write_bytes((directory / file).read_bytes()[:-9])
        ended = run_here("convert", "import", f"google:{directory}", "--run", tmp_path / "run")
        assert_one_line(ended, 2, said)
    with pytest.raises(InputError, match="no bert_config.json"):
        read_published(f"google:{tmp_path}")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("place", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("ending", ["index", "data-00000-of-00001"])
def test_a_flipped_byte_of_a_tensorflow_checkpoint_is_found(tmp_path, ending, place):
    """Fails on 2968321: parameters are read with a wrong bit, and nothing is said."""
    shutil.copytree(TENSORFLOW / "gpt2", tmp_path / "gpt2")
    file = tmp_path / "gpt2" / f"model.ckpt.{ending}"
    content = bytearray(file.read_bytes())
    content[int(len(content) * place)] ^= 4
    file.write_bytes(content)
    with pytest.raises(InputError, match=r"checksum; download it again|is damaged"):
        read_published(f"openai:{tmp_path / 'gpt2'}")


def test_sizes_that_the_tensors_do_not_have_are_refused_at_once(tmp_path):
    """Fails on 2968321: three million layers are listed for minutes."""
    shutil.copytree(TENSORFLOW / "gpt2", tmp_path / "gpt2")
    file = tmp_path / "gpt2" / "hparams.json"
    values = json.loads(file.read_text())
    for changed, said in (
        ({"n_layer": 3_000_000}, "number of layers must be that of the tensors"),
        ({"n_vocab": 10**15}, "vocab_size must be the size of a tensor's axis"),
        ({"n_ctx": "many"}, "n_ctx must be positive, got 'many'"),
        ({"n_head": 0}, "n_head must be positive, got 0"),
    ):
        file.write_text(json.dumps(values | changed))
        with pytest.raises(InputError, match=said):
            read_published(f"openai:{tmp_path / 'gpt2'}")
