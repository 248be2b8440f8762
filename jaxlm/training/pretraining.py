"""What a kind of model brings to pretraining: its parameters, its objective, its FLOPs, the figures of an evaluation.

A GPT predicts the next token of rows of text (Radford et al., 2018, section 3.1). A BERT predicts masked tokens of
sentence pairs and whether the second follows the first (Devlin et al., 2019, section 3.1); under a causal mask, the
paper's left-to-right ablation, it predicts the next token of them.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.data.batch import PairBatch
from jaxlm.data.pairs import mask_slots
from jaxlm.data.phases import Phase
from jaxlm.data.store import Store
from jaxlm.models import bert, gpt
from jaxlm.models.bert import Bert, BertConfig
from jaxlm.models.gpt import GPT
from jaxlm.models.heads import MaskedLMHead, NextSentenceHead
from jaxlm.objectives.language_model import language_model
from jaxlm.objectives.masked_lm import left_to_right_language_model, masked_language_model
from jaxlm.objectives.masking import Specials
from jaxlm.objectives.objective import Objective
from jaxlm.runs.meter import Work
from jaxlm.text import Tokenizer
from jaxlm.training.config import PretrainConfig
from jaxlm.training.perplexity import perplexity, totals

EvalStep = Callable[[Any, Any], dict[str, tuple[Any, Any]]]


@dataclass(frozen=True)
class Pretraining:
    """A model and what it is trained on. Parameters: {"backbone"}, and for a BERT {"backbone", "head"}.

    objective takes batches of any length. language_loss: the metric that would be the store's unigram entropy if
    nothing but word frequencies were learnt. flops_per_token(length): of a step, forward and backward. whole_text:
    whether an evaluation predicts every token of a text, so that it has a perplexity a word and bits a byte. says: what
    is predicted, for people.
    """

    init_params: Callable[[jax.Array], Any]
    objective: Objective
    language_loss: str
    flops_per_token: Callable[[int], float]
    whole_text: bool
    says: tuple[str, ...] = ()

    def figures(self, step: EvalStep, params: Any, batches: Iterable[Any], stores: Sequence[Store]) -> dict[str, float]:
        """An evaluation on held-out stores: `validation_loss`, the loss that is trained on, and what goes with it."""
        if self.whole_text:
            words, size = sum(store.words for store in stores), sum(store.bytes for store in stores)
            found = perplexity(step, params, batches, words=words, bytes=size)
            found["validation_accuracy"] = found.pop("accuracy")  # training lines have an accuracy of their own
            return found
        sums = totals(step, params, batches)
        means = {name: total / weight if weight else math.nan for name, (total, weight) in sums.items()}
        loss = sum(factor * means[name] for name, factor in self.objective.coefficients.items())
        return {"validation_loss": loss} | {f"validation_{name}": value for name, value in means.items()}

    def work(self, phases: Sequence[Phase], batch_size: int) -> Work:
        """step -> (tokens, FLOPs) of a run up to it."""

        def work(step: int) -> tuple[float, float]:
            tokens = flops = 0.0
            for phase in phases:
                slots = (
                    batch_size * phase.length * (min(max(step, phase.first_step), phase.end_step) - phase.first_step)
                )
                tokens, flops = tokens + slots, flops + slots * self.flops_per_token(phase.length)
            return tokens, flops

        return work


def make_pretraining(config: PretrainConfig, tokenizer: Tokenizer | None) -> Pretraining:
    """What `config` pretrains. The tokenizer gives an encoder's special tokens, and which pieces continue words.

    None, for steps that are measured and not learnt from: ids 0, 1 and 2 are CLS, SEP and MASK, every piece is a word.
    """
    return _encoder(config, tokenizer) if isinstance(config.model, BertConfig) else _decoder(config)


def _decoder(config: PretrainConfig) -> Pretraining:
    assert not isinstance(config.model, BertConfig)
    sizes, model = config.model, GPT(config.model, config.execution)

    def init_params(key: jax.Array) -> Any:
        example = jnp.zeros((1, 1), jnp.int32)
        return {"backbone": model.init(key, example, example)["params"]}

    objective = language_model(model, loss_chunks=config.execution.loss_chunks)
    return Pretraining(init_params, objective, "nll", lambda length: gpt.model_flops_per_token(sizes, length), True)


def _encoder(config: PretrainConfig, tokenizer: Tokenizer | None) -> Pretraining:
    assert isinstance(config.model, BertConfig)
    specials, continues = Specials(0, 1, 2), None
    if tokenizer is not None:
        specials = Specials(*(tokenizer.specials[role] for role in ("cls", "sep", "mask")))
    if config.masking.whole_word:
        continues = np.zeros(config.model.vocab_size, bool) if tokenizer is None else tokenizer.continues
    sizes, model, masking = config.model, Bert(config.model, config.execution), config.masking
    masked_lm = MaskedLMHead(sizes)
    next_sentence = NextSentenceHead(sizes.init_std) if config.next_sentence_coefficient else None
    if sizes.attention == "causal":
        next_sentence = None

    def init_params(key: jax.Array) -> Any:
        body, words, pairs = jax.random.split(key, 3)
        ids, states = jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1, sizes.width))
        head = {"masked_lm": masked_lm.init(words, states)["params"]}
        if next_sentence is not None:
            head["next_sentence"] = next_sentence.init(pairs, states)["params"]
        return {"backbone": model.init(body, ids, ids)["params"], "head": head}

    chunks = config.execution.loss_chunks
    if sizes.attention == "causal":
        objective = left_to_right_language_model(model, masked_lm, loss_chunks=chunks)
        flops = lambda length: bert.model_flops_per_token(sizes, length)  # noqa: E731
        return Pretraining(init_params, objective, "nll", flops, False, ("left to right, no next-sentence loss",))
    make = functools.partial(
        masked_language_model,
        model,
        masked_lm,
        next_sentence,
        masking=masking,
        specials=specials,
        continues=continues,
        next_sentence_coefficient=config.next_sentence_coefficient,
        loss_chunks=chunks,
    )

    def of(batch: PairBatch) -> Objective:
        """The objective for rows of this length and number of pairs, which say how many masks there can be."""
        return make(slots=mask_slots(batch.ids.shape[1], batch.firsts.shape[1], masking.rate))

    objective = Objective(
        make(slots=1).coefficients,
        lambda batch: of(batch).weights(batch),
        lambda params, batch, key: of(batch).sums(params, batch, key),
    )
    flops = lambda length: bert.model_flops_per_token(sizes, length, round(masking.rate * length) / length)  # noqa: E731
    return Pretraining(init_params, objective, "masked_lm_loss", flops, False, (_masks(config),))


def _masks(config: PretrainConfig) -> str:
    """What an encoder has to predict, in a sentence."""
    masking, data, weight = config.masking, config.data, config.next_sentence_coefficient
    assert data.layout == "pairs", "check() refuses an encoder on rows of another layout"
    kept = max(0.0, 1.0 - masking.share_mask - masking.share_random)
    return (
        f"masks: {masking.rate:.0%} of {'whole words' if masking.whole_word else 'tokens'} ({masking.share_mask:.0%} "
        f"hidden, {masking.share_random:.0%} random, {kept:.0%} as they are), {data.masks}"
        + (f" in {data.mask_copies} copies" if data.masks == "static" else "")
        + ("; no next-sentence loss" if not weight else f"; next-sentence loss x {weight:g}")
    )
