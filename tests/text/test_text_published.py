"""Published vocabularies against independent statements of their original code and against known ids."""

import json
import random
import re

import pytest

from jaxlm.errors import InputError
from jaxlm.text import load_tokenizer, tokenizer_from_spec
from jaxlm.text.bpe import GPT1Tokenizer, standard_text

TEXT = (
    "It was a dark and stormy night; the rain fell in torrents — except at occasional intervals…\n\n"
    'She didn\'t say "never!", did she? (Perhaps.) No. 42 cost $3.50 at 10:30 a.m.\n'
    "naïve café ﬁne\u00a0print\t日本 <pad> </s> <|endoftext|> [MASK] C:\\path 50% A*B/C x_y {z} ~~ -- ++"
)


@pytest.fixture(scope="module")
def vocabularies(data_directory):
    return data_directory / "vocab"


def save_and_load(tokenizer, directory):
    tokenizer.save(directory)
    loaded = load_tokenizer(directory)
    assert (loaded.fingerprint, loaded.size, loaded.specials) == (
        tokenizer.fingerprint,
        tokenizer.size,
        tokenizer.specials,
    )
    return loaded


# GPT-2


@pytest.mark.data
def test_gpt2_ids_are_the_published_ones(vocabularies, tmp_path):
    tokenizer = tokenizer_from_spec(f"gpt2:{vocabularies}/gpt2")
    assert tokenizer.size == 50257 and tokenizer.specials == {"end": 50256}
    assert tokenizer.encode("Hello world") == [15496, 995]
    assert tokenizer.encode(" Hello\n\nworld's") == [18435, 198, 198, 6894, 338]
    grown = tokenizer.with_specials(["start", "end", "delimiter", "extract"])
    assert grown.specials == {"end": 50256, "start": 50257, "delimiter": 50258, "extract": 50259}
    assert grown.size == 50260 and tokenizer.size == 50257 and grown.fingerprint != tokenizer.fingerprint
    loaded = save_and_load(grown, tmp_path)
    assert loaded.decode([50257, *loaded.encode(TEXT), 50258, 50256]) == TEXT
    assert loaded.pieces([50259, 995]) == ["<extract>", "Ġworld"]


@pytest.mark.data
def test_gpt2_equals_a_plain_statement_of_byte_level_bpe(vocabularies):
    tokenizer = tokenizer_from_spec(f"gpt2:{vocabularies}/gpt2")
    ids = json.loads((vocabularies / "gpt2" / "encoder.json").read_text())
    lines = (vocabularies / "gpt2" / "vocab.bpe").read_text(encoding="utf-8").split("\n")[1:-1]
    ranks = {tuple(line.split()): rank for rank, line in enumerate(lines)}
    # The bytes that print stand for themselves, the others for the characters from U+0100 on.
    printing = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printing]
    symbol = {b: chr(b) for b in printing} | {b: chr(256 + k) for k, b in enumerate(others)}
    # ASCII texts only, where the original's pattern is this one.
    pattern = re.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+")
    rng = random.Random(0)
    for _ in range(200):
        text = "".join(
            rng.choice(["the ", "'s", " ", "\n", "42", "!?", "Zyx", "\t", "ing", "<|endoftext|>"]) for _ in range(30)
        )
        expected = []
        for word in pattern.findall(text):
            expected += [ids[piece] for piece in merge([symbol[b] for b in word.encode()], ranks)]
        assert tokenizer.encode(text) == expected
        assert tokenizer.specials["end"] not in expected


@pytest.mark.data
def test_gpt2_keeps_any_text_and_can_be_cut(vocabularies):
    tokenizer = tokenizer_from_spec(f"gpt2:{vocabularies}/gpt2")
    rng = random.Random(1)
    kinds = [
        " ",
        "  ",
        "\n",
        "\u00a0",
        "\u2003",
        "\x1c",
        "\x85",
        "'s",
        "a",
        "é",
        "日本",
        "😀",
        "1",
        "?",
        "\0",
        "\u2581",
    ]
    for _ in range(2000):
        text = "".join(rng.choice(kinds) for _ in range(rng.randrange(1, 40)))
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        if place := tokenizer.split_point(text, len(text) // 2):
            assert tokenizer.encode(text[:place]) + tokenizer.encode(text[place:]) == ids, (text, place)


@pytest.mark.data
def test_a_tokenizer_json_of_gpt2s_scheme_is_cut_like_gpt2(vocabularies, tmp_path):
    """Fails on 2968321: such a vocabulary encodes a document whole, 120 bytes of memory for each of its bytes."""
    from jaxlm.data.shards import blocks
    from jaxlm.text import published_files

    ours = tokenizer_from_spec(f"gpt2:{vocabularies}/gpt2")
    (tmp_path / "tokenizer.json").write_bytes(published_files(ours, 1024)["tokenizer.json"])
    tokenizer = tokenizer_from_spec(f"hf:{tmp_path}/tokenizer.json")
    assert tokenizer.kind == "tokenizers" and tokenizer.can_split
    for book in sorted((vocabularies.parent / "books" / "valid").glob("*.txt"))[:3]:
        text = book.read_text(encoding="utf-8")[:300_000]
        parts = [block.text for block in blocks(iter([(text, True)]), tokenizer)]
        assert max(map(len, parts)) < 5_000 and "".join(parts) == text
        whole = tokenizer.encode(text)
        assert [i for ids in tokenizer.encode_batch(parts) for i in ids] == whole == ours.encode(text)
    rng = random.Random(2)
    kinds = [" ", "  ", "\n", "\u00a0", "\u2003", "\x1c", "\x85", "'s", "a", "é", "日本", "<|endoftext|>", "1", "?"]
    for _ in range(500):
        text = "".join(rng.choice(kinds) for _ in range(rng.randrange(1, 40)))
        ids = tokenizer.encode(text)
        for place in [place for place in range(len(text)) if tokenizer.is_split_point(text, place)]:
            assert tokenizer.encode(text[:place]) + tokenizer.encode(text[place:]) == ids, (text, place)


@pytest.mark.parametrize("what", ["a blank before", "a normaliser", "no pattern", "a blank within", "a greedy word"])
def test_other_byte_level_schemes_are_not_cut(tmp_path, what):
    from tokenizers import AddedToken, normalizers
    from toy_tokenizers import byte_level

    library = byte_level(add_prefix_space=what == "a blank before", use_regex=what != "no pattern")
    if what == "a normaliser":
        library.normalizer = normalizers.NFC()
    if what == "a blank within":
        library.add_tokens([AddedToken("New York", normalized=False)])
    if what == "a greedy word":
        library.add_tokens([AddedToken("York", rstrip=True, normalized=False)])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = tokenizer_from_spec(f"hf:{tmp_path}")
    assert not tokenizer.can_split and not tokenizer.split_point("a New York b", 8)
    assert not tokenizer.is_split_point("a New York b", 5)


# GPT-1


def merge(symbols, ranks):
    """BPE as its paper states it: the best-ranked pair is merged everywhere, until none is left."""
    symbols = list(symbols)
    while True:
        best = min(zip(symbols, symbols[1:], strict=False), key=lambda pair: ranks.get(pair, 1e9), default=None)
        if best not in ranks:
            return symbols
        merged, k = [], 0
        while k < len(symbols):
            if tuple(symbols[k : k + 2]) == best:
                merged.append(symbols[k] + symbols[k + 1])
                k += 2
            else:
                merged.append(symbols[k])
                k += 1
        symbols = merged


def gpt1_reference(directory):
    ids = json.loads((directory / "encoder_bpe_40000.json").read_text())
    lines = (directory / "vocab_40000.bpe").read_text(encoding="utf-8").split("\n")[1:-1]
    ranks = {tuple(line.split()): rank for rank, line in enumerate(lines)}

    def encode(words):
        out = []
        for word in words:
            pieces = " ".join(merge([*word[:-1], word[-1] + "</w>"], ranks))
            pieces = "\n</w>" if pieces == "\n  </w>" else pieces
            out += [ids.get(piece, 0) for piece in pieces.split(" ")]
        return out

    return ids, encode


class Words:
    """Stands in for spaCy where it is missing: white space parts words, a line break is one."""

    def __call__(self, text):
        yield re.findall(r"\S+|\n", text.lower())


@pytest.mark.data
def test_gpt1_merges_as_the_original(vocabularies, tmp_path):
    directory = vocabularies / "openai-gpt"
    ids, reference = gpt1_reference(directory)
    tokenizer = GPT1Tokenizer.from_directory(directory)
    tokenizer._words = Words()
    assert tokenizer.size == 40478 and tokenizer.specials == {"pad": 0, "unknown": 0}
    assert ids["\n</w>"] == 40477
    for text in (TEXT, "a\nb", "日本 unbelievable", "İstanbul"):
        (words,) = Words()(standard_text(text))
        assert tokenizer.encode(text) == reference(words)
    assert tokenizer.decode(tokenizer.encode("The  Sea,\nthe wind")) == "the sea ,\nthe wind"
    # GPT-1's own three tokens follow the vocabulary, in the original's order.
    grown = tokenizer.with_specials(["start", "delimiter", "extract"])
    assert [grown.specials[role] for role in ("start", "delimiter", "extract")] == [40478, 40479, 40480]
    save_and_load(grown, tmp_path)


@pytest.mark.data
def test_gpt1_with_spacy(vocabularies):
    spacy = pytest.importorskip("spacy", reason="needs the extra [gpt1]")
    tokenizer = tokenizer_from_spec(f"gpt1:{vocabularies}/openai-gpt")
    _, reference = gpt1_reference(vocabularies / "openai-gpt")
    language = spacy.blank("en")
    books = sorted((vocabularies.parent / "books" / "valid").glob("*.txt"))
    book = books[0].read_text(encoding="utf-8")[:60_000]
    for text in (TEXT, book, "", "\n", "a\n\nb", "(:-) o_o 8am can't won't U.S.A. e.g. http://a.b/c?d=e"):
        words = [token.text.lower() for token in language(standard_text(text))]
        assert tokenizer.encode(text) == reference(words)
    assert tokenizer.encode("She didn't go.") == reference(["she", "did", "n't", "go", "."])


@pytest.mark.data
def test_gpt1_blocks_of_lines_change_nothing(vocabularies, monkeypatch):
    pytest.importorskip("spacy", reason="needs the extra [gpt1]")
    tokenizer = tokenizer_from_spec(f"gpt1:{vocabularies}/openai-gpt")
    text = "\n".join(f"Line {k}: it's o.k. :-) at 8am," for k in range(50))
    whole = tokenizer.encode(text)
    for size in (10, 57, 300):
        monkeypatch.setattr("jaxlm.text.bpe._BLOCK", size)
        assert tokenizer.encode(text) == whole


@pytest.mark.data
def test_gpt1_says_what_to_install(vocabularies, monkeypatch, tmp_path):
    tokenizer = GPT1Tokenizer.from_directory(vocabularies / "openai-gpt")
    tokenizer.save(tmp_path)
    for package in ("spacy", "ftfy"):
        monkeypatch.setitem(__import__("sys").modules, package, None)
        with pytest.raises(
            InputError, match=r"not installed; run launch/setup.sh cpu gpt1, or pip install 'jaxlm\[gpt1\]'"
        ):
            tokenizer_from_spec(f"gpt1:{vocabularies}/openai-gpt")
    # A store made with it is still readable.
    assert load_tokenizer(tmp_path).decode([1000]) != ""


def test_gpt1_standard_text():
    # The original's pattern is not a raw string: a backslash is not set apart, a period and a dollar are not either.
    assert standard_text("a—b – c…") == "a - b - c..."
    assert standard_text('say "no!!"; (x+y)') == 'say " no !! " ; ( x + y )'
    assert standard_text("C:\\d $5.00 it's 50%") == "C:\\d $5.00 it's 50%"
    assert standard_text("a  b\t c \n\n\n d ") == "a b c \n d"


# Others


@pytest.mark.data
def test_a_published_sentencepiece_model_keeps_its_own_ways(vocabularies, tmp_path):
    import sentencepiece

    path = vocabularies / "sentencepiece_cc_all.32000.100extra.model"
    library = sentencepiece.SentencePieceProcessor(model_file=str(path))
    tokenizer = tokenizer_from_spec(f"sentencepiece:{path}")
    assert tokenizer.size == library.get_piece_size() and not tokenizer.can_split
    assert tokenizer.encode(TEXT) == library.encode(TEXT)
    assert tokenizer.specials["pad"] == library.pad_id() and tokenizer.specials["end"] == library.eos_id()
    assert tokenizer.decode(tokenizer.encode("Hello   world.")) == "Hello world."
    assert not {tokenizer.specials["pad"], tokenizer.specials["end"]} & set(tokenizer.encode(TEXT))
    save_and_load(tokenizer.with_specials(["mask"]), tmp_path)


@pytest.mark.data
def test_bert_vocabularies(vocabularies, tmp_path):
    uncased = tokenizer_from_spec(f"wordpiece:{vocabularies}/bert/bert-base-uncased-vocab.txt")
    cased = tokenizer_from_spec(f"wordpiece:{vocabularies}/bert/bert-base-cased-vocab.txt")
    assert (uncased.size, uncased.lower_case, cased.size, cased.lower_case) == (30522, True, 28996, False)
    assert uncased.specials == {"pad": 0, "unknown": 100, "mask": 103, "cls": 101, "sep": 102}
    assert uncased.encode("Hello, UNAFFABLE world!") == uncased.encode("hello , unaffable world !")
    assert uncased.pieces(uncased.encode("unaffable")) == ["una", "##ffa", "##ble"]
    assert not {0, 101, 102, 103} & set(uncased.encode("[CLS] [PAD] [MASK] [SEP]"))
    # Words up to 200 characters are split, as in google-research/bert; longer ones are unknown.
    assert uncased.encode("a" * 201) == [100] and 100 not in uncased.encode("a" * 200)
    save_and_load(cased, tmp_path)


def test_any_tokenizer_json(tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>", "[PAD]", "<odd>"], initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(["the sea and the wind and the ship"] * 50, trainer)
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    library.enable_truncation(4)
    library.enable_padding(length=50)
    library.save(str(tmp_path / "tokenizer.json"))

    tokenizer = tokenizer_from_spec(f"hf:{tmp_path}")
    assert tokenizer.specials == {"pad": 2, "start": 0, "end": 1}
    text = "the ship  and\nthe <s> </s> [PAD] <odd> é"
    ids = tokenizer.encode(text)
    assert tokenizer.decode([0, *ids, 3, 1, 2]) == text, "special tokens, truncation or padding came in"
    assert not {0, 1, 2, 3} & set(ids)

    scheme = json.loads((tmp_path / "tokenizer.json").read_text())
    sparse = tmp_path / "sparse" / "tokenizer.json"
    sparse.parent.mkdir()
    for number in (2**32 - 6, 20_000):  # 20 GB and 1.5 MB in the library, before the size was known
        words = {"a": 0, "b": number}
        sparse.write_text(json.dumps(scheme | {"added_tokens": [], "model": {"type": "WordLevel", "vocab": words}}))
        with pytest.raises(InputError, match=f"must have ids of at most 10,020 for its 2 tokens, got {number:,}"):
            tokenizer_from_spec(f"hf:{sparse}")
    added = scheme["added_tokens"] + [scheme["added_tokens"][-1] | {"id": 2**32 - 6, "content": "<far>"}]
    sparse.write_text(json.dumps(scheme | {"added_tokens": added}))
    with pytest.raises(InputError, match="got 4,294,967,290; number the tokens from 0 on"):
        tokenizer_from_spec(f"hf:{sparse}")

    (tmp_path / "tokenizer_config.json").write_text("[]")  # fails on 2968321: a traceback
    with pytest.raises(InputError, match="tokenizer_config.json must be a JSON object, got list"):
        tokenizer_from_spec(f"hf:{tmp_path}")
    # A name in the configuration beside it comes before the spelling.
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"sep_token": {"content": "<odd>"}, "pad_token": "</s>"})
    )
    named = tokenizer_from_spec(f"hf:{tmp_path}")
    assert named.specials == {"pad": 1, "start": 0, "end": 1, "sep": 3}
    assert named.fingerprint != tokenizer.fingerprint
    assert save_and_load(named.with_specials(["mask"]), tmp_path / "saved").decode(ids) == text
