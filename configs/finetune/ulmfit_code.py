"""ULMFiT's classifier with the numbers of its code (fastai, courses/dl2/imdb_scripts/train_clas.py:73-145).

It differs from the paper, `finetune/ulmfit`, in Adam's betas (0.8, 0.99), batches of 32, a clip at 25, a weight decay
of 1e-6, and rates from 1/8 of the peak, which is reached after an eighth of the updates. This program differs from the
code in the following: the code restarts the schedule at each of its three stages (an epoch of the head, an epoch with
the last layer, then the whole model), where this one unfreezes a layer per epoch under one schedule; its decay is added
to the gradient; its loss has activation regularization; its texts are padded in front, and padding is read and pooled.
"""

from dataclasses import replace

from jaxlm.config import load_config
from jaxlm.training.config import FinetuneConfig


def config() -> FinetuneConfig:
    recipe = load_config("finetune/ulmfit", FinetuneConfig)
    optimizer = replace(recipe.optimizer, warmup=1 / 8, floor=1 / 8, beta1=0.8, weight_decay=1e-6, clip_norm=25.0)
    return replace(recipe, optimizer=optimizer, batch_size=32)
