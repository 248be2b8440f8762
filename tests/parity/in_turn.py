"""The frame of the scripts NAME_speed: a program of jaxlm and one in PyTorch are timed in turn on all cores of the CPU.

Each round is one process of each program. The median of its steps counts, and the script prints the ratio.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any, NamedTuple


class Timed(NamedTuple):
    """Seconds of a step, and the ids that it found, if it decodes."""

    seconds: float
    ids: list[list[int]] | None = None


Program = Callable[[int, int], Timed]  # of the number of steps, and of the steps before them that do not count


def main(doc: str | None, here: Program, in_torch: Program, *, steps: int, warmup: int) -> None:
    """Read the command line, and print the ratios of a training step. The next two functions describe the arguments."""
    in_turn(make_parser(doc, steps=steps, warmup=warmup).parse_args(), "training", here, in_torch)


def make_parser(doc: str | None, *, steps: int, warmup: int) -> argparse.ArgumentParser:
    """Return the command line of a script. doc: its help text. steps, warmup: the defaults of the flags."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rounds", 3), ("steps", steps), ("warmup", warmup)):
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser


def in_turn(arguments: argparse.Namespace, what: str, here: Program, in_torch: Program) -> None:
    """Print the seconds of each round, their ratio, and its median. Programs that decode must find the same ids.

    here, in_torch: functions of a module, which new processes import.
    """
    os.environ |= {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
    ratios = []
    for _ in range(arguments.rounds):
        found = []
        for program in (here, in_torch):
            with get_context("spawn").Pool(1) as pool:
                found.append(pool.apply(program, (arguments.steps, arguments.warmup)))
        ours, theirs = found
        if ours.ids != theirs.ids:
            raise SystemExit("both programs must find the same ids, and they do not")
        ratios.append(theirs.seconds / ours.seconds)
        seconds = f"jaxlm {ours.seconds:.3f} s, torch {theirs.seconds:.3f} s"
        print(f"{what}: {seconds}, speed {ratios[-1]:.2f}", flush=True)
    print(f"{what}: median speed {statistics.median(ratios):.2f}", flush=True)


def time_bench(*words: object, steps: int, warmup: int) -> Timed:
    """Return the median seconds of a step of `jaxlm.bench` with these arguments."""
    from jaxlm.bench import measure, parse
    from jaxlm.distributed.devices import prepare_process

    arguments = parse([str(word) for word in (*words, "--steps", steps, "--warmup", warmup)])
    prepare_process()
    return Timed(float(measure(arguments)["step_seconds"]))


def time_steps(step: Callable[[], object], steps: int, warmup: int) -> Timed:
    """Return the median seconds of a step, which ends when its result is there."""
    seconds = []
    for _ in range(warmup + steps):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    return Timed(statistics.median(seconds[warmup:]))


def time_training(loss: Callable[[], Any], optimizer: Any, clip: float | None, steps: int, warmup: int) -> Timed:
    """Return the median seconds of a training step of PyTorch. clip: the largest norm of the gradient; None: any."""
    import torch

    parameters = [leaf for group in optimizer.param_groups for leaf in group["params"]]

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()

    return time_steps(step, steps, warmup)


def use_all_cores() -> None:
    """Let PyTorch compute on the cores that this process may use."""
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)


def decode_here(directory: str, end: int, prompts: list, steps: int, warmup: int) -> Timed:
    """Return the seconds of greedy decoding with the published files of a directory, and the ids.

    prompts: `Prompt`s, all with the same number of tokens to find. end: the id that does not end them.
    """
    from jaxlm.distributed.mesh import use_mesh
    from jaxlm.inference.decoding import CachedModel
    from jaxlm.inference.loaded_run import load_model
    from jaxlm.inference.strategies import Sampler, Sampling

    run = load_model(f"hf:{directory}")
    length = prompts[0].length
    cached = CachedModel(run.model, run.params, mesh=run.mesh, end=end, min_length=length)
    sampler = Sampler(cached, Sampling(temperature=0.0))
    found: list = []

    def step() -> None:
        found[:] = zip(*([int(i) for i in ids[:, 0]] for ids in sampler(prompts)), strict=True)

    with use_mesh(run.mesh):
        timed = time_steps(step, steps, warmup)
    return Timed(timed.seconds, [list(row) for row in found])


def decode_in_torch(model, inputs: list[list[int]], new: int, steps: int, warmup: int, **settings) -> Timed:
    """Return the seconds of greedy decoding of `new` tokens with a class of transformers, and the last `new` ids."""
    import torch

    ids, found = torch.tensor(inputs), None

    def step() -> None:
        nonlocal found
        with torch.inference_mode():
            found = model.generate(input_ids=ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, **settings)

    timed = time_steps(step, steps, warmup)
    return Timed(timed.seconds, found[:, -new:].tolist())
