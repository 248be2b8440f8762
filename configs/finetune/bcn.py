"""The biattentive classification network of CoVe (McCann et al., 2017, section 5), for a text or a pair, from scratch.

Adam at 0.001, one layer of 300 units per direction, and dropout of 0.1, one of the paper's three rates. The paper does
not give the batch, the number of epochs and the clip, which are those of `finetune/bcn_elmo`.
"""

from jaxlm.models.bilstm import BiLSTMConfig
from jaxlm.training.config import FinetuneConfig
from jaxlm.training.optimizer_config import OptimizerConfig


def config() -> FinetuneConfig:
    return FinetuneConfig(
        model=BiLSTMConfig(
            word_width=300,
            character_width=0,
            input_feed_forward_width=300,
            num_layers=1,
            width=600,
            units=(300,),
            projected=False,
            embedding_dropout_rate=0.1,
            input_feed_forward_dropout_rate=0.0,
            dropout_rate=0.0,
            init_std=0.1,
        ),
        optimizer=OptimizerConfig(peak_lr=1e-3, warmup=0, decay="constant", weight_decay=0.0, clip_norm=5.0),
        head="bcn",
        head_dropout_rate=0.1,
        num_epochs=40,
        patience=5,
        batch_size=100,
        length=256,
        log_every=50,
    )
