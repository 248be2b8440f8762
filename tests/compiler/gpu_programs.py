"""Compile steps for GPUs that are absent, in a process of its own, and print what their programs contain.

`python -m compiler.gpu_programs` with a line of JSON, {NAME: [CONFIG, TOPOLOGY, {FIELD: VALUE}, {ARGUMENT: VALUE}]},
the arguments of `step_of`, on standard input; prints a line of JSON, {NAME: {kernels, callbacks, compare_and_swap,
additions, attention_forward, attention_backward, squares, report}}. A process of its own, as jaxlm hides the plugin
where there is no GPU, and as the options of the GPU's compiler are read once.
"""

import json
import math
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jaxlm
from jaxlm import cuda

cuda.show()
with cuda.quiet():
    import jax

from jaxlm.compiler.gpus import GpuTopology  # noqa: E402
from jaxlm.compiler.targets import target  # noqa: E402
from jaxlm.config import load_config, with_fields  # noqa: E402
from jaxlm.inference.scoring import Scored, Scorer  # noqa: E402
from jaxlm.models import build  # noqa: E402
from jaxlm.training.program import abstract_rows, compile_if_it_fits, make_program  # noqa: E402
from jaxlm.views import aot_report, aot_steps  # noqa: E402

# Newer versions dump the kernels only where the emitter is named.
DUMPED = {} if jax.__version_info__ < (0, 11) else {"xla_dump_emitter_re": ".*"}
CALLBACK = re.compile(r'custom_call_target="[^"]*callback[^"]*"')
COMPARE_AND_SWAP = re.compile(r"atom\S*\.cas\.")
# Calls of cuDNN's attention in a backward pass, in the text of a program.
ATTENTION_FORWARD = re.compile(r'"__cudnn\$fmha\w*Softmax"')
ATTENTION_BACKWARD = re.compile(r'custom_call_target="__cudnn\$fmha\w*Backward"')
ADDITION = re.compile(r"(?:atom|red)\S*\.add\.\S*f32")


@dataclass(frozen=True)
class ScoringStep(aot_steps.DecodingStep):
    """The program that scores texts: one batch of a `Scorer`."""

    def compiled(self, length, mesh, options):
        config, model = self.config, build(self.config.model, self.config.execution)
        form = Scorer(model, mesh=mesh, batch_size=config.batch_size)._form
        lines = [[Scored([1] * length)]] * config.batch_size
        row = form.pad(lines[:1], 1, *form.sizes(lines))

        def lowered():
            params = make_program(self.learner(), config, mesh).abstract.params
            return form.step.lower(params, abstract_rows(row, config.batch_size, mesh))

        return compile_if_it_fits(lowered, mesh, options)


def squares(programs: str, config: Any) -> list[str]:
    """Return the shapes of arrays with a number for each row, head and pair of tokens."""
    sides = (config.length, config.length)
    size = math.prod((config.batch_size, getattr(config.model, "num_heads", 1), *sides))
    shapes = {shape: [int(side) for side in shape.split(",")] for shape in re.findall(r"\[([\d,]+\d)\]", programs)}
    return [shape for shape, found in shapes.items() if math.prod(found) == size and tuple(found[-2:]) == sides]


def compiled(config: str, topology: str, changes: dict, arguments: dict) -> dict:
    """Return what is in the program of a step, and its report."""
    where = target(topology)
    settings = with_fields(load_config(config, object), changes)
    scores = arguments.pop("scores", False)
    step = aot_steps.step_of(settings, given=frozenset(), **arguments)
    if scores:
        step = ScoringStep(step.config)
    with tempfile.TemporaryDirectory() as folder:
        kept = GpuTopology.compiler_options
        options = dict(where.compiler_options) | {"xla_dump_to": folder, "xla_dump_hlo_as_text": True} | DUMPED
        GpuTopology.compiler_options = property(lambda self: options)
        try:
            report = aot_report.report(step, where)
        finally:
            GpuTopology.compiler_options = kept
        kernels = "".join(path.read_text() for path in Path(folder).glob("*.ptx"))
        programs = "".join(path.read_text() for path in Path(folder).glob("*after_optimizations.txt"))
    return {
        "kernels": len(kernels),
        "callbacks": CALLBACK.findall(programs),
        "compare_and_swap": len(COMPARE_AND_SWAP.findall(kernels)),
        "additions": len(ADDITION.findall(kernels)),
        "attention_forward": len(ATTENTION_FORWARD.findall(programs)),
        "attention_backward": len(ATTENTION_BACKWARD.findall(programs)),
        "squares": squares(programs, step.config),
        "report": report,
    }


if __name__ == "__main__":
    assert jaxlm.__version__
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)
    asked = json.loads(sys.stdin.readline())
    print(json.dumps({name: compiled(*arguments) for name, arguments in asked.items()}))
