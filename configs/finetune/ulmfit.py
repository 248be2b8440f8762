"""ULMFiT's classifier by the paper (Howard and Ruder, 2018, sections 3.3 and 4.1).

Concat pooling, gradual unfreezing, discriminative rates (2.6), slanted triangular rates over the whole run, and
gradients within windows of 70 tokens. The paper tunes the number of epochs on the validation set and pools as many
states as fit the memory: 10 epochs and 1,400 tokens are ours (its code pools the last 1,400 of a text, this program
truncates by the task's rule). It gives no weight decay and no clipping for the classifier. A text begins with the end
of a document, as in the language model's training, and has no token after it.
"""

from jaxlm.models.awd_lstm import AWDLSTMConfig
from jaxlm.training.config import FinetuneConfig
from jaxlm.training.optimizer_config import OptimizerConfig


def config() -> FinetuneConfig:
    return FinetuneConfig(
        model=AWDLSTMConfig(
            word_dropout_rate=0.05,
            embedding_dropout_rate=0.4,
            recurrent_dropout_rate=0.5,
            dropout_rate=0.3,
            output_dropout_rate=0.4,
            output_bias=False,
        ),
        optimizer=OptimizerConfig(
            kind="adamw",
            peak_lr=0.01,
            warmup=0.1,
            decay="slanted_triangular",
            floor=1 / 32,
            beta1=0.7,
            beta2=0.99,
            weight_decay=0.0,
            clip_norm=0.0,
            layer_decay=2.6,
        ),
        head="concat_pooling",
        special_tokens="end",
        head_dropout_rate=0.4,
        unfreeze="gradual",
        backprop_window=70,
        num_epochs=10,
        batch_size=64,
        length=1400,
    )
