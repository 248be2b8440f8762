"""Vocabularies without a `tokenizer.json`: the case, and what stands in the files beside them.

Fails when a setting that changes ids is passed over, when the case of a published vocabulary is guessed from its
special pieces, or when a tokenizer that was saved before gets another fingerprint.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
from sentencepiece import SentencePieceProcessor
from toy_text import paragraphs

from jaxlm.data.preparation import PrepareConfig, prepare
from jaxlm.errors import InputError
from jaxlm.interop.sources import read_published
from jaxlm.text import load_tokenizer, tokenizer_from_spec, train_sentencepiece
from jaxlm.text.wordpiece import CASE_FILE, FILE, SETTINGS_FILE, build_wordpiece

# As the vocabulary of chinese_L-12_H-768_A-12, which lower-cases: no piece with a capital but the special ones.
PIECES = "[PAD] [UNK] [CLS] [SEP] [MASK] <S> <T> iphone nba hello world 我 用 和 日 ##本 日本 mochte möchte".split()
CASED = [*PIECES, "Hello"]


def directory(path, pieces=PIECES, **settings):
    path.mkdir(parents=True, exist_ok=True)
    (path / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces), encoding="utf-8")
    if settings:
        (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def read(text, path, case="auto"):
    tokenizer = tokenizer_from_spec(f"hf:{path}", case)
    return tokenizer.pieces(tokenizer.encode(text))


@pytest.mark.parametrize("spec", ["hf:{}", "wordpiece:{}/vocab.txt"])
def test_special_pieces_in_angle_brackets_say_nothing_about_the_case(tmp_path, spec):
    """Fails on 2968321: `<S>` and `<T>` make Google's Chinese vocabulary a cased one, and Latin words unknown."""
    tokenizer = tokenizer_from_spec(spec.format(directory(tmp_path)))
    assert tokenizer.pieces(tokenizer.encode("我用iPhone和NBA")) == ["我", "用", "iphone", "和", "nba"]
    (note,) = tokenizer.notes
    assert note.startswith("case: lower-cased, guessed from the vocabulary; ") and "--wordpiece-case cased" in note
    tokenizer.save(tmp_path / "saved")
    loaded = load_tokenizer(tmp_path / "saved")
    assert loaded.lower_case and loaded.fingerprint == tokenizer.fingerprint
    beside = tokenizer_from_spec(f"wordpiece:{tmp_path}/saved/{FILE}")
    assert beside.fingerprint == tokenizer.fingerprint and "tokenizer_description.json" in beside.notes[0]


def test_tokenizers_saved_before_keep_their_meaning_and_fingerprint(tmp_path):
    """What 2968321 saved of such a vocabulary is a cased one, without a file that says so."""
    tokenizer = build_wordpiece((directory(tmp_path) / "vocab.txt").read_bytes(), lower_case=False)
    assert set(tokenizer.files) == {FILE}, "the old tokenizer would have another fingerprint"
    tokenizer.save(tmp_path / "old")
    loaded = load_tokenizer(tmp_path / "old")
    assert not loaded.lower_case and loaded.fingerprint == tokenizer.fingerprint
    assert set(build_wordpiece(("\n".join(CASED)).encode()).files) == {FILE}
    assert set(build_wordpiece(b"[UNK]\na\n").files) == {FILE}


def test_the_case_is_said_by_the_settings_or_the_flag(tmp_path):
    """Fails on 2968321: `wordpiece:` knows neither. A flag comes before the file, the file before a guess."""
    guessed = directory(tmp_path / "guessed", CASED)
    assert read("Hello hello", guessed) == ["Hello", "hello"]
    assert read("Hello", guessed, "uncased") == ["hello"]
    said = directory(tmp_path / "said", CASED, do_lower_case=True)
    assert read("Hello", said) == ["hello"] and read("Hello", said, "cased") == ["Hello"]
    beside = tokenizer_from_spec(f"wordpiece:{said}/vocab.txt")
    assert beside.lower_case and beside.notes == ("case: lower-cased, from tokenizer_config.json",)
    flagged = tokenizer_from_spec(f"wordpiece:{said}/vocab.txt", "cased")
    assert flagged.notes == ("case: kept, from --wordpiece-case",)
    with pytest.raises(InputError, match=r"do_lower_case must be true or false, got 'no'"):
        read("Hello", directory(tmp_path / "bad", do_lower_case="no"))


def test_the_case_of_googles_releases_and_in_commands(tmp_path, capsys):
    """Fails on 2968321: no command has a way to say the case of a published vocabulary."""
    model = directory(tmp_path / "model")
    shutil.copytree(Path(__file__).resolve().parents[1] / "golden" / "tensorflow" / "bert", model, dirs_exist_ok=True)
    assert read_published(f"google:{model}").tokenizer.lower_case
    assert not read_published(f"google:{model}", "cased").tokenizer.lower_case
    (model / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    published = read_published(f"google:{model}")
    assert not published.tokenizer.lower_case and published.notes == ("case: kept, from tokenizer_config.json",)
    text = tmp_path / "text.txt"
    text.write_text("Hello world")
    arguments = ((f"text:{text}",), f"wordpiece:{directory(tmp_path / 'v', CASED)}/vocab.txt")
    for case, wanted in (("auto", "Hello"), ("uncased", "hello")):
        store = prepare(PrepareConfig(*arguments, str(tmp_path / case), workers=1, wordpiece_case=case))
        assert store.tokenizer().pieces(store.tokens) == [wanted, "world"]
    said = capsys.readouterr().out
    assert "case: kept, guessed" in said and "case: lower-cased, from --wordpiece-case" in said
    prepare(PrepareConfig(*arguments, str(tmp_path / "auto"), workers=1))
    with pytest.raises(InputError, match="was made with another tokenizer"):
        prepare(PrepareConfig(*arguments, str(tmp_path / "auto"), workers=1, wordpiece_case="uncased"))
    with pytest.raises(InputError, match="wordpiece_case must be auto"):
        prepare(PrepareConfig(arguments[0], "train-sentencepiece:420", str(tmp_path / "x"), wordpiece_case="cased"))


@pytest.mark.parametrize(
    ("settings", "text", "wanted"),
    [
        ({"do_lower_case": True, "strip_accents": False}, "Möchte", ["möchte"]),
        ({"do_lower_case": False, "strip_accents": True}, "möchte", ["mochte"]),
        ({"do_lower_case": True, "strip_accents": None}, "Möchte", ["mochte"]),
        ({"tokenize_chinese_chars": False}, "日本", ["日本"]),
        ({"tokenize_chinese_chars": True}, "日本", ["日", "[UNK]"]),
    ],
)
def test_settings_beside_a_vocabulary_decide_ids(tmp_path, settings, text, wanted):
    """Fails on 2968321: only `do_lower_case` is read."""
    path = directory(tmp_path / "v", **settings)
    assert read(text, path) == wanted
    tokenizer = tokenizer_from_spec(f"hf:{path}")
    usual = settings.get("strip_accents") is None and settings.get("tokenize_chinese_chars", True)
    assert (SETTINGS_FILE in tokenizer.files) == (not usual), "BERT's own settings keep their fingerprint"
    tokenizer.save(tmp_path / "saved")
    loaded = load_tokenizer(tmp_path / "saved")
    assert loaded.fingerprint == tokenizer.fingerprint and loaded.pieces(loaded.encode(text)) == wanted


@pytest.mark.parity
@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("strip", [True, False, None])
@pytest.mark.parametrize("parts", [True, False])
def test_settings_are_those_of_transformers(tmp_path, data_directory, lower, strip, parts):
    transformers = pytest.importorskip("transformers", reason="install the extra [parity]")
    from parity import tokenizer_case as case

    vocabulary = data_directory / "vocab" / "bert" / "bert-base-cased-vocab.txt"
    settings = {"do_lower_case": lower, "strip_accents": strip, "tokenize_chinese_chars": parts}
    path = directory(tmp_path, vocabulary.read_text(encoding="utf-8").splitlines(), **settings)
    theirs = transformers.BertTokenizer.from_pretrained(path)
    theirs.backend_tokenizer.model.max_input_chars_per_word = 200
    ours = tokenizer_from_spec(f"hf:{path}")
    for text in (*case.ODD, "Möchte naïve 日本 ÅNGSTRÖM"):
        assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"], text


REFUSED = {
    "a class": ({"tokenizer_class": "BertJapaneseTokenizer"}, "tokenizer_class must be BertTokenizer or"),
    "a setting": ({"do_basic_tokenize": False}, "do_basic_tokenize must be True, got False"),
    "words never split": ({"never_split": ["hello"]}, "never_split must be"),
    "another special token": ({"cls_token": "<S>"}, "cls_token must be the cls token of the vocabulary, got '<S>'"),
    "a word that is added": (
        {"added_tokens_decoder": {"19": {"content": "covid", "special": False}}},
        "the added token 'covid' of id 19 has no counterpart",
    ),
    "a word of the vocabulary that is added": (
        {"added_tokens_decoder": {"9": {"content": "hello", "special": False}}},
        "the added token 'hello' of id 9 has no counterpart",
    ),
    "damage": ({"added_tokens_decoder": {"9": 3}}, "added tokens are damaged"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_has_no_counterpart_is_refused_by_name(tmp_path, what):
    """Fails on 2968321: all of them are read as if they were not there."""
    settings, said = REFUSED[what]
    with pytest.raises(InputError) as caught:
        tokenizer_from_spec(f"hf:{directory(tmp_path, **settings)}")
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_the_class_may_stand_in_the_models_config(tmp_path):
    """Fails on 2968321: the Japanese BERT's tokenizer is named in its config.json."""
    (directory(tmp_path) / "config.json").write_text('{"tokenizer_class": "BertJapaneseTokenizer"}')
    with pytest.raises(InputError, match="got BertJapaneseTokenizer, which has no counterpart here"):
        tokenizer_from_spec(f"hf:{tmp_path}")


def test_special_tokens_that_are_there_or_follow_are_taken(tmp_path):
    added = {str(i): {"content": PIECES[i], "special": True} for i in range(5)}
    path = directory(
        tmp_path, PIECES, added_tokens_decoder=added, tokenizer_class="BertTokenizerFast", never_split=None
    )
    (path / "added_tokens.json").write_text(json.dumps({"<s>": len(PIECES), "</s>": len(PIECES) + 1}))
    tokenizer = tokenizer_from_spec(f"hf:{path}")
    assert [tokenizer.specials[role] for role in ("start", "end")] == [len(PIECES), len(PIECES) + 1]


def test_settings_of_a_byte_level_vocabulary(tmp_path):
    """Fails on 2968321: another class's pattern, and a blank before each text, are passed over."""
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "<|endoftext|>": 2}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    settings = tmp_path / "tokenizer_config.json"
    for values in ({}, {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False}):
        settings.write_text(json.dumps(values))
        assert tokenizer_from_spec(f"hf:{tmp_path}").encode("ab") == [0, 1]
    for values, said in (
        ({"tokenizer_class": "Qwen2Tokenizer"}, "got Qwen2Tokenizer"),
        ({"add_prefix_space": True}, "add_prefix_space must be False, got True"),
    ):
        settings.write_text(json.dumps(values))
        with pytest.raises(InputError, match=said):
            tokenizer_from_spec(f"hf:{tmp_path}")
    settings.unlink()
    with pytest.raises(InputError, match="wordpiece_case must be auto"):
        tokenizer_from_spec(f"hf:{tmp_path}", "cased")


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "/dev/zero", "link", "pipe", "vocab.txt/../../secret"])
def test_a_description_names_files_of_its_kind_alone(tmp_path, name):
    """Fails on 2968321: any path is opened; /dev/zero and a pipe are read without end."""
    saved = tmp_path / "t"
    build_wordpiece(b"[UNK]\na\n").save(saved)
    (tmp_path / "secret").write_text("[UNK]\na\n")
    description = saved / "tokenizer_description.json"
    values = json.loads(description.read_text())
    if name == "link":
        (saved / FILE).unlink()
        (saved / FILE).symlink_to(tmp_path / "secret")
        said = "vocab.txt must be a file of its directory, got a link to"
    elif name == "pipe":
        (saved / FILE).unlink()
        os.mkfifo(saved / FILE)
        said = "vocab.txt: not a regular file"
    else:
        description.write_text(json.dumps({**values, "files": [name]}))
        said = f"files must be among {FILE}, {CASE_FILE}, {SETTINGS_FILE}, got {name!r}"
    with pytest.raises(InputError) as caught:
        load_tokenizer(saved)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"files": 3},
        {"specials": []},
        {"specials": {"pad": "x"}},
        {"specials": {"odd": 9}},
        {"size": None},
        {"kind": []},
    ],
    ids=str,
)
def test_a_description_of_other_types_is_damaged(tmp_path, change):
    """Fails on 2968321: most of these end in a TypeError."""
    build_wordpiece(b"[UNK]\na\n").save(tmp_path)
    description = tmp_path / "tokenizer_description.json"
    description.write_text(json.dumps(json.loads(description.read_text()) | change))
    with pytest.raises(InputError, match=r"damaged|no tokenizer of kind"):
        load_tokenizer(tmp_path)


def t5_directory(path, *, model_type="t5", **settings):
    """Write a directory as those of T5's LM-adapted models and of mT5, which have no tokenizer.json."""
    path.mkdir()
    (path / "spiece.model").write_bytes(train_sentencepiece(paragraphs(100), 300).files["sentencepiece.model"])
    (path / "config.json").write_text(json.dumps({"model_type": model_type}))
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


@pytest.mark.parametrize(("settings", "sentinels"), [({}, 100), ({"extra_ids": 100}, 100), ({"extra_ids": 0}, 0)])
def test_a_sentencepiece_model_of_t5_has_the_sentinels_of_its_settings(tmp_path, settings, sentinels):
    """The ids of texts are those of the sentencepiece library, the places of the sentinels those of T5Tokenizer.

    Fails when such a directory has no tokenizer, as on 23e33ea, or when a sentinel has another id.
    """
    directory = t5_directory(tmp_path / "t5", **settings)
    tokenizer = tokenizer_from_spec(f"hf:{directory}")
    reference = SentencePieceProcessor(model_file=str(directory / "spiece.model"))
    assert tokenizer.size == reference.get_piece_size() + sentinels
    assert tokenizer.sentinels == tuple(range(tokenizer.size - 1, reference.get_piece_size() - 1, -1))
    text = " ".join(paragraphs(3))
    assert tokenizer.encode(text) == reference.encode(text)
    assert load_saved(tokenizer, tmp_path / "saved").sentinels == tokenizer.sentinels


def load_saved(tokenizer, directory):
    tokenizer.save(directory)
    return load_tokenizer(directory)


@pytest.mark.parametrize(
    ("model_type", "settings", "message"),
    [
        ("albert", {}, "has no tokenizer of Hugging Face"),
        ("t5", {"tokenizer_class": "XLNetTokenizer"}, "tokenizer_class must be T5Tokenizer or MT5Tokenizer"),
        ("t5", {"extra_ids": -1}, "extra_ids must be from 0 to 100000, got -1"),
        ("t5", {"extra_ids": 10**22}, "extra_ids must be from 0 to 100000, got 1000"),
        ("t5", {"add_prefix_space": False}, "add_prefix_space must be True"),
    ],
)
def test_a_sentencepiece_model_of_another_form_is_refused(tmp_path, model_type, settings, message):
    """Fails when a text of another normalization is read as T5's, without a word."""
    directory = t5_directory(tmp_path / "other", model_type=model_type, **settings)
    with pytest.raises(InputError, match=message):
        tokenizer_from_spec(f"hf:{directory}")
