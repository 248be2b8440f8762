"""Compiled programs of a step, one per batch shape, compiled when first needed and counted."""

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

import jax
from jax.stages import Compiled, Wrapped

from jaxlm.compiler.memory import check_program_memory

log = logging.getLogger(__name__)


class CompiledStep:
    """A jitted step that is compiled once per batch shape. It warns about more shapes than expected.

    on_compile: a context entered during compilation, to exclude that time from the speed.
    """

    def __init__(self, name: str, step: Wrapped, *, expected_shapes: int = 1) -> None:
        self.name, self.step, self.expected_shapes = name, step, expected_shapes
        self.programs: dict[tuple, Compiled] = {}
        self.on_compile: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext

    def __call__(self, state: Any, batch: Any, *settings: Any) -> Any:
        return self.prepare(state, batch, *settings)(state, batch, *settings)

    def prepare(self, state: Any, batch: Any, *settings: Any) -> Compiled:
        """Return the program for batches of this shape, compiled if it is not yet. The arguments may be abstract.

        InputError if the memory of the devices does not suffice.
        """
        shapes = tuple((leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(batch))
        program = self.programs.get(shapes)
        if program is None:
            size = " x ".join(map(str, shapes[0][0]))
            say = log.info if jax.process_index() == 0 else log.debug
            say("compiling the %s step for batch %s, or loading it from the cache", self.name, size)
            started = time.perf_counter()
            with self.on_compile():
                program = self.programs[shapes] = self.step.lower(state, batch, *settings).compile()
            check_program_memory(self.name, program, holds_arguments=isinstance(jax.tree.leaves(state)[0], jax.Array))
            taken = time.perf_counter() - started
            if len(self.programs) > self.expected_shapes:
                log.warning("the %s step compiled again, for batch %s, in %.1f s", self.name, shapes[0][0], taken)
            else:
                say("compiled the %s step for batch %s in %.1f s", self.name, shapes[0][0], taken)
        return program
