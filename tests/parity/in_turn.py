"""The frame of the scripts NAME_speed: a program of jaxlm and one in PyTorch are timed in turn on all cores of the CPU.

Each round is one process of each program. The median of its steps counts, and the script prints the ratio.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from multiprocessing import get_context

Program = Callable[[int, int], float]  # steps and steps before them that do not count -> seconds of a step


def main(doc: str | None, here: Program, in_torch: Program, *, steps: int, warmup: int) -> None:
    """Print the seconds of each round, their ratio, and its median.

    doc: the help text. here, in_torch: functions of a module, which new processes import. steps, warmup: the defaults
    of the flags.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rounds", 3), ("steps", steps), ("warmup", warmup)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    ratios = []
    for _ in range(arguments.rounds):
        seconds = []
        for program in (here, in_torch):
            with get_context("spawn").Pool(1) as pool:
                seconds.append(pool.apply(program, (arguments.steps, arguments.warmup)))
        ours, theirs = seconds
        ratios.append(theirs / ours)
        print(f"jaxlm {ours:.3f} s, torch {theirs:.3f} s, speed {ratios[-1]:.2f}", flush=True)
    print(f"median speed {statistics.median(ratios):.2f}", flush=True)


def time_bench(*words: object, steps: int, warmup: int) -> float:
    """Return the median seconds of a training step of `jaxlm.bench` with these arguments."""
    from jaxlm.bench import measure, parse
    from jaxlm.distributed.devices import prepare_process

    arguments = parse([str(word) for word in (*words, "--steps", steps, "--warmup", warmup)])
    prepare_process()
    return float(measure(arguments)["step_seconds"])


def time_steps(step: Callable[[], None], steps: int, warmup: int) -> float:
    """Return the median seconds of a step, which ends when its result is there."""
    seconds = []
    for _ in range(warmup + steps):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[warmup:])


def use_all_cores() -> None:
    """Let PyTorch compute on the cores that this process may use."""
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
