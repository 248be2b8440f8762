"""Cross-view training of a tagger over words, from scratch (Clark et al., 2018), with the values of its code, cvt_text.

`--unlabelled` gives the sentences without tags; without it, all steps are supervised. A run has 200,000 updates of
both kinds, as in the authors' README. With an odd `log_every`, metrics.jsonl has lines of both kinds.
"""

from jaxlm.models.bilstm import BiLSTMConfig
from jaxlm.training.config import FinetuneConfig
from jaxlm.training.optimizer_config import OptimizerConfig


def config() -> FinetuneConfig:
    return FinetuneConfig(
        model=BiLSTMConfig(),
        optimizer=OptimizerConfig(
            kind="sgd", momentum=0.9, peak_lr=0.5, warmup=5000, decay="one_plus_root", weight_decay=0.0, clip_norm=1.0
        ),
        head="cross_view",
        label_smoothing=0.1,
        ema=0.998,
        ema_of="before",
        num_steps=200_000,
        batch_size=64,
        length=256,
        log_every=25,
        eval_every=500,
    )
