"""Write tests/golden/sentence_streams_parity.npz from ELMo's code.

    cd tests && BILM_DATA=bilm/data.py python -m parity.freeze_sentence_streams

Needs bilm/data.py of allenai/bilm-tf (commit 7cffee2), whose path is in BILM_DATA; it needs no other packages.
`BidirectionalLMDataset` reads a file with one sentence per line, and a row of its batches takes the next line when it
needs one. The lines are in the order in which the rows ask, so that each row has the sentences of one stream.
"""

import importlib.util
import itertools
import os
import tempfile
from pathlib import Path

import numpy as np

from jaxlm.text import train_words
from parity import sentence_streams_case as case
from parity.check import freeze

if "BILM_DATA" not in os.environ:
    raise ImportError("the environment variable BILM_DATA must be the path of bilm/data.py")


def original():
    """Return the module bilm/data.py."""
    spec = importlib.util.spec_from_file_location("bilm_data", os.environ["BILM_DATA"])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def asked(order: np.ndarray, lengths: np.ndarray) -> list[int]:
    """Return the sentences in the order in which the rows of the original's batches ask for them."""
    streams = (np.cumsum(lengths[order] + 1) - 1) // (case.LENGTH * case.STEPS)
    waiting = [iter(order[streams == row]) for row in range(case.ROWS)]
    left, found = [0] * case.ROWS, []
    for _ in range(case.STEPS):
        for row in range(case.ROWS):
            slots = case.LENGTH
            while slots:
                if not left[row]:
                    found.append(int(next(waiting[row])))
                    left[row] = int(lengths[found[-1]]) + 1
                taken = min(left[row], slots)
                left[row], slots = left[row] - taken, slots - taken
    return found


def main() -> None:
    """Write the file."""
    bilm, sentences = original(), case.make_sentences()
    lengths = np.array([len(words) for words in sentences])
    orders = {"forward": case.make_order(sentences, 1), "backward": case.make_order(sentences, 2)}
    tokenizer = train_words(case.make_documents(sentences), case.VOCABULARY)
    # The ids of jaxlm: <unk>, the end, the words, of which one is the line break, and then the start.
    words = ["<UNK>", "</S>", *tokenizer.pieces(range(2, case.VOCABULARY)), "<S>"]
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder) / name for name in ("vocabulary", *orders)}
        files["vocabulary"].write_text("\n".join("" if word == "\n" else word for word in words), encoding="utf-8")
        for name, order in orders.items():
            lines = [" ".join(sentences[number]) for number in asked(order, lengths)]
            files[name].write_text("\n".join(lines) + "\n", encoding="utf-8")
        vocabulary = bilm.UnicodeCharsVocabulary(str(files["vocabulary"]), case.CHARACTERS)
        data = bilm.BidirectionalLMDataset(str(files["forward"]), vocabulary)
        data._data_reverse = bilm.LMDataset(str(files["backward"]), vocabulary, reverse=True)
        batches = list(itertools.islice(data.iter_batches(case.ROWS, case.LENGTH), case.STEPS))
    found = {name: np.stack([batch[name] for batch in batches]).astype(np.int16) for name in batches[0]}
    freeze("sentence_streams", {"batches": found, "orders": orders})


if __name__ == "__main__":
    main()
