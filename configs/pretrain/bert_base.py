"""BERT_BASE's pretraining (Devlin et al., 2019, section 3, appendix A.2): 12 x 768, a million steps of 256 sequences.

Nine tenths of the steps use 128 tokens, the rest 512. A row holds as many pairs as fit, and pairs do not attend to each
other; `--data.pairs-per-row 1` is the original's one pair and padding. Tables 5, 6 and 8 have configs next to this one.
"""

from dataclasses import replace

from jaxlm.data.config import SentencePairs
from jaxlm.models.bert import BERT_BASE
from jaxlm.nn.config import Execution
from jaxlm.objectives.config import MaskedLM, MaskingConfig
from jaxlm.training.config import PretrainConfig
from jaxlm.training.optimizer_config import OptimizerConfig


def config() -> PretrainConfig:
    return PretrainConfig(
        model=replace(BERT_BASE, vocab_size=0),  # taken from the store's tokenizer
        objective=MaskedLM(
            masking=MaskingConfig(rate=0.15, share_mask=0.8, share_random=0.1), next_sentence_coefficient=1.0
        ),
        data=SentencePairs(short_length=128, short_share=0.9),
        optimizer=OptimizerConfig(
            kind="bert_adamw",
            peak_lr=1e-4,
            warmup=10_000,
            decay="linear",
            beta1=0.9,
            beta2=0.999,
            eps=1e-6,
            weight_decay=0.01,
            clip_norm=1.0,
        ),
        num_steps=1_000_000,
        batch_size=256,
        length=512,
        execution=Execution(remat="auto"),
        log_every=100,
        eval_every=10_000,
        checkpoint_every=5000,
        keep_every=100_000,  # the steps of appendix C.1's curve
    )
