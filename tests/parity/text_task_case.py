"""The case of the loss of text tasks: a GPT-2 of `published_case`, and rows of a prompt with its target."""

import numpy as np

from parity import generate_case
from parity import published_case as case

NAME, SIZES, SMOOTHING = "gpt2", case.LONG, 0.1
WATCHED = ("transformer.wte.weight", "transformer.wpe.weight")  # Hugging Face's names


def rows() -> list[tuple[list[int], list[int]]]:
    """The ids before a target and those of the target, of different lengths, with ids that repeat."""
    rng = np.random.default_rng(5)
    targets = [rng.integers(1, SIZES.vocabulary, length).tolist() for length in (4, 1, 7)]
    return list(zip(generate_case.prompts(), targets, strict=True))
