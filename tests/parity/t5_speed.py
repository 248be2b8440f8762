"""Time T5 small here and with Hugging Face's T5, in turn: a training step, and greedy decoding of eight rows.

`cd tests && python -m parity.t5_speed SENTENCEPIECE`, with a SentencePiece file of 32,000 pieces, for example T5's.

Float32 on the CPU, all cores, no dropout. Training: eight rows of 128 tokens with targets of 29, as the layout `spans`
makes them, with Adafactor, here by `jaxlm.bench` and in PyTorch that of transformers. Decoding: 64 tokens for sources
of 128 with the same random weights; both programs must give the same ids, and the second of two calls counts, after
the compilation. Each round is one process of each program.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROWS, SOURCE, TARGET, GENERATED = 8, 128, 29, 64
VOCABULARY, PAD, END = 32_000, 0, 1


def sources() -> list[list[int]]:
    """Return the same random sources in both programs."""
    return np.random.default_rng(0).integers(END + 1, VOCABULARY, (ROWS, SOURCE)).tolist()


def write_model(sentencepiece: Path, directory: Path) -> None:
    """Write T5 small with random weights as Hugging Face's files."""
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(decoder_start_token_id=PAD)  # the library's defaults are the sizes of t5-small
    T5ForConditionalGeneration(config).save_pretrained(directory)
    (directory / "spiece.model").write_bytes(sentencepiece.read_bytes())


def train_in_torch(directory: Path, steps: int, warmup: int) -> dict:
    """Return the median seconds of a training step."""
    import torch
    from transformers import T5ForConditionalGeneration
    from transformers.optimization import Adafactor

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = T5ForConditionalGeneration.from_pretrained(directory).eval()  # no dropout
    optimizer = Adafactor(model.parameters(), lr=0.01, relative_step=False)
    ids, labels = torch.tensor(sources()), torch.tensor(sources())[:, :TARGET].contiguous()
    seconds = []
    for _ in range(warmup + steps):
        started = time.perf_counter()
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - started)
    return {"seconds": statistics.median(seconds[warmup:])}


def train_here(directory: Path, steps: int, warmup: int) -> dict:
    """Return the median seconds of a training step of `jaxlm.bench`."""
    words = ["pretrain/t5_small", "--model.dropout-rate", 0, "--batch-size", ROWS, "--length", SOURCE]
    command = [sys.executable, "-m", "jaxlm.bench", *map(str, words), "--steps", str(steps), "--warmup", str(warmup)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return {"seconds": json.loads(done.stdout.splitlines()[-1])["step_seconds"]}


def generate_in_torch(directory: Path, steps: int, warmup: int) -> dict:
    """Return the seconds of decoding, and the ids."""
    import torch
    from transformers import T5ForConditionalGeneration

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = T5ForConditionalGeneration.from_pretrained(directory).eval()
    ids, seconds, found = torch.tensor(sources()), [], None
    for _ in range(2):
        started = time.perf_counter()
        with torch.inference_mode():
            found = model.generate(input_ids=ids, max_new_tokens=GENERATED, min_new_tokens=GENERATED, do_sample=False)
        seconds.append(time.perf_counter() - started)
    return {"seconds": seconds[-1], "ids": found[:, 1:].tolist()}


def generate_here(directory: Path, steps: int, warmup: int) -> dict:
    """Return the seconds of decoding, and the ids."""
    from jaxlm.distributed.mesh import use_mesh
    from jaxlm.inference.decoding import CachedModel, Prompt
    from jaxlm.inference.loaded_run import load_model
    from jaxlm.inference.strategies import Sampler, Sampling

    run = load_model(f"hf:{directory}")
    cached = CachedModel(run.model, run.params, mesh=run.mesh, end=END, min_length=GENERATED)
    sampler = Sampler(cached, Sampling(temperature=0.0))
    prompts = [Prompt([PAD], GENERATED, source=source) for source in sources()]
    seconds, found = [], None
    with use_mesh(run.mesh):
        for _ in range(2):
            started = time.perf_counter()
            found = np.array([ids[:, 0] for ids in sampler(prompts)]).T
            seconds.append(time.perf_counter() - started)
    return {"seconds": seconds[-1], "ids": found.tolist()}


MEASURES = {
    "training": {"jaxlm": train_here, "torch": train_in_torch},
    "decoding": {"jaxlm": generate_here, "torch": generate_in_torch},
}


def main() -> None:
    """Print the seconds of each round, their ratio, and its median."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sentencepiece", type=Path)
    for name, default in (("rounds", 3), ("steps", 10), ("warmup", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)  # a round in a process of its own
    arguments = parser.parse_args()
    if arguments.one:
        what, program, directory = arguments.one
        print(json.dumps(MEASURES[what][program](Path(directory), arguments.steps, arguments.warmup)))
        return
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as directory:
        write_model(arguments.sentencepiece, Path(directory))
        for what, programs in MEASURES.items():
            ratios = []
            for _ in range(arguments.rounds):
                found = {}
                for program in programs:
                    command = [
                        sys.executable,
                        "-m",
                        "parity.t5_speed",
                        *sys.argv[1:],
                        "--one",
                        what,
                        program,
                        directory,
                    ]
                    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
                    found[program] = json.loads(done.stdout.splitlines()[-1])
                ours, theirs = found["jaxlm"], found["torch"]
                if ours.get("ids") != theirs.get("ids"):
                    raise SystemExit("the ids must be equal, and they differ")
                ratios.append(theirs["seconds"] / ours["seconds"])
                print(
                    f"{what}: jaxlm {ours['seconds']:.3f} s, torch {theirs['seconds']:.3f} s, speed {ratios[-1]:.2f}",
                    flush=True,
                )
            print(f"{what}: median speed {statistics.median(ratios):.2f}", flush=True)


if __name__ == "__main__":
    main()
