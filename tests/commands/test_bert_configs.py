"""BERT's pretraining configs say what the paper says, and each ablation differs from BERT_BASE's in one thing."""

from dataclasses import replace
from typing import Any

import pytest

from jaxlm.config import load_config, to_json
from jaxlm.models.bert import BERT_BASE, BERT_LARGE, TABLE_6
from jaxlm.objectives.config import MaskedLM
from jaxlm.objectives.masked_lm import MaskingConfig
from jaxlm.training.config import PretrainConfig

# What differs from pretrain/bert_base, in the JSON of the config.
SIZES = {
    name: {
        f"model.{field}": getattr(TABLE_6[size], field)
        for field in ("num_layers", "width", "num_heads", "feed_forward_width")
        if getattr(TABLE_6[size], field) != getattr(BERT_BASE, field)
    }
    for name, size in {
        "bert_3x768": "3x768x12",
        "bert_6x768_3_heads": "6x768x3",
        "bert_6x768": "6x768x12",
        "bert_12x1024": "12x1024x16",
        "bert_large": "24x1024x16",
    }.items()
}
VARIANTS = SIZES | {
    "bert_no_nsp": {"objective.next_sentence_coefficient": 0.0},
    "bert_left_to_right": {
        "objective.kind": "language_model",
        "objective.activation_regularization": 0.0,
        "objective.temporal_activation_regularization": 0.0,
        "objective.positions": "all",
        "objective.intermediate_coefficient": 0.0,
        "objective.second_target_coefficient": 0.0,
        "model.attention": "causal",
    },
    "bert_whole_word": {"objective.masking.whole_word": True},
    "bert_static_masks": {"data.masks": "static"},
    "bert_original_pairs": {
        "data.pairs_per_row": 1,
        "data.random_candidates": 1,
        "data.one_sentence": "random",
        "data.short_target_drawn": "document",
    },
    "bert_mask_100_0_0": {"objective.masking.share_mask": 1.0, "objective.masking.share_random": 0.0},
    "bert_mask_80_0_20": {"objective.masking.share_random": 0.2},
    "bert_mask_80_20_0": {"objective.masking.share_random": 0.0},
    "bert_mask_0_20_80": {"objective.masking.share_mask": 0.0, "objective.masking.share_random": 0.8},
    "bert_mask_0_0_100": {"objective.masking.share_mask": 0.0, "objective.masking.share_random": 1.0},
}


def flat(values: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= {f"{name}.{key}": x for key, x in flat(value).items()} if isinstance(value, dict) else {name: value}
    return found


def test_base_is_the_papers():
    """Devlin et al. (2019), section 3, 3.1 and appendix A.2; google-research/bert optimization.py:59-74."""
    config = load_config("pretrain/bert_base", PretrainConfig)
    config.check()
    assert replace(config.model, vocab_size=BERT_BASE.vocab_size) == BERT_BASE
    assert (config.batch_size, config.length, config.num_steps) == (256, 512, 1_000_000)
    assert (config.data.layout, config.data.short_length, config.data.short_share) == ("pairs", 128, 0.9)
    assert config.objective == MaskedLM(
        masking=MaskingConfig(0.15, 0.8, 0.1, whole_word=False), next_sentence_coefficient=1.0
    )
    optimizer = config.optimizer
    assert (optimizer.kind, optimizer.peak_lr, optimizer.warmup, optimizer.decay) == (
        "bert_adamw",
        1e-4,
        10_000,
        "linear",
    )
    assert (optimizer.beta1, optimizer.beta2, optimizer.eps) == (0.9, 0.999, 1e-6)
    assert (optimizer.weight_decay, optimizer.clip_norm) == (0.01, 1.0)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_differs_in_what_it_says(name):
    """Fails when an ablation changes something else too, or nothing."""
    base, config = (load_config(f"pretrain/{which}", PretrainConfig) for which in ("bert_base", name))
    config.check()
    before, after = flat(to_json(base)), flat(to_json(config))
    assert {key: value for key, value in after.items() if before.get(key) != value} == VARIANTS[name]


def test_the_large_one_is_the_papers_and_the_small_one_is_small():
    assert replace(load_config("pretrain/bert_large", PretrainConfig).model, vocab_size=30_522) == BERT_LARGE
    small = load_config("pretrain/bert_small", PretrainConfig)
    small.check()
    assert small.model.width <= 256 and small.model.init_std > 0.02 and small.data.layout == "pairs"
