"""Time GPT here and with Hugging Face's classes, in turn: a training step, a forward pass, and greedy decoding.

`cd tests && python -m parity.gpt_speed VOCABULARY`, with the directory of GPT-2's `encoder.json` and `vocab.bpe`.

Float32 on the CPU, all cores, no dropout. Training: GPT-1 with 4 rows of 256 tokens, with the norm clipped at 1 and
AdamW, here by `jaxlm.bench`. Forward: the loss of the same rows. Decoding: 64 tokens after 8 prompts of 64 with GPT-2
of 124 M parameters and the same random weights; both programs must give the same ids.
"""

import tempfile
from functools import partial
from pathlib import Path

from parity.in_turn import (
    Timed,
    decode_here,
    decode_in_torch,
    in_turn,
    make_parser,
    time_bench,
    time_steps,
    time_training,
    use_all_cores,
)

ROWS, LENGTH = 4, 256
PROMPTS, PROMPT_LENGTH, GENERATED = 8, 64, 64
BENCH = ("--model", "gpt1", "--batch-size", ROWS, "--length", LENGTH)


def gpt1():
    """Return GPT-1 in PyTorch without dropout, and its rows."""
    import torch
    from transformers import OpenAIGPTConfig, OpenAIGPTLMHeadModel

    use_all_cores()
    config = OpenAIGPTConfig(n_positions=LENGTH)  # the library's defaults are the published sizes
    return OpenAIGPTLMHeadModel(config).eval(), torch.randint(config.vocab_size, (ROWS, LENGTH))


def train_in_torch(steps: int, warmup: int) -> Timed:
    """Return the seconds of a training step."""
    import torch

    model, ids = gpt1()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2.5e-4, weight_decay=0.01)
    return time_training(lambda: model(input_ids=ids, labels=ids).loss, optimizer, 1.0, steps, warmup)


def forward_in_torch(steps: int, warmup: int) -> Timed:
    """Return the seconds of a forward pass with its loss."""
    import torch

    model, ids = gpt1()
    with torch.inference_mode():
        return time_steps(lambda: model(input_ids=ids, labels=ids).loss.item(), steps, warmup)


def train_here(steps: int, warmup: int) -> Timed:
    """Return the seconds of a training step."""
    return time_bench(*BENCH, steps=steps, warmup=warmup)


def forward_here(steps: int, warmup: int) -> Timed:
    """Return the seconds of a forward pass with its loss."""
    return time_bench(*BENCH, "--forward", steps=steps, warmup=warmup)


def prompts() -> list[list[int]]:
    """Return the same random prompts in both programs."""
    import numpy as np

    return np.random.default_rng(0).integers(50_000, size=(PROMPTS, PROMPT_LENGTH)).tolist()


def generate_in_torch(directory: str, steps: int, warmup: int) -> Timed:
    """Return the seconds of decoding, and the ids."""
    from transformers import GPT2LMHeadModel

    use_all_cores()
    model = GPT2LMHeadModel.from_pretrained(directory).eval()
    return decode_in_torch(model, prompts(), GENERATED, steps, warmup, pad_token_id=0)


def generate_here(directory: str, steps: int, warmup: int) -> Timed:
    """Return the seconds of decoding, and the ids."""
    from jaxlm.inference.decoding import Prompt

    return decode_here(directory, 50_256, [Prompt(ids, GENERATED) for ids in prompts()], steps, warmup)


def main() -> None:
    """Print the ratios."""
    from parity.blimp_speed import write_model

    parser = make_parser(__doc__, steps=5, warmup=2)
    parser.add_argument("vocabulary", type=Path)
    arguments = parser.parse_args()
    in_turn(arguments, "training", train_here, train_in_torch)
    in_turn(arguments, "forward", forward_here, forward_in_torch)
    with tempfile.TemporaryDirectory() as directory:
        write_model(arguments.vocabulary, Path(directory))  # the library has the sizes of GPT-2 small
        arguments.steps, arguments.warmup = 1, 1  # of decoding
        programs = (partial(program, directory) for program in (generate_here, generate_in_torch))
        in_turn(arguments, "decoding", *programs)


if __name__ == "__main__":
    main()
