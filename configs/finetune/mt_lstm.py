"""The translation of CoVe: the MT-LSTM of McCann et al. (2017, section 3), trained from scratch.

Epochs are those of a small set. The original trains until the learning rate is below 0.03.
"""

from jaxlm.models.mt_lstm import MTLSTMConfig
from jaxlm.training.config import FinetuneConfig
from jaxlm.training.optimizer_config import OptimizerConfig


def config() -> FinetuneConfig:
    return FinetuneConfig(
        model=MTLSTMConfig(),
        optimizer=OptimizerConfig(
            kind="sgd", peak_lr=1.0, warmup=0, decay="halved_by_validation", weight_decay=0.0, clip_norm=5.0
        ),
        loss_per="row",
        select_by="loss",
        num_epochs=20,
        batch_size=64,
        length=64,
        log_every=50,
    )
