"""GPT-1's pretraining (Radford et al., 2018, section 4.1): 12 x 768, 64 sequences of 512 tokens, Adam at 2.5e-4."""

from dataclasses import replace

from jaxlm.models.gpt import GPT1
from jaxlm.nn.config import Execution
from jaxlm.training.config import PretrainConfig
from jaxlm.training.optimizer_config import OptimizerConfig


def config() -> PretrainConfig:
    return PretrainConfig(
        model=replace(GPT1, vocab_size=0),  # taken from the store's tokenizer
        optimizer=OptimizerConfig(kind="adamw", peak_lr=2.5e-4, warmup=2000, decay="cosine", weight_decay=0.01),
        num_steps=3_000_000,  # 100 epochs of BooksCorpus, by estimate
        batch_size=64,
        length=512,
        execution=Execution(remat="auto"),
        log_every=100,
        eval_every=5000,
        checkpoint_every=5000,
        keep_every=100_000,
    )
