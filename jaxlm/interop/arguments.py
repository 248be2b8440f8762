"""Arguments of `jaxlm.convert`. This module does not import JAX."""

from dataclasses import dataclass
from typing import Literal

import tyro

from jaxlm.tasks.custom import CustomConfig
from jaxlm.text import Case


@dataclass(frozen=True)
class ImportArguments:
    """Create a run directory from a published model."""

    source: tyro.conf.Positional[str]
    """Directory of the model's files, hf:PATH, openai:PATH or google:PATH; or hf:NAME, from the Hugging Face Hub."""
    run: str
    """Run directory to create, local or gs://BUCKET/RUN."""
    verify: bool = False
    """Compare each layer's output with transformers' own, or with the reference output next to the files."""
    unanswerable: bool = False
    """Allow questions without an answer, as in SQuAD 2.0. For models that answer questions."""
    custom: CustomConfig = CustomConfig()
    """Columns of a fine-tuned model's rows, for predict and evaluate. Default: one column `text` or `sentence`."""
    wordpiece_case: Case = "auto"
    """Case of text for a WordPiece vocabulary. cased: upper case and accents are kept. uncased: neither is kept.
    auto: from its tokenizer_config.json, else guessed from the vocabulary."""


@dataclass(frozen=True)
class ExportArguments:
    """Write a run as a model directory of Hugging Face."""

    run: tyro.conf.Positional[str]
    """A run: RUN or RUN@STEP."""
    to: str
    """hf:PATH, a directory that does not exist yet."""
    weights: Literal["average", "raw"] = "average"
    """average: the average or the best parameters, if the run has them. raw: the parameters of the last step."""
    verify: bool = False
    """Compare each layer's output with transformers' own."""
    push: str | None = None
    """Upload the directory to the Hugging Face Hub as NAME or OWNER/NAME, after hf auth login."""
    private: bool = False
    """Create the model of --push as a private one."""
    license: str | None = None
    """Licence for the model card, as the Hub spells it: mit, apache-2.0, …. Default: not stated."""
    language: tuple[str, ...] = ()
    """Languages of the text, for the model card: en, de, …."""
    datasets: tuple[str, ...] = ()
    """Data sets that the model was trained on, for the model card, by their names on the Hub."""
