"""ELMo's language model as published (Peters et al., 2018, section 3.4; allenai/bilm-tf, bin/train_elmo.py).

Adagrad at 0.2 from sums of 1, gradients of 20 times the loss clipped at 10, rows of 20 words in batches of 128 on each
of three GPUs, ten epochs of the One Billion Word Benchmark with its 793,471 words.
"""

from jaxlm.data.config import SentenceStreams
from jaxlm.models.elmo import ELMoConfig
from jaxlm.objectives.config import BidirectionalLM
from jaxlm.training.config import PretrainConfig
from jaxlm.training.optimizer_config import OptimizerConfig


def config() -> PretrainConfig:
    return PretrainConfig(
        model=ELMoConfig(),
        objective=BidirectionalLM(),
        data=SentenceStreams(),
        optimizer=OptimizerConfig(
            kind="adagrad",
            peak_lr=0.2,
            warmup=0,
            decay="constant",
            eps=0.0,
            initial_accumulator=1.0,
            weight_decay=0.0,
            clip_norm=10.0,
        ),
        num_epochs=10,
        batch_size=384,
        length=20,
        log_every=100,
        eval_every=10_000,
        checkpoint_every=5_000,
    )
