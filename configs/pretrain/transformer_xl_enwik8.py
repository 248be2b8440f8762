"""Transformer-XL on enwik8, the base model of 12 x 512 (kimiyoung/transformer-xl, pytorch/run_enwik8_base.sh).

The paper's table 2 has 1.06 bits per character for it. Evaluate with longer memory, as in the original:
`--length 80 --memory.length 2100 --memory.clamp-length 820 --memory.same-length yes`.
"""

from dataclasses import replace

from jaxlm.data.config import Streams
from jaxlm.models.transformer_xl import ENWIK8
from jaxlm.training.config import PretrainConfig
from jaxlm.training.optimizer_config import OptimizerConfig


def config() -> PretrainConfig:
    return PretrainConfig(
        model=replace(ENWIK8, vocab_size=0),
        data=Streams(),
        optimizer=OptimizerConfig(peak_lr=2.5e-4, warmup=0, decay="cosine", weight_decay=0.0, clip_norm=0.25),
        num_steps=400_000,
        batch_size=22,
        length=512,
        log_every=200,
        eval_every=4000,
        checkpoint_every=4000,
    )
