"""Tasks whose labels are of tokens: SQuAD 1.1 and 2.0, the named entities of CoNLL-2003, the chunks of CoNLL-2000, and
the parts of speech of Universal Dependencies.

`jaxlm/tasks/kinds/spans.py` and `tags.py` read their files.

CoNLL-2000 (Tjong Kim Sang and Buchholz 2000) has 8,936 training and 2,012 test sentences of the Wall Street Journal,
each line a word, its part of speech by Brill's tagger, and its chunk tag. The words and the chunk tags are read. There
is no dev split: 1,500 training sentences are held out, as many as Clark et al. (2018, cvt_text) hold out there by a
random choice of their own.
"""

import itertools
from collections.abc import Mapping
from typing import Any

from jaxlm.tasks.builtin import BuiltIn, Catalogue, papers, tfds_text
from jaxlm.tasks.examples import SpanExample, TaggedSentence
from jaxlm.tasks.kinds.spans import Spans, answers_of, read_questions
from jaxlm.tasks.kinds.tags import Tagging, read_sentences
from jaxlm.tasks.metrics.tags import judged_by


def _question(values: Mapping[str, Any], name: str) -> list[SpanExample]:
    """Convert a TFDS record."""
    question = tfds_text(values["id"])
    answers = answers_of(values["answers"], bool(values.get("is_impossible")), f"tfds {name} {question}")
    return [SpanExample(question, tfds_text(values["question"]).strip(), tfds_text(values["context"]), answers)]


def _rows(version: str, no_answer: bool, **bert: float) -> BuiltIn:
    name = "squad2" if no_answer else "squad"
    task = Spans(name=name, papers={"bert": papers(**bert)["bert"]}, no_answer=no_answer)
    files = {
        part: tuple(itertools.chain.from_iterable((f"{part}{v}.json", f"{part}{v}.jsonl") for v in ("", f"-{version}")))
        for part in ("train", "dev", "test")
    }
    copy = Catalogue(f"squad/{version}", splits={"train": "train", "dev": "validation"}, read=_question)
    return BuiltIn(task, files, copy, read=read_questions)


# Devlin et al. 2019, sections 4.2 and 4.3; the lengths are those of the original's code (run_squad.py:66-154).
SQUAD = _rows("v1.1", False, length=384, batch_size=32, peak_lr=5e-5, num_epochs=3)
SQUAD2 = _rows("v2.0", True, length=384, batch_size=48, peak_lr=5e-5, num_epochs=2)

# TFDS's order of the tags (tensorflow_datasets, conll_dataset_builder_utils.py).
_TFDS_TAGS = ("O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC", "B-MISC", "I-MISC")


def _sentence(values: Mapping[str, Any], name: str) -> list[TaggedSentence]:
    """Convert a TFDS record; each split ends in an empty one."""
    tokens = tuple(tfds_text(token) for token in values["tokens"])
    tags = tuple(_TFDS_TAGS[int(tag)] for tag in values["ner"])
    return [TaggedSentence(tokens, tags, where=f"tfds {name}")] if tokens else []


# "The maximal document context provided by the data" (Devlin et al. 2019, section 5.3): all that fits.
_PAPERS = {"bert": papers(length=512, peak_lr=5e-5)["bert"]}

NER = BuiltIn(
    Tagging(name="ner", papers=_PAPERS),
    {
        "train": ("train.conll", "eng.train", "train.txt", "train.jsonl"),
        "dev": ("dev.conll", "eng.testa", "dev.txt", "valid.txt", "dev.jsonl"),
        "test": ("test.conll", "eng.testb", "test.txt", "test.jsonl"),
    },
    Catalogue("conll2003", splits={"train": "train", "dev": "dev", "test": "test"}, read=_sentence),
    read=read_sentences,
)

# The training split lacks one of these 23 tags, I-LST: its ten LST chunks are single words.
_CHUNKS = ("ADJP", "ADVP", "CONJP", "INTJ", "LST", "NP", "PP", "PRT", "SBAR", "UCP", "VP")

CHUNK = BuiltIn(
    Tagging(
        name="chunk",
        labels=("O", *(f"{mark}-{kind}" for kind in _CHUNKS for mark in "BI")),
        papers=_PAPERS,
    ),
    {"train": ("train.txt",), "test": ("test.txt",)},
    read=read_sentences,
    held_out_fraction=1500 / 8936,
)

# The universal parts of speech (universaldependencies.org/u/pos).
_UPOS = (
    *("ADJ", "ADP", "ADV", "AUX", "CCONJ", "DET", "INTJ", "NOUN", "NUM"),
    *("PART", "PRON", "PROPN", "PUNCT", "SCONJ", "SYM", "VERB", "X"),
)

UD_POS = BuiltIn(
    Tagging(name="ud_pos", labels=_UPOS, papers=_PAPERS, **judged_by(_UPOS)),
    {part: (f"{part}.conllu", f"*-{part}.conllu") for part in ("train", "dev", "test")},
    read=read_sentences,
)

TAGS = (NER, CHUNK, UD_POS)
