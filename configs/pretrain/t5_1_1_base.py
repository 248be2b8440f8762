"""T5 1.1 base (google-research/t5x, examples/t5/t5_1_1): 12 + 12 x 768, a gate in the feed-forward, untied output.

10^6 steps of 2,048 texts, without dropout, on unlabelled text alone.
"""

from dataclasses import replace

from jaxlm.config import load_config
from jaxlm.models.t5 import T5_1_1_BASE
from jaxlm.training.config import PretrainConfig


def config() -> PretrainConfig:
    model = replace(T5_1_1_BASE, vocab_size=0, dropout_rate=0.0)
    return replace(load_config("pretrain/t5_base", PretrainConfig), model=model, batch_size=2048, num_steps=10**6)
