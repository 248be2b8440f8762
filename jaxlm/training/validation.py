"""The validation of a pretraining run: held-out stores in rows as those it is trained on.

Windows are evaluated in windows, packed documents in packed rows, pairs in pairs, at the length that was trained when
the parameters were made: where a run begins with short rows, positions past these are untrained until it changes.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxlm.data.loader import validation_batches, validation_pairs
from jaxlm.data.phases import Phase, trained_phase
from jaxlm.data.rows import LAYOUTS
from jaxlm.data.store import Store
from jaxlm.data.versions import DataVersions
from jaxlm.distributed.mesh import host_rows, to_devices
from jaxlm.training.compiled import CompiledStep
from jaxlm.training.config import PretrainConfig
from jaxlm.training.perplexity import text_notes
from jaxlm.training.pretraining import Pretraining
from jaxlm.training.state import first_carry
from jaxlm.training.step import make_eval_step


def held_out_rows(
    stores: Sequence[Store],
    config: PretrainConfig,
    length: int,
    versions: DataVersions,
    *,
    batch_size: int,
    host_rows: np.ndarray | None = None,
) -> Sequence[Any]:
    """The stores in rows of `length` as the config's layout has them: each token, or each pair, predicted once.

    In batches of which this process takes `host_rows`. InputError where the stores do not fit the layout.
    """
    data = config.data
    if data.layout == "pairs":
        return validation_pairs(
            stores, data, length=length, batch_size=batch_size, host_rows=host_rows, versions=versions
        )
    return validation_batches(
        stores,
        layout=data.layout,
        length=length,
        batch_size=batch_size,
        host_rows=host_rows,
        versions=versions,
        masked=config.objective.kind == "masked_lm",
    )


class Validation:
    """Evaluates parameters on the held-out stores of a run.

    all_phases: of the run. batch_size: rows of a batch, of all processes. says: what is evaluated on, for people.
    """

    def __init__(
        self,
        stores: Sequence[Store],
        config: PretrainConfig,
        all_phases: Sequence[Phase],
        pretraining: Pretraining,
        mesh: jax.sharding.Mesh,
        *,
        versions: DataVersions,
        batch_size: int,
    ):
        self._stores, self._phases, self._pretraining = stores, all_phases, pretraining
        self._mesh, self._batch_size = mesh, batch_size
        rows, sizes = host_rows(batch_size, mesh), {"batch_size": batch_size}
        self._batches = {
            phase.length: held_out_rows(stores, config, phase.length, versions, host_rows=rows, **sizes)
            for phase in all_phases
        }
        evaluate = jax.jit(make_eval_step(pretraining.objective))
        self._step = CompiledStep("evaluation", evaluate, expected_shapes=len(self._batches))
        lengths = ", then ".join(str(phase.length) for phase in all_phases)
        names = ", ".join(str(store.path) for store in stores)
        bare = config.data.layout == "packed" and not all(versions.begins_documents(store.end) for store in stores)
        self.says = [
            f"validation: {names} in {LAYOUTS[config.data.layout]} of {lengths}"
            + (", the first token of a document is not predicted" if bare else "")
        ]
        if pretraining.whole_text:
            self.says += text_notes(stores[0].tokenizer().kind)

    def __call__(self, step: int, params: Any) -> tuple[dict[str, float], str]:
        """The figures of the parameters after `step` updates, for metrics.jsonl, and the same for people."""
        length = trained_phase(step, self._phases).length
        batches: Iterator = (to_devices(batch, self._mesh, self._batch_size) for batch in self._batches[length])
        carry = first_carry(self._pretraining.carry, self._batch_size, self._mesh)
        figures = self._pretraining.evaluation(self._step, params, batches, self._stores, carry)
        if len(self._batches) == 1:
            return figures, figures_said(figures)
        return figures | {"validation_length": length}, f"{figures_said(figures)}, in rows of {length}"


def figures_said(figures: dict[str, float]) -> str:
    """An evaluation for people."""
    said = f"validation loss {figures['validation_loss']:.4f}"
    if "perplexity" in figures:
        return (
            f"{said}, perplexity {figures['perplexity']:.2f} a token, {figures['word_perplexity']:.2f} a word, "
            f"{figures['bits_per_byte']:.4f} bits a byte"
        )
    names = (name for name in figures if name != "validation_loss")
    others = (f"{name.removeprefix('validation_').replace('_', ' ')} {figures[name]:.4f}" for name in names)
    return f"{said}: {', '.join(others)}"
