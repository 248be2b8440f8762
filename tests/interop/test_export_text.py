"""Exported tokenizers: the input that the model was tuned on, and the same tokenizer after export and import.

Fails when a text reaches Hugging Face's classes without the tokens that stood around it in training, when padding hides
the token that a decoder answers at, when an import does not know a tokenizer again, or when a card leaves out figures.
"""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import toy_encoder
import toy_run
from test_convert import TASK, random_leaves
from toy_runs import assert_one_line, run_here

from jaxlm.errors import InputError
from jaxlm.interop.cards import model_card
from jaxlm.interop.huggingface import planned_export, write_export
from jaxlm.interop.sources import read_published
from jaxlm.models.gpt import GPTConfig
from jaxlm.tasks import CustomConfig
from jaxlm.tasks.input_formats import ROLES, arrange, arrange_segments
from jaxlm.text import OWN, Tokenizer, published_files, tokenizer_from_spec, train_sentencepiece
from jaxlm.text.bpe import GPT1Tokenizer, build_gpt2
from jaxlm.text.library import build_json
from jaxlm.text.wordpiece import build_wordpiece

pytestmark = pytest.mark.usefixtures("two_devices")

SIZES = GPTConfig(num_positions=48, num_layers=1, width=16, num_heads=2, feed_forward_width=64, init_std=0.3)
FIRST = ("The cat sat.", "", "the hill " * 30, "one " * 20, "two " * 17)
SECOND = ("A bird sang.", "The dog", "tree", "one " * 12, "")


def byte_level() -> tuple[bytes, bytes]:
    """A vocabulary and merges as GPT-2's: all bytes, a few merges, the token that ends documents."""
    from tokenizers import pre_tokenizers

    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["t h", "th e", "\u0120 the", "a t", "c at", "\u0120 cat"]
    pieces += [merge.replace(" ", "") for merge in merges] + ["<|endoftext|>"]
    vocabulary = json.dumps({piece: i for i, piece in enumerate(pieces)})
    return vocabulary.encode(), ("#version: 0.2\n" + "\n".join(merges) + "\n").encode()


def gpt1() -> GPT1Tokenizer:
    """A vocabulary as GPT-1's: letters, each also at the end of a word."""
    letters = "abcdefghijklmnopqrstuvwxyz.,?"
    pieces = ["<unk>", *letters, *(f"{letter}</w>" for letter in letters), "th", "the</w>", "\n</w>"]
    vocabulary = json.dumps({piece: i for i, piece in enumerate(pieces)})
    return GPT1Tokenizer(vocabulary.encode(), b"#version: 0.2\nt h\nth e</w>\n")


def tokenizers() -> dict[str, Tokenizer]:
    """One of each kind."""
    twin = build_gpt2(*byte_level())
    return {
        "sentencepiece": train_sentencepiece(toy_run.DOCUMENTS, 310),
        "wordpiece": build_wordpiece("".join(f"{piece}\n" for piece in toy_encoder.PIECES).encode()),
        "gpt1": gpt1(),
        "gpt2": twin,
        "hf": build_json(published_files(twin, 48)["tokenizer.json"], {"end": "<|endoftext|>"}),
    }


@pytest.fixture(scope="module", params=["sentencepiece", "wordpiece", "gpt1", "gpt2", "hf"])
def tokenizer(request):
    return tokenizers()[request.param]


def ours(tokenizer: Tokenizer, first: str, second: str | None, length: int = 48) -> list[int]:
    """What a tuned decoder reads."""
    texts = [tokenizer.encode(text) for text in (first, second) if text is not None]
    ((ids,), _, _) = arrange(texts, [], "single" if second is None else "entailment", tokenizer.specials, length)
    return ids


@pytest.mark.parametrize("grown", [False, True], ids=["pretrained", "tuned"])
def test_an_import_knows_the_exported_tokenizer_again(tokenizer, tmp_path, grown):
    """Fails on 2968321: what was SentencePiece, WordPiece or GPT-2 comes back as another kind with the same ids."""
    tokenizer = tokenizer.with_specials(ROLES) if grown else tokenizer
    model = dataclasses.replace(SIZES, vocab_size=tokenizer.size)
    leaves = {name: leaf for name, leaf in random_leaves(model, 1).items() if not name.startswith("head/")}
    write_export(tmp_path / "out", planned_export(model, leaves, None), tokenizer=tokenizer)
    published = read_published(f"hf:{tmp_path / 'out'}")
    assert published.tokenizer.fingerprint == tokenizer.fingerprint and not published.notes
    file = tmp_path / "out" / "tokenizer.json"
    values = json.loads(file.read_text())
    added = {"id": tokenizer.size, "content": "<new>", "special": True, "normalized": False}
    added |= {"single_word": False, "lstrip": False, "rstrip": False}
    file.write_text(json.dumps(values | {"added_tokens": [*values["added_tokens"], added]}))
    changed = tokenizer_from_spec(f"hf:{tmp_path / 'out'}")
    assert changed.size == tokenizer.size + 1 and changed.kind == "tokenizers"
    first = next(iter(tokenizer.files))
    (tmp_path / "out" / OWN / first).write_bytes(b"")
    with pytest.raises(InputError, match=f"delete .*{OWN} to read tokenizer.json alone"):
        tokenizer_from_spec(f"hf:{tmp_path / 'out'}")


def test_a_tuned_decoders_tokenizer_builds_its_input(tokenizer):
    """Fails on 2968321: no special token is added, and the model answers at a text's last word."""
    from tokenizers import Tokenizer as Library

    tokenizer = tokenizer.with_specials(ROLES)
    files = published_files(tokenizer, 40, "decoder")
    library, config = Library.from_str(files["tokenizer.json"].decode()), json.loads(files["tokenizer_config.json"])
    library.enable_truncation(40)
    for first, second in zip(FIRST, SECOND, strict=True):
        assert library.encode(first).ids == ours(tokenizer, first, None, 40), first
        both = library.encode(first, second)
        assert both.ids == ours(tokenizer, first, second, 40) and set(both.type_ids) == {0}
    assert config["model_max_length"] == 40 and "token_type_ids" not in config["model_input_names"]
    assert library.token_to_id(config["pad_token"]) != tokenizer.specials["extract"]


def test_a_decoder_that_jaxlm_did_not_tune_is_not_asked(tmp_path):
    """Fails on 2968321: a published GPT-2 classifier, which reads plain text, ends predict in a traceback."""
    tokenizer = tokenizers()["gpt2"]
    model = dataclasses.replace(SIZES, norm="pre", vocab_size=tokenizer.size)
    write_export(tmp_path / "out", planned_export(model, random_leaves(model, 3), TASK), tokenizer=tokenizer)
    shutil.rmtree(tmp_path / "out" / OWN)
    assert run_here("convert", "import", f"hf:{tmp_path / 'out'}", "--run", tmp_path / "run").code == 0
    rows = toy_encoder.write_lines(tmp_path / "rows.jsonl", [{"text": "the cat"}])
    ended = run_here("predict", "--run", tmp_path / "run", "--input", rows)
    assert_one_line(ended, 2, "start, delimiter and extract", "jaxlm.finetune --start")


def test_an_encoders_tokenizer_builds_its_input_of_any_vocabulary():
    """Fails on 2968321: a SentencePiece vocabulary's gets no CLS and SEP."""
    from tokenizers import Tokenizer as Library

    for tokenizer in (tokenizers()["sentencepiece"], tokenizers()["wordpiece"]):
        library = Library.from_str(published_files(tokenizer, 40, "encoder")["tokenizer.json"].decode())
        library.enable_truncation(41)  # 38 for the texts: an odd number is shared out otherwise by one token
        for first, second in zip(FIRST, SECOND, strict=True):
            texts = [tokenizer.encode(text) for text in (first, second)]
            ((wanted,), (border,), _) = arrange_segments(texts, [], "entailment", tokenizer.specials, 41)
            found = library.encode(first, second)
            assert found.ids == wanted and found.type_ids == [int(k >= border) for k in range(len(wanted))]


def rows(kind: str, count: int = 14) -> list[dict[str, str]]:
    """Rows of a task, some longer than any model reads."""
    rng = np.random.default_rng(3)
    words = ["the", "cat", "sat", "on", *toy_encoder.WORDS]
    text = lambda most: " ".join(rng.choice(words, rng.integers(1, most)))  # noqa: E731
    found = [{"text": text(60 if k % 5 == 0 else 12), "label": ("no", "maybe", "yes")[k % 3]} for k in range(count)]
    return found if kind == "single" else [row | {"second": text(4)} for row in found]


def tuned(directory, model: str, form: str, tokenizer: Tokenizer, monkeypatch):
    """A tuned run of random parameters, and its dev rows."""
    files = {part: toy_encoder.write_lines(directory / f"{part}.jsonl", rows(form)) for part in ("train", "dev")}
    columns = {"text": "text", "label": "label"} | ({"text_pair": "second"} if form == "pair" else {})
    custom = CustomConfig(**{part: str(file) for part, file in files.items()}, **columns)
    if model == "bert":
        (directory / "vocab.txt").write_bytes(tokenizer.files["vocab.txt"])
        monkeypatch.setattr(toy_encoder, "custom", lambda *_: custom)
        return toy_encoder.finetuned(directory / "run", directory / "vocab.txt", directory, "x"), files["dev"]
    norm = "pre" if model == "gpt2" else "post"
    monkeypatch.setattr(toy_run, "SIZES", dataclasses.replace(SIZES, norm=norm))
    run, _, _ = toy_run.finetuned(directory / "run", tokenizer.with_specials(ROLES), custom)
    return run, files["dev"]


@pytest.mark.parity
@pytest.mark.parametrize(
    ("model", "kind", "form"),
    [
        ("gpt1", "gpt1", "single"),
        ("gpt2", "gpt2", "pair"),
        ("gpt2", "sentencepiece", "single"),
        ("bert", "wordpiece", "pair"),
    ],
)
def test_pipeline_labels_as_predict_does(tmp_path, monkeypatch, model, kind, form):
    """Fails on 2968321: a decoder's pipeline reads the text alone, and adds token types."""
    transformers = pytest.importorskip("transformers", reason="install the extra [parity]")
    pytest.importorskip("torch", reason="install the extra [parity]")
    run, dev = tuned(tmp_path, model, form, tokenizers()[kind], monkeypatch)
    ended = run_here("predict", "--run", run, "--input", dev)
    assert ended.code == 0, ended.errors
    wanted = [json.loads(line) for line in ended.output.splitlines()]
    assert run_here("convert", "export", run, "--to", f"hf:{tmp_path / 'out'}").code == 0
    classify = transformers.pipeline("text-classification", str(tmp_path / "out"), device="cpu")
    inputs = [{"text": row["text"], "text_pair": row.get("second")} for row in toy_encoder.lines(dev)]
    for batch_size in (1, 5):  # rows alone, and padded
        found = classify(inputs, truncation=True, batch_size=batch_size, top_k=None)
        for theirs, line in zip(found, wanted, strict=True):
            assert theirs[0]["label"] == line["prediction"]
            shares = {share["label"]: share["score"] for share in theirs}
            assert all(abs(shares[label] - share) < 1e-4 for label, share in line["scores"].items())
    assert np.ptp([line["scores"]["no"] for line in wanted]) > 0.01, "all rows are alike: nothing is told apart"
    card = (tmp_path / "out" / "README.md").read_text()
    assert "pipeline_tag: text-classification" in card and ('"text_pair": "the second"' in card) == (form == "pair")


def test_a_card_names_input_use_and_all_figures(tmp_path):
    """Fails on 2968321: the figures of MNLI's two dev parts, the input form and a snippet are not on it."""
    tokenizer = tokenizers()["sentencepiece"]
    model = dataclasses.replace(SIZES, vocab_size=tokenizer.size)
    task = dataclasses.replace(TASK, form="entailment")
    export = planned_export(model, random_leaves(model, 3), task)
    figures = {"accuracy": {"mean": 0.81, "std": 0.0}}
    results = {"task": "mnli", "runs": [{}], "best": {"seed": 0}, "dev_matched": figures, "dev_mismatched": figures}
    (tmp_path / "results.json").write_text(json.dumps(results))
    card = model_card(
        export,
        name="out",
        run="runs/mnli",
        config={"model": dataclasses.asdict(model)},
        directory=tmp_path,
        task=task,
        tokenizer=tokenizer,
        longest=40,
    )
    assert "`<s> first <delimiter> second <extract>`" in card and "at most 40 tokens" in card
    assert 'pipeline("text-classification", "out")' in card and '"text_pair"' in card
    assert "| dev_matched | accuracy | 0.8100 |" in card and "| dev_mismatched | accuracy | 0.8100 |" in card
    assert "no bias" in card and "\n\n## What was measured\n" in card and "\n\n## Input\n" in card
