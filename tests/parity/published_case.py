"""Models of Hugging Face's classes at toy sizes, their numbers drawn by name: the same in PyTorch and without it."""

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Sizes:
    """Of all the models; nothing is round and nothing is a default."""

    vocabulary: int = 61
    width: int = 20
    heads: int = 5
    layers: int = 2
    inner: int = 30
    positions: int = 13
    eps: float = 3e-6
    rate: float = 2e-3  # of AdamW


ODD = Sizes(vocabulary=997, width=60, heads=5, layers=3, inner=150, positions=37, rate=1e-4)

LONG = Sizes(positions=90)  # for 64 new tokens
DECODERS = ("openai_gpt", "gpt2")

# name -> Hugging Face's class, and what its config has beside the sizes.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", {}),
    "bert_pretraining": ("BertForPreTraining", {"hidden_act": "gelu_new"}),
    "bert_masked_lm": ("BertForMaskedLM", {"hidden_act": "gelu_pytorch_tanh"}),
    "bert_classification": (
        "BertForSequenceClassification",
        {"id2label": {0: "no", 1: "maybe", 2: "yes"}, "label2id": {"no": 0, "maybe": 1, "yes": 2}},
    ),
    "bert_regression": ("BertForSequenceClassification", {"num_labels": 1, "problem_type": "regression"}),
    "bert_choice": ("BertForMultipleChoice", {}),
    "bert_tagging": ("BertForTokenClassification", {"num_labels": 5}),
    "bert_span": ("BertForQuestionAnswering", {}),
    "openai_gpt": ("OpenAIGPTLMHeadModel", {}),
    "openai_gpt_classification": ("OpenAIGPTForSequenceClassification", {"num_labels": 3, "pad_token_id": 0}),
    "gpt2": ("GPT2LMHeadModel", {"activation_function": "gelu_new"}),
    "gpt2_exact": ("GPT2LMHeadModel", {"activation_function": "gelu"}),
}


def settings(name: str, sizes: Sizes) -> dict[str, Any]:
    """The keyword arguments of the model's config."""
    kind, more = CASES[name]
    if kind.startswith("Bert"):
        return {
            "vocab_size": sizes.vocabulary,
            "hidden_size": sizes.width,
            "num_attention_heads": sizes.heads,
            "num_hidden_layers": sizes.layers,
            "intermediate_size": sizes.inner,
            "max_position_embeddings": sizes.positions,
            "layer_norm_eps": sizes.eps,
            "pad_token_id": 0,
        } | more
    inner = {"n_inner": sizes.inner} if kind.startswith("GPT2") else {}
    return {
        "vocab_size": sizes.vocabulary,
        "n_embd": sizes.width,
        "n_head": sizes.heads,
        "n_layer": sizes.layers,
        "n_positions": sizes.positions,
        "layer_norm_epsilon": sizes.eps,
        "bos_token_id": None,
        "eos_token_id": None,
        **inner,
    } | more


def tensor(name: str, shape: list[int]) -> np.ndarray:
    """float32 numbers that follow from the tensor's name: about 1 for the weights of norms, else about 0."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    norm = name.endswith(".weight") and any(part in name for part in ("LayerNorm", "ln_"))
    return (rng.normal(size=shape) * 0.2 + norm).astype(np.float32)


def rows(sizes: Sizes) -> tuple[list[list[int]], list[list[int]]]:
    """Ids of rows of several lengths, the longest that there can be among them, and segments."""
    rng = np.random.default_rng(5)
    lengths = (sizes.positions, sizes.positions // 2, 3)
    ids = [rng.integers(1, sizes.vocabulary, size=length).tolist() for length in lengths]
    return ids, [[int(k > length // 3) for k in range(length)] for length in lengths]


def weights(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """What each number of an output counts in the sum whose gradient is compared."""
    return np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape).astype(np.float32)


def summary(name: str, gradient: np.ndarray) -> np.ndarray:
    """Two numbers that stand for a gradient: its norm, and its product with fixed numbers, as a share of the norm."""
    gradient = np.asarray(gradient, np.float64)
    norm = np.linalg.norm(gradient)
    return np.array([norm, np.sum(gradient * weights(name, gradient.shape)) / max(norm, 1e-30)])


def prompts() -> list[list[int]]:
    """Of different lengths."""
    rng = np.random.default_rng(9)
    return [rng.integers(1, LONG.vocabulary, size=length).tolist() for length in (1, 5, 9, 26)]


STEPS = {"steps": 20, "decay": 0.01, "clip": 1.0, "eps": 1e-8}


def target(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """What an output should be: a class for each of its last axis, or a number where that has one place."""
    drawn = weights(f"target {name}", shape)
    return drawn if shape[-1] == 1 else np.asarray(drawn.argmax(axis=-1))
