"""The biattentive classification network of ELMo's authors (Peters et al., 2018), for single texts, from scratch.

The values are those of allennlp 0.9.0, training_config/biattentive_classification_network_elmo.jsonnet, whose words
have ELMo's states too (`--word-features`). Without them the embedding dropout is 0.25 there. The scores have dropout
0.1, 0.2 and 0.3 before the three maxout layers.
"""

from dataclasses import replace

from jaxlm.config import load_config
from jaxlm.training.config import FinetuneConfig


def config() -> FinetuneConfig:
    pair = load_config("finetune/bcn", FinetuneConfig)
    model = replace(pair.model, embedding_dropout_rate=0.5, input_feed_forward_dropout_rate=0.25)
    return replace(pair, model=model, biattention="self")
