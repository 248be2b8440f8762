"""A tagger over words: a BiLSTM with word vectors and characters, trained from scratch.

Sizes and recipe are those of the taggers of Peters et al. (2018) without ELMo, as allennlp's NER model has them: two
layers of 200 units, convolutions of width 3 over the characters, Adam at 0.001, gradients clipped at 5.
"""

from jaxlm.models.bilstm import BiLSTMConfig
from jaxlm.training.config import FinetuneConfig
from jaxlm.training.optimizer_config import OptimizerConfig


def config() -> FinetuneConfig:
    return FinetuneConfig(
        model=BiLSTMConfig(
            word_width=100,
            character_width=16,
            filters=((3, 128),),
            width=400,
            units=(200, 200),
            projected=False,
            init_std=0.1,
        ),
        optimizer=OptimizerConfig(peak_lr=1e-3, warmup=0, decay="constant", weight_decay=0.0, clip_norm=5.0),
        head="crf",
        head_dropout_rate=0.5,
        num_epochs=20,
        batch_size=32,
        length=256,
        log_every=50,
    )
