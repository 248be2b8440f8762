"""BERT's fine-tuning (Devlin et al. 2019, section 4 and appendix A.3): 3 epochs, batch 32, the task's learning rate.

The optimizer corrects Adam's bias, without which small sets often fail (Mosbach et al., 2021; Zhang et al., 2021);
`--optimizer.kind bert_adamw` is the original optimizer.
"""

from jaxlm.models.bert import BERT_BASE
from jaxlm.training.config import FinetuneConfig
from jaxlm.training.optimizer_config import OptimizerConfig


def config() -> FinetuneConfig:
    return FinetuneConfig(
        model=BERT_BASE,  # for runs from scratch; --start brings its own sizes
        optimizer=OptimizerConfig(
            kind="adamw", peak_lr=None, warmup=0.1, decay="linear", eps=1e-6, weight_decay=0.01, clip_norm=1.0
        ),
        head_dropout_rate=0.1,
    )
