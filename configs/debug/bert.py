"""A toy BERT whose runs take seconds on a CPU, for experiments and scripts.

It reads every store whose vocabulary has CLS, SEP and MASK: where a store keeps no sentences, spans of 16 tokens count
as sentences.
"""

from jaxlm.data.config import SentencePairs
from jaxlm.models.bert import BertConfig
from jaxlm.objectives.config import MaskedLM
from jaxlm.training.config import PretrainConfig
from jaxlm.training.optimizer_config import OptimizerConfig


def config() -> PretrainConfig:
    return PretrainConfig(
        model=BertConfig(num_positions=512, num_layers=2, width=32, num_heads=4, feed_forward_width=128, init_std=0.1),
        objective=MaskedLM(),
        data=SentencePairs(sentence_tokens=16),
        optimizer=OptimizerConfig(kind="bert_adamw", peak_lr=3e-3, warmup=10, decay="linear", eps=1e-6),
        num_steps=100,
        batch_size=8,
        length=64,
        log_every=1,
        eval_every=50,
        checkpoint_every=50,
    )
