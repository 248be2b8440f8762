"""Write tests/golden/tokenizers.json from the references: `cd tests && python -m parity.freeze_tokenizers`.

BERT's ids come from Google's own code (the package bert-tensorflow), GPT's from Hugging Face's tokenizers in Python,
which version 5 of transformers has no longer; the places from its fast ones. Needs `transformers<5`, bert-tensorflow,
absl-py, six, ftfy, spaCy and the real data ($JAXLM_DATA, or .data).
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from transformers import BertTokenizerFast, GPT2Tokenizer, GPT2TokenizerFast, OpenAIGPTTokenizer

from parity import tokenizer_case as case

TESTS = Path(__file__).resolve().parent.parent
LONGEST_WORD = 200  # of Google's code; transformers has 100


def google_bert(file: Path, lower: bool) -> Callable[[str], list[int]]:
    """Google's full tokenizer over the pieces of `file`. Its TensorFlow only opens files, so that it is left out."""
    for name in ("tensorflow", "tensorflow.compat", "tensorflow.compat.v1"):
        sys.modules.setdefault(name, ModuleType(name))
    from bert import tokenization

    tokenization.FLAGS.mark_as_parsed()
    pieces = {line.rstrip("\n"): number for number, line in enumerate(file.open(encoding="utf-8"))}
    basic, wordpiece = tokenization.BasicTokenizer(do_lower_case=lower), tokenization.WordpieceTokenizer(vocab=pieces)
    return lambda text: [pieces[piece] for word in basic.tokenize(text) for piece in wordpiece.tokenize(word)]


def python_gpt1(directory: Path) -> Callable[[str], list[int]]:
    """Hugging Face's, past its `tokenize`, which lower-cases before spaCy; the original does so after."""
    library = OpenAIGPTTokenizer(directory / "encoder_bpe_40000.json", directory / "vocab_40000.bpe")
    if library.fix_text is None:
        raise SystemExit("GPT-1's treatment of text needs ftfy and spaCy: pip install ftfy spacy")
    return lambda text: library.convert_tokens_to_ids(library._tokenize(text))


def python_gpt2(directory: Path) -> Callable[[str], list[int]]:
    """Hugging Face's tokenizer."""
    library = GPT2Tokenizer(directory / "encoder.json", directory / "vocab.bpe")
    return lambda text: library.convert_tokens_to_ids(library.tokenize(text))


def main() -> None:
    """Write the file: ids and places of odd text, a digest of the ids of each book's sentences."""
    data = Path(os.environ.get("JAXLM_DATA", TESTS.parent / ".data"))
    gpt1, gpt2, bert = (data / "vocab" / name for name in ("openai-gpt", "gpt2", "bert"))
    slow = {"gpt1": python_gpt1(gpt1), "gpt2": python_gpt2(gpt2)}
    fast = {"gpt2": GPT2TokenizerFast(str(gpt2 / "encoder.json"), str(gpt2 / "vocab.bpe"))}
    for kind in ("cased", "uncased"):
        file, lower = bert / f"bert-base-{kind}-vocab.txt", kind == "uncased"
        slow[f"bert-{kind}"] = google_bert(file, lower)
        fast[f"bert-{kind}"] = BertTokenizerFast(str(file), do_lower_case=lower)
        fast[f"bert-{kind}"].backend_tokenizer.model.max_input_chars_per_word = LONGEST_WORD
    books = list(case.sentences(data / "books"))
    frozen = {}
    for name, ids in slow.items():
        frozen[name] = {
            "odd": [ids(text) for text in case.ODD],
            "books": {book: [len(texts), case.digest(map(ids, texts))] for book, texts in books},
        }
        if name == "bert-uncased":
            frozen[name]["different"] = {what: [ids(text) for text in texts] for what, texts in case.DIFFERENT.items()}
        if name in fast:
            frozen[name]["offsets"] = [
                fast[name](text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
                for text in case.ODD
            ]
        print(name, flush=True)
    (TESTS / "golden" / "tokenizers.json").write_text(json.dumps(frozen) + "\n")


if __name__ == "__main__":
    main()
