"""Compile steps for GPUs that are absent, in a process of its own, and print what their programs contain.

`python -m compiler.gpu_programs` with a line of JSON, {NAME: [CONFIG, TOPOLOGY, {FIELD: VALUE}]}, on standard input;
prints a line of JSON, {NAME: {kernels, callbacks, compare_and_swap, additions, report}}. A process of its own, as jaxlm
hides the plugin where there is no GPU, and as the options of the GPU's compiler are read once.
"""

import json
import re
import sys
import tempfile
from pathlib import Path

import jaxlm
from jaxlm import cuda

cuda.show()
with cuda.quiet():
    import jax

from jaxlm.compiler.gpus import GpuTopology  # noqa: E402
from jaxlm.compiler.targets import target  # noqa: E402
from jaxlm.config import load_config, with_fields  # noqa: E402
from jaxlm.training.config import PretrainConfig  # noqa: E402
from jaxlm.training.program import with_vocabulary  # noqa: E402
from jaxlm.views import aot_report  # noqa: E402

CALLBACK = re.compile(r'custom_call_target="[^"]*callback[^"]*"')
COMPARE_AND_SWAP = re.compile(r"atom\S*\.cas\.")
ADDITION = re.compile(r"(?:atom|red)\S*\.add\.\S*f32")


def compiled(config: str, topology: str, changes: dict) -> dict:
    """Return what is in the program of a step, and its report."""
    where = target(topology)
    settings = with_vocabulary(with_fields(load_config(config, PretrainConfig), changes))
    with tempfile.TemporaryDirectory() as folder:
        kept = GpuTopology.compiler_options
        options = dict(where.compiler_options) | {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        GpuTopology.compiler_options = property(lambda self: options)
        try:
            report = aot_report.report(settings, where)
        finally:
            GpuTopology.compiler_options = kept
        kernels = "".join(path.read_text() for path in Path(folder).glob("*.ptx"))
        programs = "".join(path.read_text() for path in Path(folder).glob("*after_optimizations.txt"))
    return {
        "kernels": len(kernels),
        "callbacks": CALLBACK.findall(programs),
        "compare_and_swap": len(COMPARE_AND_SWAP.findall(kernels)),
        "additions": len(ADDITION.findall(kernels)),
        "report": report,
    }


if __name__ == "__main__":
    assert jaxlm.__version__
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)
    asked = json.loads(sys.stdin.readline())
    print(json.dumps({name: compiled(*arguments) for name, arguments in asked.items()}))
