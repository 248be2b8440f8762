"""A fine-tuning run, from its plan to its results.

The same arguments resume a stopped run, and report when the run is complete.
"""

import logging
from dataclasses import replace

import jax
import numpy as np

from jaxlm.atomic_write import write_json
from jaxlm.compiler.memory import check_batch_memory
from jaxlm.config import to_json
from jaxlm.distributed.agreement import first_process_decides
from jaxlm.distributed.mesh import make_mesh, use_mesh
from jaxlm.distributed.processes import StopSignal
from jaxlm.finetuning.arguments import FinetuneArguments
from jaxlm.finetuning.plan import plan
from jaxlm.finetuning.results import clean_up, keep_best, read_results, refuse_failures, summarize, table, write_results
from jaxlm.finetuning.trial import TrialContext, make_programs
from jaxlm.finetuning.vectorized import run_trials
from jaxlm.models import family_of
from jaxlm.runs.directory import RunDirectory, saved_config
from jaxlm.tasks import encode_split, steps_of_epochs, train_batches
from jaxlm.training.config import check_batches, check_sizes, resolved_json, run_fields
from jaxlm.training.initialization import dropout_notes
from jaxlm.training.trained_length import OF_START, kept_start_length

log = logging.getLogger(__name__)


def finetune(arguments: FinetuneArguments, given: set[str]) -> None:
    """Start or resume a run and train it until it is complete or a signal stops it."""
    stop = StopSignal()
    planned = plan(arguments, given)
    config, task, source = planned.config, planned.task, planned.source
    batch_size = planned.batch_size
    mesh = make_mesh(config.mesh)
    check_batches(config, mesh)
    input_format = family_of(config.model).input_format
    encoded = {
        split: encode_split(task, planned.data, split, planned.tokenizer, planned.length, input_format)
        for split in planned.data.splits
    }
    row = encoded["train"].batch(np.array([0]), planned.length, 1)
    check_batch_memory(row, batch_size)
    check_batch_memory(row, config.eval_batch_size or batch_size, "eval_batch_size")
    num_steps = config.num_steps
    if num_steps is None:
        epochs = config.num_epochs or 0
        num_steps = steps_of_epochs(input_format, encoded["train"], batch_size=batch_size, num_epochs=epochs)
        config = replace(config, num_steps=num_steps)
    chunks = config.execution.loss_chunks
    for length in train_batches(encoded["train"], batch_size=batch_size, seed=0, num_steps=1).lengths:
        check_sizes(length, chunks, config.model)

    run = RunDirectory(arguments.run)
    trials = [(config.seed + number, rate) for rate in planned.rates for number in range(arguments.seeds)]
    resolved = resolved_json(
        config,
        {
            "tokenizer": planned.tokenizer.fingerprint,
            "task_data": planned.data.fingerprint(),
            "start": None if source is None else source.fingerprint,
        },
    ) | {
        "task": task.name,
        "task_dir": arguments.task_dir,
        "custom": to_json(arguments.custom) if task.name == "custom" else None,
        "start": None if source is None else source.name,
        "options": to_json(arguments.options),
        OF_START: kept_start_length(saved_config(arguments.run), None if source is None else source.trained_length),
        "held_out_seed": arguments.held_out_seed,
        "seeds": arguments.seeds,
        "learning_rates": list(planned.rates),
    }
    moved = ("task_dir", "start", "custom.train", "custom.dev", "custom.test")  # the fingerprints cover their contents
    free = (*run_fields(config.optimizer), "members_per_group", *moved)
    changed = run.open(resolved, run_fields=free)
    with run, use_mesh(mesh):
        if (summary := first_process_decides(lambda: read_results(run))) is not None:
            clean_up(run, summary)
            refuse_failures(run, summary)
            if jax.process_index() == 0:
                print(f"{run.name} is complete: results.json has {len(trials)} runs; nothing to do")
            return
        run.save_tokenizer(planned.tokenizer)
        first_process_decides(lambda: write_json(run.path / "task.json", task.to_json(), signed=True))
        run.record_start(started_from=None if source is None else f"parameters of {source.name}", mesh=dict(mesh.shape))
        say = print if jax.process_index() == 0 else lambda *_: None
        for line in planned.data.report():
            say(f"{task.name} {line}")
        truncated = {name: split.truncated for name, split in encoded.items() if split.truncated}
        counts = ", ".join(f"{n} in {name}" for name, n in truncated.items())
        say(f"truncated to {planned.length} tokens: {counts or 'none'}")
        chosen = [said] if (said := config.mesh.describe(mesh)) is not None else []
        for sentence in (*planned.notes, *chosen, *dropout_notes(source, config.model), *config.execution.says()):
            say(sentence)
        for change in changed:
            say(f"changed since the last start: {change}")
        if (warning := config.optimizer.warmup_note(num_steps)) is not None and jax.process_index() == 0:
            log.warning("%s", warning)
        context = TrialContext(
            run, config, resolved, num_steps, batch_size, task, encoded, source, mesh, stop, arguments.keep
        )
        programs = make_programs(context)
        origin = f"{task.name} from scratch" if source is None else f"{task.name} from {source.name}"
        results = run_trials(context, programs, trials, origin)
        summary = summarize(task, results) | {"keep": arguments.keep}
        if "best" in summary:
            keep_best(context, programs, summary)
            first_process_decides(lambda: write_results(context, summary))
            clean_up(run, summary)
            for line in table(task, summary):
                say(line)
        refuse_failures(run, summary)
