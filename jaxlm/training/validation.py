"""The validation of a pretraining run: held-out stores, in rows like those of the training.

Windows are evaluated in windows, packed documents in packed rows and pairs in pairs, at the current length of training:
if a run begins with short rows, the positions after these are not trained until the length changes.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax

from jaxlm.data.phases import Phase, trained_phase
from jaxlm.data.store import Store
from jaxlm.data.versions import DataVersions
from jaxlm.distributed.mesh import host_rows, to_devices
from jaxlm.training.config import PretrainConfig
from jaxlm.training.perplexity import text_notes
from jaxlm.training.pretraining import Pretraining
from jaxlm.training.program import CompiledStep
from jaxlm.training.step import first_carry, make_eval_step


class Validation:
    """The evaluation of parameters on the held-out stores of a run.

    all_phases: those of the run. batch_size: rows per batch, over all processes. notes: descriptions of the data, for
    people.
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
        data = config.data
        self._batches = {
            phase.length: data.validation_rows(
                stores,
                length=phase.length,
                batch_size=batch_size,
                host_rows=host_rows(batch_size, mesh),
                versions=versions,
                masked=config.objective.kind == "masked_lm",
            )
            for phase in all_phases
        }
        evaluate = jax.jit(make_eval_step(pretraining.objective))
        self._step = CompiledStep("evaluation", evaluate, expected_shapes=len(self._batches))
        lengths = ", then ".join(str(phase.length) for phase in all_phases)
        names = ", ".join(str(store.path) for store in stores)
        self.notes = [f"validation: {names} in {data.describe_validation(lengths, stores, versions)}"]
        if pretraining.whole_text:
            self.notes += text_notes(stores[0].tokenizer())

    def __call__(self, step: int, params: Any) -> tuple[dict[str, float], str]:
        """Return the metrics of the parameters after `step` updates, for metrics.jsonl, and a sentence for people."""
        length = trained_phase(step, self._phases).length
        batches: Iterator = (to_devices(batch, self._mesh, self._batch_size) for batch in self._batches[length])
        carry = first_carry(self._pretraining.carry, self._batch_size, self._mesh)
        metrics = self._pretraining.evaluation(self._step, params, batches, self._stores, carry)
        if len(self._batches) == 1:
            return metrics, metrics_sentence(metrics)
        return metrics | {"validation_length": length}, f"{metrics_sentence(metrics)}, in rows of {length}"


def metrics_sentence(metrics: dict[str, float]) -> str:
    """Return the metrics of an evaluation as a sentence for people."""
    loss = f"validation loss {metrics['validation_loss']:.4f}"
    if "perplexity" in metrics:
        return (
            f"{loss}, perplexity {metrics['perplexity']:.2f} per token, {metrics['word_perplexity']:.2f} per word, "
            f"{metrics['bits_per_byte']:.4f} bits per byte"
        )
    names = (name for name in metrics if name != "validation_loss")
    others = (f"{name.removeprefix('validation_').replace('_', ' ')} {metrics[name]:.4f}" for name in names)
    return f"{loss}: {', '.join(others)}"
