"""A tokenizer as the files that Hugging Face's tokenizers load, giving the same ids for plain text.

There a special token's spelling in a text becomes its id; here it is text. Nothing else differs.
"""

import json
from typing import Any

from jaxlm.text.gpt1 import GPT1Tokenizer
from jaxlm.text.piece_models import SentencePieceTokenizer
from jaxlm.text.tokenizer import Tokenizer
from jaxlm.text.tokenizer_json import ROLE_NAMES, JsonTokenizer

_BLANK = "\u2581"


def published_files(tokenizer: Tokenizer, longest: int) -> dict[str, bytes]:
    """File name -> content; `longest` is the model's longest sequence."""
    spelt = {role: tokenizer.pieces([i])[0] for role, i in tokenizer.specials.items()}
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": longest}
    config |= {ROLE_NAMES[role]: token for role, token in spelt.items() if role in ROLE_NAMES}
    others = [token for role, token in spelt.items() if role not in ROLE_NAMES]
    if others:
        config["extra_special_tokens"] = others
    if isinstance(tokenizer, GPT1Tokenizer):
        names = dict(zip(sorted(tokenizer.files), ("vocab.json", "merges.txt"), strict=True))
        config["tokenizer_class"] = "OpenAIGPTTokenizer"
        return {names[name]: content for name, content in tokenizer.files.items()} | {
            "tokenizer_config.json": _json(config)
        }
    library = _library(tokenizer)
    return {"tokenizer.json": library.to_str(pretty=True).encode(), "tokenizer_config.json": _json(config)}


def _library(tokenizer: Tokenizer):
    """The `tokenizers` library's twin, special tokens marked as such and an encoder's CLS and SEP added to texts."""
    from tokenizers import AddedToken, processors
    from tokenizers import Tokenizer as Library

    if isinstance(tokenizer, SentencePieceTokenizer):
        library = _of_sentencepiece(tokenizer)
    elif isinstance(tokenizer, JsonTokenizer):
        library = Library.from_str(tokenizer.files["tokenizer.json"].decode())
    else:
        library = Library.from_str(tokenizer._library.to_str())  # type: ignore[attr-defined]
    ordered = sorted(tokenizer.specials.items(), key=lambda item: item[1])
    for role, i in ordered:
        spelling = tokenizer.pieces([i])[0]
        library.add_special_tokens([AddedToken(spelling, special=True, normalized=False)])
        if library.token_to_id(spelling) != i:
            raise ValueError(f"{role} {spelling} is {library.token_to_id(spelling)} and not {i}")
    if {"cls", "sep"} <= set(tokenizer.specials) and tokenizer.kind != "sentencepiece":
        cls, sep = (
            (tokenizer.pieces([tokenizer.specials[role]])[0], tokenizer.specials[role]) for role in ("cls", "sep")
        )
        library.post_processor = processors.TemplateProcessing(
            single=f"{cls[0]} $A {sep[0]}",
            pair=f"{cls[0]} $A {sep[0]} $B:1 {sep[0]}:1",
            special_tokens=[cls, sep],
        )
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
    if tokenizer.cuts:  # no piece has a blank but at its beginning: words can be looked up one by one
        library.pre_tokenizer = pre_tokenizers.Split(_BLANK, "merged_with_next")
    back: list[Any] = [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if proto.normalizer_spec.add_dummy_prefix:
        back.append(decoders.Strip(" ", 1, 0))
    library.decoder = decoders.Sequence(back)
    return library


def _merges(proto, ids: dict[str, int]) -> list[tuple[str, str]]:
    """The merges of a BPE model, best first: each piece from every pair of pieces that make it.

    SentencePiece keeps no merges: it joins the neighbours whose joint piece has the highest score.
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
