"""CoVe's published file: the states of torch.nn.LSTM with its tensors, round trips, and files that are damaged.

The frozen numbers (tests/golden/cove_parity.npz, written by tests/parity/freeze_cove.py) run everywhere; with the extra
[parity] PyTorch runs again.
"""

import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from parity import cove_case as case
from parity import mt_lstm_case
from parity.check import WHY, assert_frozen, frozen
from safetensors.numpy import load_file, save_file
from toy_published import write_cove as write
from toy_runs import assert_one_line, run_here

import jaxlm
from jaxlm.errors import InputError
from jaxlm.interop import cove
from jaxlm.interop.sources import read_published
from jaxlm.models.bilstm import BiLSTMConfig
from jaxlm.models.mt_lstm import MTLSTMConfig

pytestmark = pytest.mark.usefixtures("two_devices")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write(tmp_path_factory.mktemp("cove") / "published")


def test_states_are_those_of_torch(file):
    """Fails when a gate, a direction, a layer or a kernel's axes are exchanged, one of the two biases is lost, padding
    enters the backward direction, a marker is read with the words, or an unknown word has another vector than zeros.
    """
    model, (rows, lengths) = jaxlm.load(f"cove:{file}"), case.make_rows()
    for row, states in enumerate(model.hidden_states(list(case.SENTENCES))):
        assert states.shape == (3, lengths[row], 2 * case.UNITS)
        real = slice(0, lengths[row])
        np.testing.assert_array_equal(states[0, :, : case.WIDTH], rows[row, real])
        for layer in (1, 2):
            wanted = frozen("cove")["states"][f"layer_{layer}"][row, real]
            np.testing.assert_allclose(states[layer], wanted, rtol=0, atol=1e-5)


@pytest.mark.parity
def test_the_script_gives_the_frozen_numbers():
    """Fails when the statement in tests/parity was changed and the file was not written again."""
    pytest.importorskip("torch", reason=WHY)
    from parity import cove_torch

    assert_frozen("cove", cove_torch.answers())


@pytest.mark.parity
def test_the_advice_for_a_pickle_makes_the_same_tensors(tmp_path):
    """Fails when the command of the message does not run, or loses or changes a tensor; both of PyTorch's formats."""
    torch = pytest.importorskip("torch", reason=WHY)
    tensors = {name: torch.tensor(values) for name, values in case.make_tensors().items()}
    for of_today in (True, False):
        torch.save(tensors, tmp_path / "encoder.pth", _use_new_zipfile_serialization=of_today)
        with pytest.raises(InputError, match="must be safetensors, got a pickle") as refused:
            read_published(f"cove:{tmp_path / 'encoder.pth'}")
        _, code = shlex.split(str(refused.value).partition(" with python ")[2])
        subprocess.run([sys.executable, "-c", code], check=True)
        found = load_file(tmp_path / "encoder.safetensors")
        for name, values in case.make_tensors().items():
            np.testing.assert_array_equal(found[name], values)
        (tmp_path / "encoder.safetensors").unlink()


def test_a_file_goes_through_a_run(file, tmp_path):
    """Fails when the commands lose a tensor or a bit, the sum of the biases is not kept, a vector is lost, or a second
    export is not the same as the first."""
    run, out = tmp_path / "run", tmp_path / "new" / "out.safetensors"
    for _ in range(2):
        ended = run_here("convert", "import", f"cove:{file}", "--run", run)
        assert ended.code == 0, ended.errors
    assert "is complete" in ended.output
    for _ in range(2):
        ended = run_here("convert", "export", run, "--to", f"cove:{out}")
        assert ended.code == 0 and "the word vectors of the tokenizer's pieces are in" in ended.output, ended.errors
    assert "is complete" in ended.output
    assert sorted(path.name for path in out.parent.iterdir()) == ["out.safetensors", "out.txt"]
    tensors, found = case.make_tensors(), load_file(out)
    assert found.keys() == tensors.keys()
    for name, values in tensors.items():
        if name.startswith("bias_ih"):
            values = values + tensors[name.replace("_ih", "_hh")]
        elif name.startswith("bias_hh"):
            values = 0 * values
        np.testing.assert_array_equal(found[name], values)
    first, second = read_published(f"cove:{file}"), read_published(f"cove:{out}")
    assert first.model == second.model and first.tokenizer.fingerprint == second.tokenizer.fingerprint
    for name, values in first.leaves.items():
        np.testing.assert_array_equal(second.leaves[name], values, err_msg=name)
    for words, said in (
        (("--to", f"cove:{tmp_path / 'out'}"), "--to must be cove:FILE.safetensors, got"),
        (("--to", f"cove:{out}", "--private"), "--private must be left out for cove:"),
        (("--to", f"elmo:{tmp_path / 'elmo'}"), "model must be an ELMo for elmo:PATH"),
    ):
        assert_one_line(run_here("convert", "export", run, *words), 2, said)
    out.with_suffix(".txt").write_text("other")
    assert_one_line(run_here("convert", "export", run, "--to", f"cove:{out}"), 2, "out.txt must not exist, got another")
    ended = run_here("convert", "import", f"cove:{file}", "--run", tmp_path / "other", "--verify")
    assert_one_line(ended, 2, "--verify must be off for cove:")


def test_an_mt_lstm_gives_the_originals_states_after_export(tmp_path):
    """The reference are the states of the authors' encoder, frozen in mt_lstm_parity. Fails when the encoder's leaves
    are taken for the decoder's, or the vectors of the target are written.
    """
    sizes, name = mt_lstm_case.CASES["three"], "three"
    model = MTLSTMConfig(
        vocab_size=sizes.vocab_size, num_layers=sizes.num_layers, width=sizes.width, word_width=sizes.word_width
    )
    leaves = mt_lstm_case.to_flat(mt_lstm_case.make_tree(sizes, mt_lstm_case.SEEDS[name]))
    words = [f"w{number}" for number in range(sizes.vocab_size)]
    tokenizer = SimpleNamespace(size=len(words), pieces=lambda ids: [words[number] for number in ids])
    assert cove.write_export(tmp_path / "mt.safetensors", model, leaves, tokenizer)
    rows = frozen("mt_lstm")[f"{name}:rows"]
    wanted = frozen("mt_lstm")[f"{name}:forward"]["encoder"]
    texts = [
        " ".join(words[number] for number in ids[:length])
        for ids, length in zip(rows["source"], rows["source_lengths"], strict=True)
    ]
    found = jaxlm.load(f"cove:{tmp_path / 'mt.safetensors'}").hidden_states(texts)
    for row, states in enumerate(found):
        np.testing.assert_allclose(states[-1], wanted[row, : states.shape[1]], rtol=1e-5, atol=1e-5)
    with pytest.raises(InputError, match="model must be an MT-LSTM, or a network over words with word vectors alone"):
        cove.write_export(tmp_path / "other.safetensors", BiLSTMConfig(vocab_size=3), {}, tokenizer)


def tensors(**changes):
    """Return a function that replaces tensors by their names; None: left out."""

    def change(directory: Path) -> None:
        given = case.make_tensors() | changes
        kept = {name: values for name, values in given.items() if values is not None}
        save_file(kept, directory / "encoder.safetensors")

    return change


def vectors(text: str | bytes):
    return lambda directory: (directory / "encoder.txt").write_bytes(text if isinstance(text, bytes) else text.encode())


def ones(*shape: int, dtype=np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


def cut(directory: Path) -> None:
    file = directory / "encoder.safetensors"
    file.write_bytes(file.read_bytes()[:1500])


BAD = {
    "a bias less": (tensors(bias_hh_l1=None), "- bias_hh_l1 [16]"),
    "a direction less": (tensors(weight_hh_l0_reverse=None), "- weight_hh_l0_reverse [16, 4]"),
    "no first layer": (tensors(weight_ih_l0=None), "must have weight_ih_l0 and weight_hh_l0"),
    "a layer more": (tensors(weight_ih_l2=ones(16, 8)), "- weight_hh_l2 [16, 4]"),
    "a tensor more": (tensors(embed=ones(3, 5)), "+ embed [3, 5]"),
    "another shape": (tensors(weight_ih_l1=ones(16, 5)), "- weight_ih_l1 [16, 8] + weight_ih_l1 [16, 5]"),
    "an axis more": (tensors(weight_ih_l0=ones(16, 5, 1)), "must be matrices, got the shapes [16, 5, 1] and [16, 4]; "),
    "no units": (tensors(weight_hh_l0=ones(16, 0)), "must have weight_ih_l0 and weight_hh_l0"),
    "NaN": (tensors(bias_ih_l0=np.nan * ones(16)), "the tensor bias_ih_l0 must be finite"),
    "integers": (tensors(bias_ih_l0=ones(16, dtype=np.int32)), "+ bias_ih_l0 of type I32"),
    "a file cut short": (cut, "is damaged or not a safetensors file"),
    "no word vectors": (lambda d: (d / "encoder.txt").unlink(), "link them there with ln -s VECTORS.txt"),
    "no words": (vectors(""), "must have vectors of words, got none"),
    "uneven vectors": (vectors("the 1 2 3 4 5\ncat 1 2 3 4\n"), "line 2 must have a word and 5 numbers"),
    "wider vectors": (vectors("the 1 2 3 4 5 6\n"), "line 1 must have a word and 5 numbers, got 6 after the word"),
    "another width": (vectors("1 6\nthe 1 2 3 4 5 6\n"), "must have 5 numbers for a word, as the encoder reads, got 6"),
    "a wrong header": (vectors("400000 5\nthe 1 2 3 4 5\n"), "must have 400000 words, as its first line says, got 1"),
    "a word for a number": (vectors("the 1 2 x 4 5\n"), "line 1 must have finite numbers after the word, got 'x'"),
    "a number that is none": (vectors("the 1 2 nan 4 5\n"), "finite numbers after the word, got 'nan'"),
    "a number beyond float32": (vectors("the 1 2 1e39 4 5\n"), "finite numbers after the word, got '1e39'"),
    "a word twice": (vectors("a 1 2 3 4 5\na 1 2 3 4 5\n"), "line 2 must have a word of its own, got 'a'"),
    "not UTF-8": (vectors(b"\xff 1 2 3 4 5\n"), "UTF-8"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_does_not_fit_is_refused_in_one_line(tmp_path, what):
    """Fails when such files are read, or end in a traceback."""
    file = write(tmp_path / "published")
    spoil, said = BAD[what]
    spoil(file.parent)
    ended = run_here("convert", "import", f"cove:{file}", "--run", tmp_path / "run")
    assert_one_line(ended, 2, said)
    assert not (tmp_path / "run").exists()


def test_words_with_blanks_and_an_unknown_word_are_read(tmp_path):
    """glove.840B has words such as `. . .` and `at name@domain.com`. Fails when such a line is refused, is a word, or
    the vector of `<unk>` is not that of unknown words."""
    file = write(tmp_path / "published")
    (file.parent / "encoder.txt").write_text(". . . 1 2 3 4 5\nat me@x.com 1 2 3 4 5\ncat 6 7 8 9 0\n<unk> 1 1 1 1 2\n")
    published = read_published(f"cove:{file}")
    assert published.tokenizer.pieces(range(published.tokenizer.size))[2:] == ["cat"]
    table = published.leaves["backbone/embeddings/tokens"]
    np.testing.assert_array_equal(table, [[1, 1, 1, 1, 2], [0] * 5, [6, 7, 8, 9, 0]])


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("encoder.pth", b"\x80\x02\x8a\n", "must be safetensors, got a pickle"),
        ("encoder.pt", b"PK\x03\x04", "must be safetensors, got a pickle"),
        ("encoder.bin", b"x", "must end in .safetensors, got .bin"),
        ("", b"", "is not a file; give the file of a model"),
    ],
)
def test_other_files_are_refused(tmp_path, name, content, said):
    if name:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=said):
        read_published(f"cove:{tmp_path / name}")
