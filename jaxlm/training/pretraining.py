"""The learner of pretraining: a model's parameters, objective, FLOPs and evaluation metrics.

A GPT predicts the next token of rows of text (Radford et al., 2018, section 3.1). A BERT predicts masked tokens of
sentence pairs, and if the second sentence follows the first (Devlin et al., 2019, section 3.1). With a causal mask, the
paper's left-to-right ablation, it predicts their next token.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.data.config import DataConfig
from jaxlm.data.loader import PhasedRows
from jaxlm.models import build
from jaxlm.models.model import Model
from jaxlm.objectives.auxiliary_losses import further_losses
from jaxlm.objectives.config import LanguageModel, MaskedLM
from jaxlm.objectives.language_model import language_model, with_rate_of_length
from jaxlm.objectives.masked_lm import left_to_right_language_model, masked_language_model
from jaxlm.objectives.masking import Specials
from jaxlm.runs.recorder import Work
from jaxlm.text import Tokenizer
from jaxlm.training.config import PretrainConfig
from jaxlm.training.optimizer import ParameterGroup
from jaxlm.training.parameter_groups import layer_groups
from jaxlm.training.program import Learner, carry_of


@dataclass(frozen=True, kw_only=True)
class Pretraining(Learner):
    """A learner for pretraining.

    language_loss: the metric that equals the store's unigram entropy for a model of word frequencies alone.
    whole_text: an evaluation predicts every token of a text and so gives a perplexity per word and bits per byte.
    notes: human-readable descriptions of the targets.
    """

    language_loss: str
    whole_text: bool
    notes: tuple[str, ...] = ()

    def work(self, rows: PhasedRows) -> Work:
        """Return a function from a step to the tokens and FLOPs of a run up to it."""

        def work(step: int) -> tuple[float, float]:
            slots = rows.tokens_until(step)
            flops = sum(count * self.flops_per_token(length) for length, count in slots)
            return float(sum(count for _, count in slots)), float(flops)

        return work


def make_pretraining(config: PretrainConfig, tokenizer: Tokenizer | None) -> Pretraining:
    """Return the learner of `config`. The tokenizer gives the special tokens and the tokens that continue a word.

    tokenizer: None for measurements only: ids 0, 1 and 2 are CLS, SEP and MASK, and every token is a word.
    """
    model = build(config.model, config.execution)
    if isinstance(config.objective, MaskedLM):
        return _masked(model, config, config.objective, tokenizer)
    return _next_token(model, config)


def _next_token(model: Model, config: PretrainConfig) -> Pretraining:
    """Return the learner for the next token of text, or of sentence pairs as in BERT's left-to-right ablation."""
    data, asked, chunks = config.data, config.objective, config.execution.loss_chunks
    assert isinstance(asked, LanguageModel)
    further = [] if asked == LanguageModel() else further_losses(model, asked, chunks)

    def init_heads(words: jax.Array, others: jax.Array) -> Any:
        heads = model.output_layer.init(words)
        for loss in further:
            heads |= loss.init(others)
        return heads

    def init_params(key: jax.Array) -> Any:
        if not jax.eval_shape(init_heads, key, key):  # neither the output layer nor the losses have parameters
            return {"backbone": model.init(key)}
        body, words, others = jax.random.split(key, 3)
        return {"backbone": model.init(body), "head": init_heads(words, others)}

    def flops_per_token(length: int) -> float:
        return model.flops_per_token(length) + sum(loss.flops_per_token for loss in further)

    if data.whole_text:
        objective = language_model(model, loss_chunks=chunks, further=further)
    else:
        objective = left_to_right_language_model(model, loss_chunks=chunks)
    if data.whole_text and (nominal := data.nominal_length(config.length)) is not None:
        objective = with_rate_of_length(objective, nominal)
    return Pretraining(
        model=model,
        init_params=init_params,
        objective=objective,
        flops_per_token=flops_per_token,
        groups=_groups(model, config),
        carry=partial(carry_of, model, data),
        language_loss="nll",
        whole_text=data.whole_text,
        notes=() if data.whole_text else ("left to right, no next-sentence loss",),
    )


def _masked(model: Model, config: PretrainConfig, objective: MaskedLM, tokenizer: Tokenizer | None) -> Pretraining:
    """Return the learner for masked tokens and, on rows of pairs, the next sentence."""
    specials, continues, masking = Specials(0, 1, 2), None, objective.masking
    if tokenizer is not None:
        specials = Specials(*(tokenizer.specials[role] for role in ("cls", "sep", "mask")))
    if masking.whole_word:
        continues = np.zeros(config.model.vocab_size, bool) if tokenizer is None else tokenizer.continues
    next_sentence = None
    if config.data.next_sentences and objective.next_sentence_coefficient and model.next_sentence_head is not None:
        next_sentence = model.next_sentence_head

    def init_params(key: jax.Array) -> Any:
        body, words, pairs = jax.random.split(key, 3)
        head = model.output_layer.init(words)
        if next_sentence is not None:
            head["next_sentence"] = next_sentence.init(pairs, jnp.zeros((1, 1, config.model.width)))["params"]
        return {"backbone": model.init(body), "head": head}

    def flops(length: int) -> float:
        return model.flops_per_token(length, round(masking.rate * length) / length)

    return Pretraining(
        model=model,
        init_params=init_params,
        objective=masked_language_model(
            model,
            next_sentence,
            masking=masking,
            specials=specials,
            continues=continues,
            slots=partial(config.data.mask_slots, rate=masking.rate),
            next_sentence_coefficient=objective.next_sentence_coefficient,
            loss_chunks=config.execution.loss_chunks,
        ),
        flops_per_token=flops,
        groups=_groups(model, config),
        language_loss="masked_lm_loss",
        whole_text=False,
        notes=(_masks(objective, config.data),),
    )


def _groups(model: Model, config: PretrainConfig) -> tuple[ParameterGroup, ...]:
    """Return the parameters that have a learning rate of their own."""
    decay = config.optimizer.layer_decay
    return () if decay == 1.0 else layer_groups(model.family, config.model.num_layers, decay=decay)


def _masks(objective: MaskedLM, data: DataConfig) -> str:
    """Return a human-readable description of the masks."""
    masking = objective.masking
    kept = max(0.0, 1.0 - masking.share_mask - masking.share_random)
    return (
        f"masks: {masking.rate:.0%} of {'whole words' if masking.whole_word else 'tokens'} ({masking.share_mask:.0%} "
        f"masked, {masking.share_random:.0%} random, {kept:.0%} unchanged), "
        f"{data.describe_masks(objective.next_sentence_coefficient)}"
    )
