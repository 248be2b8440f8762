"""Export of a tokenizer to the files that Hugging Face's tokenizers load, with the same ids for plain text.

In Hugging Face's tokenizers the spelling of a special token in a text becomes its id; here it is text. GPT-1's text
normalization (ftfy and spaCy) has no counterpart there: words are split as BERT's are, as in transformers' own class.
There are no other differences. jaxlm itself reads back a copy of the tokenizer, in OWN.
"""

import json
from collections.abc import Sequence
from typing import Any, Literal

from jaxlm.text.bpe import END_OF_WORD, GPT1Tokenizer
from jaxlm.text.library import FILE, ROLE_NAMES, LibraryTokenizer
from jaxlm.text.piece_models import SentencePieceTokenizer
from jaxlm.text.tokenizer import Tokenizer

OWN = "jaxlm_tokenizer"

# Special tokens around texts: none, start … delimiter … extract of a fine-tuned decoder, CLS … SEP … SEP, or the end of
# a source.
Inputs = Literal["plain", "decoder", "encoder", "source"]

_BLANK = "\u2581"
_MODEL_INPUTS = ("input_ids", "attention_mask")


def published_files(tokenizer: Tokenizer, longest: int, inputs: Inputs = "plain") -> dict[str, bytes]:
    """Return file name -> content. longest: length of the longest sequence that the model reads.

    A fine-tuned decoder's tokenizer needs start, delimiter and extract, an encoder's CLS and SEP.
    """
    spelt = {role: tokenizer.pieces([i])[0] for role, i in tokenizer.specials.items()}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": longest,
        "truncation_side": "right",
        "padding_side": "right",
        # Hugging Face's decoders add the embeddings of token_type_ids to those of the tokens.
        "model_input_names": list(_MODEL_INPUTS if inputs != "encoder" else ("token_type_ids", *_MODEL_INPUTS)),
    }
    config |= {ROLE_NAMES[role]: token for role, token in spelt.items() if role in ROLE_NAMES}
    if (pad := padding(tokenizer, inputs)) is not None:
        config[ROLE_NAMES["pad"]] = tokenizer.pieces([pad])[0]
    others = [token for role, token in spelt.items() if role not in ROLE_NAMES]
    others += tokenizer.pieces(tokenizer.sentinels)
    if others:
        config["extra_special_tokens"] = others
    files = {FILE: library_of(tokenizer, inputs).to_str(pretty=True).encode(), "tokenizer_config.json": _json(config)}
    if isinstance(tokenizer, GPT1Tokenizer):
        names = dict(zip(sorted(tokenizer.files), ("vocab.json", "merges.txt"), strict=True))
        files |= {names[name]: content for name, content in tokenizer.files.items()}
    return files


def padding(tokenizer: Tokenizer, inputs: Inputs) -> int | None:
    """Return the id that pads rows, or None where the vocabulary has none.

    Hugging Face's decoders classify at the last token that differs from this id. That is extract, so any other special
    token is suitable if there is none for padding.
    """
    roles = ("pad", "end", "start") if inputs == "decoder" else ("pad",)
    return next((tokenizer.specials[role] for role in roles if role in tokenizer.specials), None)


def same_vocabulary(tokenizer: Tokenizer, content: bytes) -> bool:
    """Return True if a `tokenizer.json` gives plain text the same ids as `published_files` of `tokenizer`."""
    from tokenizers import Tokenizer as Library

    try:
        theirs = json.loads(Library.from_str(content.decode("utf-8")).to_str())
    except Exception:  # the library raises a bare Exception
        return False
    ours = json.loads(library_of(tokenizer, "plain").to_str())
    return all(ours[part] == theirs[part] for part in ("normalizer", "pre_tokenizer", "model", "added_tokens"))


def library_of(tokenizer: Tokenizer, inputs: Inputs):
    """Return the equivalent tokenizer of the `tokenizers` library, with special tokens added as `inputs` selects."""
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Library

    if isinstance(tokenizer, SentencePieceTokenizer):
        library = _of_sentencepiece(tokenizer)
    elif isinstance(tokenizer, GPT1Tokenizer):
        library = _of_gpt1(tokenizer)
    else:
        assert isinstance(tokenizer, LibraryTokenizer)
        saved = tokenizer.files.get(FILE)  # with the padding and truncation that its users set
        library = Library.from_str(saved.decode() if saved else tokenizer._library.to_str())
    sentinels = {f"sentinel {number}": i for number, i in enumerate(tokenizer.sentinels)}
    ordered = sorted((dict(tokenizer.specials) | sentinels).items(), key=lambda item: item[1])
    for role, i in ordered:
        spelling = tokenizer.pieces([i])[0]
        library.add_special_tokens([AddedToken(spelling, special=True, normalized=False)])
        if library.token_to_id(spelling) != i:
            raise ValueError(f"the {role} token {spelling} must have id {i}, got {library.token_to_id(spelling)}")
    if inputs == "decoder":
        start, delimiter, extract = _special_tokens(tokenizer, "start", "delimiter", "extract")
        library.post_processor = _template((start, "$A", extract), (start, "$A", delimiter, "$B", extract))
    elif inputs == "encoder" and {"cls", "sep"} <= set(tokenizer.specials):
        cls, sep = _special_tokens(tokenizer, "cls", "sep")
        library.post_processor = _template((cls, "$A", sep), (cls, "$A", sep, "$B:1", (*sep, 1)))
    elif inputs == "source":
        (end,) = _special_tokens(tokenizer, "end")
        library.post_processor = _template(("$A", end), ("$A", end, "$B", end))
    return library


def _special_tokens(tokenizer: Tokenizer, *roles: str) -> list[tuple[str, int]]:
    return [(tokenizer.pieces([tokenizer.specials[role]])[0], tokenizer.specials[role]) for role in roles]


def _template(single: Sequence, pair: Sequence):
    """Return a post-processor from text positions and special tokens, (spelling, id) or (spelling, id, type)."""
    from tokenizers import processors

    tokens = sorted({item[:2] for item in pair if not isinstance(item, str)})
    return processors.TemplateProcessing(
        single=[_spelt(item) for item in single], pair=[_spelt(item) for item in pair], special_tokens=tokens
    )


def _spelt(item: str | tuple) -> str:
    return item if isinstance(item, str) else ":".join([item[0], *map(str, item[2:])])


def _of_gpt1(tokenizer: GPT1Tokenizer):
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, normalizers, pre_tokenizers

    library = Library.from_str(tokenizer._library.to_str())
    library.normalizer = normalizers.BertNormalizer(lowercase=True)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.BPEDecoder(suffix=END_OF_WORD)
    return library


def _of_sentencepiece(tokenizer: SentencePieceTokenizer):
    from sentencepiece import sentencepiece_model_pb2
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Library

    proto: Any = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    proto.ParseFromString(next(iter(tokenizer.files.values())))
    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
    unknown, bytes_too = tokenizer.specials["unknown"], proto.trainer_spec.byte_fallback
    if proto.trainer_spec.model_type == proto.trainer_spec.BPE:
        ids = {piece: i for i, (piece, _) in enumerate(pieces)}
        model: Any = models.BPE(
            vocab=ids, merges=_merges(proto, ids), unk_token=pieces[unknown][0], byte_fallback=bytes_too, fuse_unk=True
        )
    else:
        model = models.Unigram(pieces, unk_id=unknown, byte_fallback=bytes_too)
    library = Library(model)
    steps: list[Any] = []
    if proto.normalizer_spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(proto.normalizer_spec.precompiled_charsmap))
    if proto.normalizer_spec.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if proto.normalizer_spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(" "))
    library.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _BLANK)])
    if tokenizer.can_split:  # a blank occurs only at the beginning of a token, so words can be looked up one by one
        library.pre_tokenizer = pre_tokenizers.Split(_BLANK, "merged_with_next")
    back: list[Any] = [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if proto.normalizer_spec.add_dummy_prefix:
        back.append(decoders.Strip(" ", 1, 0))
    library.decoder = decoders.Sequence(back)
    return library


def _merges(proto, ids: dict[str, int]) -> list[tuple[str, str]]:
    """Return the merges of a BPE model, best first: for each token all pairs of tokens that form it.

    SentencePiece stores no merges: it joins the neighbours whose joint token has the highest score.
    """
    usable = {piece.piece: piece.score for piece in proto.pieces if piece.type == piece.NORMAL}
    found = []
    for piece, score in usable.items():
        parts = [(piece[:k], piece[k:]) for k in range(1, len(piece))]
        inside = [pair for pair in parts if pair[0] in usable and pair[1] in usable]
        found += [(-score, ids[left], ids[right], left, right) for left, right in inside]
    return [(left, right) for *_, left, right in sorted(found)]


def _json(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()
