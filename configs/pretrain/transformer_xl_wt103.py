"""Transformer-XL on WikiText-103, the standard model of 16 x 410 (kimiyoung/transformer-xl, pytorch/run_wt103_base.sh).

The paper's table 1 has a test perplexity of 24.0 for it. Evaluate with longer memory, as in the original:
`--length 64 --memory.length 640 --memory.clamp-length 400 --memory.same-length yes`.
"""

from dataclasses import replace

from jaxlm.config import load_config
from jaxlm.models.transformer_xl import WT103
from jaxlm.training.config import PretrainConfig


def config() -> PretrainConfig:
    return replace(
        load_config("pretrain/transformer_xl_enwik8", PretrainConfig),
        model=replace(WT103, vocab_size=0),
        num_steps=200_000,
        batch_size=60,
        length=150,
    )
