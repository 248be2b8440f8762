"""Fine-tuning of the LSTM by GPT-1's recipe: its input formats, heads, auxiliary loss and hyperparameters."""

from dataclasses import replace

from jaxlm.config import load_config
from jaxlm.models.lstm import LSTMConfig
from jaxlm.training.config import FinetuneConfig


def config() -> FinetuneConfig:
    return replace(load_config("finetune/gpt1", FinetuneConfig), model=LSTMConfig())
