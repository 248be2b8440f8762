"""A small BERT for two CPU cores: 4 x 192, about fifteen minutes on a folder of books.

BERT's recipe at the size of a laptop: three fifths of the steps use rows of 32 tokens, the rest rows of 128, early
enough that the learning rate is not yet small. The short rows let so small a model learn within the time: on rows of
128 alone the masked-LM loss stays near 6 for thousands of steps, at any learning rate. Positions past 128 are left for
fine-tuning (SQuAD) to learn. There is no dropout, as the model sees its text less than once. The initial deviation is
0.046 = 0.04 / 0.88, where 0.04 = 0.02 sqrt(768 / 192) and 0.88 is the deviation of a standard normal truncated at 2:
with the paper's 0.02 so narrow a post-norm model stays at the unigram entropy.
"""

from jaxlm.data.config import SentencePairs
from jaxlm.models.bert import BertConfig
from jaxlm.objectives.config import MaskedLM
from jaxlm.training.config import PretrainConfig
from jaxlm.training.optimizer_config import OptimizerConfig


def config() -> PretrainConfig:
    return PretrainConfig(
        model=BertConfig(
            num_positions=512,
            num_layers=4,
            width=192,
            num_heads=6,
            feed_forward_width=768,
            init_std=0.046,
            dropout_rate=0.0,
            embedding_dropout_rate=0.0,
            attention_dropout_rate=0.0,
        ),
        objective=MaskedLM(),
        data=SentencePairs(short_length=32, short_share=0.6),
        optimizer=OptimizerConfig(kind="adamw", peak_lr=1e-3, warmup=0.05, decay="linear", eps=1e-6),
        num_steps=1550,
        batch_size=64,
        length=128,
        log_every=20,
        eval_every=0,
        checkpoint_every=500,
    )
