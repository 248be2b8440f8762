"""Continuations: SWAG (Zellers et al. 2018), CODAH (Chen et al. 2019), Story Cloze (Mostafazadeh et al. 2016).

CODAH is a separate data set in the format of SWAG; its files have no header: category (empty in ten rows, and not
used), prompt, four endings, and the index of the correct one from 0. Quotes are plain characters. The others are CSV
files with quoting. The beginning of SWAG's second sentence has its own column, and the endings complete it. The Story
Cloze Test has no labelled training stories of this form: training uses its validation split, and a fifth of it is held
out as dev, as in GPT-1's code (1,497 and 374 of 1,871, there by its own seed); its correct ending counts from 1.
"""

from collections.abc import Mapping
from typing import Any

from jaxlm.tasks.builtin import PAPERS, TABLES, BuiltIn, Catalogue, papers
from jaxlm.tasks.catalogue import tfds_text
from jaxlm.tasks.examples import Example
from jaxlm.tasks.kinds.texts import Choice
from jaxlm.tasks.task import Columns

_ENDINGS = ("ending0", "ending1", "ending2", "ending3")
_SENTENCES = tuple(f"InputSentence{number}" for number in range(1, 5))

CODAH = BuiltIn(
    Choice(
        name="codah",
        labels=("0", "1", "2", "3"),
        columns=Columns(
            texts=(("prompt", "context", "sentence"),),
            choices=tuple((name, f"choice{number}") for number, name in enumerate(_ENDINGS)),
            choice_list=("choices", "endings"),
            label=("label",),
        ),
        headerless=("category", "prompt", *_ENDINGS, "label"),
        papers=PAPERS,
        num_choices=4,
    ),
    TABLES,
)

# BERT on SWAG: batch 16, 2e-5, three epochs (Devlin et al. 2019, section 4.4). The length is that of common ports.
SWAG = BuiltIn(
    Choice(
        name="swag",
        labels=("0", "1", "2", "3"),
        columns=Columns(
            texts=(("sent1",), ("sent2",)),
            choices=tuple((name,) for name in _ENDINGS),
            choice_list=("endings", "choices"),
            label=("label",),
        ),
        quoting="csv",
        papers=papers(length=80, batch_size=16),
        num_choices=4,
        second="beginning",
    ),
    {"train": ("train.csv",), "dev": ("val.csv",), "test": ("test.csv",)},
)


def _story(values: Mapping[str, Any], name: str) -> list[Example]:
    """Convert a TFDS record; its answer is passed through unchanged (1 or 2; -1: unlabelled)."""
    endings = tuple(tfds_text(ending).strip() for ending in values["endings"])
    label = int(values["label"])
    return [Example((tfds_text(values["context"]).strip(),), endings, str(label) if label > 0 else None)]


STORY_CLOZE = BuiltIn(
    Choice(
        name="story_cloze",
        labels=("1", "2"),
        columns=Columns(
            texts=tuple((name,) for name in _SENTENCES),
            whole=("context", "story"),
            choices=(("RandomFifthSentenceQuiz1", "ending1"), ("RandomFifthSentenceQuiz2", "ending2")),
            choice_list=("choices", "endings"),
            label=("AnswerRightEnding", "label"),
        ),
        quoting="csv",
        papers=papers(batch_size=16),
        num_choices=2,
    ),
    {
        "train": ("cloze_test_val__spring2016 - cloze_test_ALL_val.csv", "val.csv"),
        "test": ("cloze_test_test__spring2016 - cloze_test_ALL_test.csv", "test.csv"),
    },
    Catalogue("story_cloze/2016", splits={"train": "validation", "test": "test"}, read=_story),
    held_out_fraction=0.2,
)

STORIES = (CODAH, SWAG, STORY_CLOZE)
