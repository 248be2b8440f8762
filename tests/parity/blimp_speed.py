"""Time the scoring of BLiMP's sentences here and with Hugging Face's GPT-2, in turn.

`cd tests && python -m parity.blimp_speed BLIMP VOCABULARY`, with the directory of BLiMP's JSONL files and that of
GPT-2's `encoder.json` and `vocab.bpe`.

GPT-2 with random weights, 4 x 256 with its vocabulary of 50,257, in float32. Each round is one process of each program
on one core, and counts its CPU seconds, which other processes of the machine hardly change, from the loaded model to
the last score: encoding, the compilation of jaxlm, whose cache is off, and the sums of the log-probabilities. PyTorch
sorts the sentences by length and pads each batch to its longest one.
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

BATCH_SIZE = 32


def write_model(vocabulary: Path, directory: Path, **sizes: int) -> None:
    """Write GPT-2 with random weights and its tokenizer as Hugging Face's files. Needs PyTorch."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, GPT2Tokenizer

    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(directory)
    for theirs, name in (("encoder.json", "vocab.json"), ("vocab.bpe", "merges.txt")):
        (directory / name).write_bytes((vocabulary / theirs).read_bytes())
    GPT2Tokenizer(str(directory / "vocab.json"), str(directory / "merges.txt")).save_pretrained(directory)


def write_pairs(blimp: Path, sentences: int, file: Path) -> None:
    """Write pairs with `sentences` sentences in all, of every paradigm alike as far as the number allows."""
    rows = [path.read_text().splitlines() for path in sorted(blimp.glob("*.jsonl"))]
    pairs = [row for group in zip(*rows, strict=True) for row in group][: sentences // 2]
    if 2 * len(pairs) != sentences:
        raise SystemExit(f"--sentences must be even and at most {2 * sum(map(len, rows))}, got {sentences}")
    file.write_text("\n".join(pairs) + "\n")


def score_here(directory: Path, file: Path) -> dict[str, float]:
    """Return the seconds of `evaluate zero-shot`, from the loaded model on, and the sum of the log-probabilities."""
    from jaxlm.distributed.mesh import use_mesh
    from jaxlm.evaluation.arguments import ZeroShotOptions
    from jaxlm.inference.loaded_run import load_model
    from jaxlm.zero_shot import ZERO_SHOT_TASKS
    from jaxlm.zero_shot.model import ZeroShotModel

    run = load_model(f"hf:{directory}")
    with use_mesh(run.mesh):
        model = ZeroShotModel(run.model, run.tokenizer, mesh=run.mesh, batch_size=BATCH_SIZE, show_progress=False)
        model.params = run.params
        started = time.process_time()
        values = list(ZERO_SHOT_TASKS["blimp"].measure(model, file, ZeroShotOptions()))
        seconds = time.process_time() - started
    rows = next(value.rows for value in values if value.rows)
    return {"seconds": seconds, "sum": sum(text.sum for _, pair in rows for text in pair)}


def score_in_torch(directory: Path, file: Path) -> dict[str, float]:
    """Return the seconds of Hugging Face's model and tokenizer, and the sum of the log-probabilities."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.pad_token = tokenizer.eos_token
    started, total = time.process_time(), 0.0
    pairs = [json.loads(line) for line in file.read_text().splitlines()]
    texts = [pair[name] for pair in pairs for name in ("sentence_good", "sentence_bad")]
    rows = sorted(tokenizer(texts)["input_ids"], key=len, reverse=True)
    with torch.inference_mode():
        for begin in range(0, len(rows), BATCH_SIZE):
            batch = tokenizer.pad({"input_ids": rows[begin : begin + BATCH_SIZE]}, return_tensors="pt")
            log_probs = model(**batch).logits[:, :-1].log_softmax(-1)
            scores = log_probs.gather(2, batch["input_ids"][:, 1:, None])[..., 0] * batch["attention_mask"][:, 1:]
            total += float(scores.double().sum())
    return {"seconds": time.process_time() - started, "sum": total}


SCORES = {"jaxlm": score_here, "torch": score_in_torch}


def main() -> None:
    """Print the seconds of each round, their ratio, and its median."""
    if sys.argv[1:2] and sys.argv[1] in SCORES:  # a round in a process of its own
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        print(json.dumps(SCORES[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("blimp", type=Path)
    parser.add_argument("vocabulary", type=Path)
    parser.add_argument("--sentences", type=int, nargs="+", default=[600, 20_000])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        model, pairs = Path(folder, "model"), Path(folder, "pairs.jsonl")
        write_model(arguments.vocabulary, model, n_layer=4, n_embd=256, n_head=4)
        for sentences in arguments.sentences:
            write_pairs(arguments.blimp, sentences, pairs)
            ratios = []
            for _ in range(arguments.rounds):
                found = {}
                for name in SCORES:
                    command = [sys.executable, "-m", "parity.blimp_speed", name, str(model), str(pairs)]
                    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
                    found[name] = json.loads(done.stdout.splitlines()[-1])
                ours, theirs = found["jaxlm"], found["torch"]
                if abs(ours["sum"] - theirs["sum"]) > 1e-5 * abs(theirs["sum"]):
                    raise SystemExit(f"the sums must be equal, got {ours['sum']} here and {theirs['sum']} in PyTorch")
                ratios.append(theirs["seconds"] / ours["seconds"])
                print(
                    f"{sentences:,} sentences: jaxlm {ours['seconds']:.2f} s, torch {theirs['seconds']:.2f} s, speed "
                    f"{ratios[-1]:.2f}",
                    flush=True,
                )
            print(f"{sentences:,} sentences: median speed {statistics.median(ratios):.2f}", flush=True)


if __name__ == "__main__":
    main()
