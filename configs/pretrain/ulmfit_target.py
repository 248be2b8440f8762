"""ULMFiT's second stage (Howard and Ruder, 2018, section 3.2): the language model is trained on the task's text.

Give `--start` a run of `pretrain/ulmfit`. Prepare the text with its tokenizer, or with one of its own words and give
`--start-vocabulary matched`. Slanted triangular rates and a divisor of 2.6 from layer to layer are the paper's, and so
is the rate of 0.004, which the last LSTM layer has here: no layer is above it. The table, which the output layer
shares, has the lowest rate; the code trains it at half of the highest. The paper tunes the number of epochs on the
validation set; 15 is that of TREC-6 in its runs with few labels.
"""

from dataclasses import replace

from jaxlm.config import load_config
from jaxlm.training.config import PretrainConfig


def config() -> PretrainConfig:
    recipe = load_config("pretrain/ulmfit", PretrainConfig)
    optimizer = replace(recipe.optimizer, peak_lr=0.004 * 2.6, layer_decay=2.6)
    return replace(recipe, optimizer=optimizer, num_epochs=15, eval_every=100, checkpoint_every=100)
