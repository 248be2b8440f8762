"""GPT-2's pretraining at its smallest size (Radford et al., 2019, section 2.3): 12 x 768, 512 sequences of 1,024.

The paper gives the batch size and the length; its learning rate was tuned by hand. The learning rate of 6e-4, beta2
0.95, weight decay 0.1 and the cosine are GPT-3's for this size (Brown et al., 2020, table 2.1 and appendix B).
`--model.residual-init plain` is the initialization of the released code.
"""

from dataclasses import replace

from jaxlm.models.gpt import GPT2
from jaxlm.nn.config import Execution
from jaxlm.training.config import PretrainConfig
from jaxlm.training.optimizer_config import OptimizerConfig


def config() -> PretrainConfig:
    return PretrainConfig(
        model=replace(GPT2, vocab_size=0),  # taken from the store's tokenizer
        optimizer=OptimizerConfig(
            kind="adamw", peak_lr=6e-4, warmup=2000, decay="cosine", beta2=0.95, weight_decay=0.1, clip_norm=1.0
        ),
        num_steps=300_000,
        batch_size=512,
        length=1024,
        execution=Execution(remat="auto"),
        log_every=100,
        eval_every=5000,
        checkpoint_every=5000,
        keep_every=50_000,
    )
