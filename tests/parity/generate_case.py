"""Settings of generation for the decoders of `published_case`: beam search, repetition penalty and minimum length.

Each gives 16 new tokens or fewer to each prompt. END is the id that ends a text, one that the searches find often.
"""

from typing import Any

import numpy as np

from parity import published_case as case

NEW = 16
END = {"openai_gpt": 6, "gpt2": 34}
# Hugging Face's names.
SETTINGS: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3},
    "long": {"num_beams": 8, "length_penalty": 2.5},
    "short": {"num_beams": 4, "length_penalty": -1.5},
    "penalty": {"num_beams": 3, "length_penalty": 0.0, "repetition_penalty": 1.4},
    "all": {"num_beams": 5, "length_penalty": 0.6, "min_new_tokens": 6, "repetition_penalty": 0.9},
    "greedy": {"num_beams": 1, "min_new_tokens": 6, "repetition_penalty": 1.3},
}


def tensor(name: str, shape: list[int]) -> np.ndarray:
    """The numbers of `published_case`, with larger matrices, so that the next id depends on all ids before it."""
    is_matrix = len(shape) == 2 and not any(table in name for table in ("embed", "wte", "wpe"))
    return case.tensor(name, shape) * np.float32(4 if is_matrix else 1)


def prompts() -> list[list[int]]:
    """Of different lengths."""
    return [case.prompts()[number][:9] for number in (0, 1, 3)]
