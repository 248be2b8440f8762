"""ULMFiT's second stage with the numbers of its code (fastai, courses/dl2/imdb_scripts/finetune_lm.py:66-144).

It differs from the paper, `pretrain/ulmfit_target`, in Adam's betas (0.8, 0.99), the dropout rates and 25 epochs. This
program differs from the code in the following: the code has rates of a sixth, a third and the whole of the highest one
in its three LSTM layers, and half of it in the table, where this one divides by 2.6; its weight decay is added to the
gradient; its activation regularization sees states before the output dropout. For words that only the target text has,
give `--start-vocabulary matched`.
"""

from dataclasses import replace

from jaxlm.config import load_config
from jaxlm.training.config import PretrainConfig


def config() -> PretrainConfig:
    recipe = load_config("pretrain/ulmfit_target", PretrainConfig)
    model = replace(
        recipe.model,
        word_dropout_rate=0.02,
        embedding_dropout_rate=0.25,
        recurrent_dropout_rate=0.2,
        dropout_rate=0.15,
        output_dropout_rate=0.1,
    )
    return replace(recipe, model=model, optimizer=replace(recipe.optimizer, beta1=0.8), num_epochs=25)
