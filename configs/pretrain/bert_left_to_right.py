"""Table 5 (Devlin et al., 2019), "LTR & No NSP": BERT_BASE with a causal mask, predicting the next token."""

from dataclasses import replace

from jaxlm.config import load_config
from jaxlm.objectives.config import LanguageModel
from jaxlm.training.config import PretrainConfig


def config() -> PretrainConfig:
    base = load_config("pretrain/bert_base", PretrainConfig)
    return replace(base, model=replace(base.model, attention="causal"), objective=LanguageModel())
