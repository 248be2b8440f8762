"""The longest text of a published model: what its tokenizer names, where it has more positions."""

import dataclasses
import json
import shutil

import pytest
import toy_gpt2
import toy_run
from toy_runs import run_here

import jaxlm
from jaxlm.errors import InputError

pytestmark = pytest.mark.usefixtures("two_devices")

TEXT = "and the hill and the cat and"
POSITIONS = 45


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A GPT-2 of 45 positions as a directory of Hugging Face."""
    directory = tmp_path_factory.mktemp("longest")
    sizes = dataclasses.replace(toy_gpt2.SIZES, feed_forward_width=4 * toy_gpt2.SIZES.width)
    store = toy_run.toy_store(directory / "store", toy_gpt2.tokenizer())
    run = toy_run.pretrained(directory / "run", store, steps=(5,), sizes=sizes)
    assert run_here("convert", "export", run, "--to", f"hf:{directory / 'hf'}").code == 0
    return directory / "hf"


def copied(exported, directory, longest, sentences=None):
    """A copy whose tokenizer names another longest text."""
    shutil.copytree(exported, directory)
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": longest}))
    if sentences is not None:
        (directory / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": sentences}))
    return directory


@pytest.mark.parametrize(
    ("longest", "sentences", "wanted"),
    [(12, None, 12), (12, 9, 9), (64, None, POSITIONS), (1000000000000000019884624838656, 20, 20), (10**30, None, 45)],
)
def test_the_tokenizer_bounds_the_length(exported, tmp_path, longest, sentences, wanted):
    """Fails when texts are read beyond the length that the tokenizer names, or a tokenizer without a limit sets one."""
    model = jaxlm.load(f"hf:{copied(exported, tmp_path / 'hf', longest, sentences)}")
    assert model.length == wanted and model.run.config.length == wanted
    assert jaxlm.load(f"hf:{tmp_path / 'hf'}", beyond_length=True).length == POSITIONS


def test_a_bounded_model_is_imported_and_started_from_with_its_length(exported, tmp_path):
    """Fails when an imported run, or a run that starts from the files, forgets the length."""
    source = copied(exported, tmp_path / "hf", 12)
    ended = run_here("convert", "import", f"hf:{source}", "--run", tmp_path / "run")
    note = "model_max_length of tokenizer_config.json is 12: texts are read up to that length of the 45 positions"
    assert ended.code == 0 and note in ended.output
    assert jaxlm.load(tmp_path / "run").length == 12
    with pytest.raises(InputError, match="texts\\[0\\] must have at most 12 tokens"):
        jaxlm.load(f"hf:{source}").embed([TEXT])
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    words = ["evaluate", "perplexity", "--run", f"hf:{source}", "--input", text, "--length", 20]
    ended = run_here(*words)
    assert ended.code == 2 and "error: --length must be at most 12, the trained length of hf:" in ended.errors


@pytest.mark.parity
def test_truncated_texts_are_those_of_transformers(exported, tmp_path):
    """Fails when a truncated text has other tokens than transformers' tokenizer keeps."""
    transformers = pytest.importorskip("transformers", reason="install the extra [parity]")
    source = copied(exported, tmp_path / "hf", 7)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    model = jaxlm.load(f"hf:{source}")
    assert tokenizer.model_max_length == model.length == 7
    assert model.encode([TEXT], truncate=True) == [tokenizer(TEXT, truncation=True)["input_ids"]]
