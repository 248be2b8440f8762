"""T5 1.0 base (Raffel et al., 2020, section 3.1): 12 + 12 x 768, 2^19 steps of 128 texts of 568 tokens.

Adafactor without clipping of the gradient and without weight decay; the rate is 0.01 for 10,000 steps and then falls
with the inverse root. The released checkpoints were also trained on labelled tasks; this is the paper's baseline.
"""

from dataclasses import replace

from jaxlm.data.config import Spans
from jaxlm.models.t5 import T5_BASE
from jaxlm.nn.config import Execution
from jaxlm.objectives.config import SequenceToSequence
from jaxlm.training.config import PretrainConfig
from jaxlm.training.optimizer_config import OptimizerConfig


def config() -> PretrainConfig:
    return PretrainConfig(
        model=replace(T5_BASE, vocab_size=0),  # taken from the store's tokenizer
        objective=SequenceToSequence(z_loss=1e-4),
        data=Spans(),
        optimizer=OptimizerConfig(
            kind="adafactor",
            peak_lr=0.01,
            warmup=0,
            decay="constant_inverse_sqrt",
            weight_decay=0.0,
            clip_norm=0.0,
        ),
        execution=Execution(remat="auto"),
        num_steps=2**19,
        batch_size=128,
        length=512,
        log_every=100,
        eval_every=5000,
        checkpoint_every=5000,
    )
