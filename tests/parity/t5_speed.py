"""Time T5 small here and with Hugging Face's T5, in turn: a training step, and greedy decoding of eight rows.

`cd tests && python -m parity.t5_speed`

Float32 on the CPU, all cores, no dropout. Training: eight rows of 128 tokens with targets of 29, as the layout `spans`
makes them, with Adafactor, here by `jaxlm.bench` and in PyTorch that of transformers. Decoding: 64 tokens for sources
of 128 with the same random weights; both programs must give the same ids, and the second of two calls counts, after
the compilation.
"""

import tempfile
from functools import partial
from pathlib import Path

import numpy as np

from parity.in_turn import (
    Timed,
    decode_here,
    decode_in_torch,
    in_turn,
    make_parser,
    time_bench,
    time_training,
    use_all_cores,
)

ROWS, SOURCE, TARGET, GENERATED = 8, 128, 29, 64
VOCABULARY, PAD, END = 32_000, 0, 1


def sources() -> list[list[int]]:
    """Return the same random sources in both programs."""
    return np.random.default_rng(0).integers(END + 1, VOCABULARY, (ROWS, SOURCE)).tolist()


def write_model(directory: Path) -> None:
    """Write T5 small with random weights as Hugging Face's files, with a small vocabulary, which no measure reads."""
    import sentencepiece
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(decoder_start_token_id=PAD)  # the library's defaults are the sizes of t5-small
    T5ForConditionalGeneration(config).save_pretrained(directory)
    sentencepiece.SentencePieceTrainer.train(
        input=__file__,
        model_prefix=str(directory / "spiece"),
        vocab_size=200,
        pad_id=PAD,
        eos_id=END,
        unk_id=END + 1,
        bos_id=-1,
        hard_vocab_limit=False,
        minloglevel=2,
    )


def train_in_torch(directory: str, steps: int, warmup: int) -> Timed:
    """Return the seconds of a training step."""
    import torch
    from transformers import T5ForConditionalGeneration
    from transformers.optimization import Adafactor

    use_all_cores()
    model = T5ForConditionalGeneration.from_pretrained(directory).eval()  # no dropout
    optimizer = Adafactor(model.parameters(), lr=0.01, relative_step=False)
    ids, labels = torch.tensor(sources()), torch.tensor(sources())[:, :TARGET].contiguous()
    return time_training(lambda: model(input_ids=ids, labels=labels).loss, optimizer, None, steps, warmup)


def train_here(directory: str, steps: int, warmup: int) -> Timed:
    """Return the seconds of a training step of `jaxlm.bench`."""
    sizes = ["--model.dropout-rate", 0, "--batch-size", ROWS, "--length", SOURCE]
    return time_bench("pretrain/t5_small", *sizes, steps=steps, warmup=warmup)


def generate_in_torch(directory: str, steps: int, warmup: int) -> Timed:
    """Return the seconds of decoding, and the ids."""
    from transformers import T5ForConditionalGeneration

    use_all_cores()
    model = T5ForConditionalGeneration.from_pretrained(directory).eval()
    return decode_in_torch(model, sources(), GENERATED, steps, warmup)


def generate_here(directory: str, steps: int, warmup: int) -> Timed:
    """Return the seconds of decoding, and the ids."""
    from jaxlm.inference.decoding import Prompt

    prompts = [Prompt([PAD], GENERATED, source=source) for source in sources()]
    return decode_here(directory, END, prompts, steps, warmup)


def main() -> None:
    """Print the ratios."""
    arguments = make_parser(__doc__, steps=10, warmup=3).parse_args()
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory))
        in_turn(arguments, "training", partial(train_here, directory), partial(train_in_torch, directory))
        arguments.steps, arguments.warmup = 1, 1  # of decoding
        in_turn(arguments, "decoding", partial(generate_here, directory), partial(generate_in_torch, directory))


if __name__ == "__main__":
    main()
