"""Modules and flags that have new names: the old ones are explained, or accepted with a notice.

`load_config` names the new place to a config file that imports an old one. `command_line` accepts an old flag.
"""

from collections.abc import Mapping, Sequence

from jaxlm.errors import InputError

MOVED = {
    "jaxlm.agreement": "jaxlm.distributed.agreement",
    "jaxlm.batch": "jaxlm.data.batch",
    "jaxlm.checkpoints": "jaxlm.runs",
    "jaxlm.cloze": "jaxlm.inference.masked_lm_scoring",
    "jaxlm.decoding": "jaxlm.inference.decoding",
    "jaxlm.devices": "jaxlm.distributed.devices",
    "jaxlm.heads": "jaxlm.models.heads",
    "jaxlm.logs": "jaxlm.runs",
    "jaxlm.masking": "jaxlm.objectives.masking",
    "jaxlm.optim": "jaxlm.training.optimizer",
    "jaxlm.output": "jaxlm.atomic_write",
    "jaxlm.reading": "jaxlm.bounded_read",
    "jaxlm.scoring": "jaxlm.inference.scoring",
    "jaxlm.sharding": "jaxlm.distributed.mesh",
    "jaxlm.evaluation.activations": "jaxlm.inference.activations",
    "jaxlm.nn.activation": "jaxlm.nn.pointwise",
    "jaxlm.nn.dropout": "jaxlm.nn.pointwise",
    "jaxlm.nn.norm": "jaxlm.nn.pointwise",
    "jaxlm.nn.stack": "jaxlm.nn.execution",
    "jaxlm.nn.partition": "jaxlm.distributed.partition",
    "jaxlm.training.compiled": "jaxlm.training.program",
    "jaxlm.training.abstract": "jaxlm.training.abstract_inputs",
    "jaxlm.training.fit": "jaxlm.training.memory_fit",
    "jaxlm.training.groups": "jaxlm.finetuning.vectorized",
    "jaxlm.training.labelling": "jaxlm.inference.prediction",
    "jaxlm.training.loaded": "jaxlm.inference.loaded_run",
    "jaxlm.training.members": "jaxlm.finetuning.trial",
    "jaxlm.training.memory": "jaxlm.compiler.memory",
    "jaxlm.training.network": "jaxlm.training.task_model",
    "jaxlm.training.processes": "jaxlm.distributed.processes",
    "jaxlm.training.record": "jaxlm.runs.recorder",
    "jaxlm.training.rehearsal": "jaxlm.views.aot_report",
    "jaxlm.training.remote": "jaxlm.runs.remote",
    "jaxlm.training.run": "jaxlm.runs.directory",
    "jaxlm.training.state": "jaxlm.training.step",
    "jaxlm.training.start": "jaxlm.training.initialization",
    "jaxlm.training.watch": "jaxlm.distributed.watchdog",
    "jaxlm.tasks.answers": "jaxlm.tasks.metrics.answers",
    "jaxlm.tasks.catalogue": "jaxlm.tasks.reading.catalogue",
    "jaxlm.tasks.codah": "jaxlm.tasks.datasets.codah",
    "jaxlm.tasks.encoded": "jaxlm.tasks.batching.encoded_split",
    "jaxlm.tasks.encoder": "jaxlm.tasks.batching.bert_inputs",
    "jaxlm.tasks.encoding": "jaxlm.tasks.batching.encoding",
    "jaxlm.tasks.files": "jaxlm.tasks.reading.files",
    "jaxlm.tasks.glue": "jaxlm.tasks.datasets.glue",
    "jaxlm.tasks.inference": "jaxlm.tasks.datasets.nli",
    "jaxlm.tasks.inputs": "jaxlm.tasks.batching.gpt1_inputs",
    "jaxlm.tasks.loading": "jaxlm.tasks.batching.batches",
    "jaxlm.tasks.ner": "jaxlm.tasks.datasets.ner",
    "jaxlm.tasks.outcome": "jaxlm.tasks.metrics.predicted",
    "jaxlm.tasks.predictions": "jaxlm.tasks.metrics.predictions",
    "jaxlm.tasks.race": "jaxlm.tasks.datasets.race",
    "jaxlm.tasks.rows": "jaxlm.tasks.reading.rows",
    "jaxlm.tasks.snli_counterfactual": "jaxlm.tasks.datasets.snli_counterfactual",
    "jaxlm.tasks.span_scores": "jaxlm.tasks.metrics.span_scores",
    "jaxlm.tasks.spans": "jaxlm.tasks.batching.span_windows",
    "jaxlm.tasks.squad": "jaxlm.tasks.datasets.squad",
    "jaxlm.tasks.stories": "jaxlm.tasks.datasets.stories",
    "jaxlm.tasks.submission": "jaxlm.tasks.metrics.submission",
    "jaxlm.tasks.tagging": "jaxlm.tasks.batching.tagged_rows",
    "jaxlm.tasks.trec": "jaxlm.tasks.datasets.trec",
}

# Flags by their beginning: the rest of the flag stays.
FLAGS = {
    "--masking.": "--objective.masking.",
    "--next-sentence-coefficient": "--objective.next-sentence-coefficient",
    "--samples": "--num-samples",
}

# Flags of Hugging Face's Trainer and of nanoGPT, by field, with the fields that some commands have instead.
ELSEWHERE = {
    "learning_rate": ("optimizer.peak_lr",),
    "lr": ("optimizer.peak_lr",),
    "weight_decay": ("optimizer.weight_decay",),
    "warmup_steps": ("optimizer.warmup",),
    "warmup_ratio": ("optimizer.warmup",),
    "max_steps": ("num_steps",),
    "max_iters": ("num_steps",),
    "num_train_epochs": ("num_epochs",),
    "epochs": ("num_epochs",),
    "per_device_train_batch_size": ("batch_size",),
    "per_device_eval_batch_size": ("eval_batch_size",),
    "gradient_accumulation_steps": ("micro_batches",),
    "max_length": ("length",),
    "max_seq_length": ("length",),
    "block_size": ("length",),
    "model_name_or_path": ("start",),
    "output_dir": ("run", "output"),
    "out_dir": ("run", "output"),
    "max_grad_norm": ("optimizer.clip_norm",),
    "logging_steps": ("log_every",),
    "eval_steps": ("eval_every",),
    "save_steps": ("checkpoint_every",),
    "save_total_limit": ("keep_newest",),
    "bf16": ("execution.dtype",),
    "fp16": ("execution.dtype",),
    "train_file": ("source", "custom.train", "data.store"),
    "validation_file": ("custom.dev", "data.validation"),
    "input": ("source", "data.store"),
    "wandb": ("tracker",),
    "report_to": ("tracker",),
}
# Their flags for the device, which a variable of the environment chooses here for every command.
DEVICE = ("device", "no_cuda", "use_cpu")


def with_new_flags(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return a command line in today's flags, and a notice for each flag that was spelled otherwise."""
    words, notices = [], []
    for word in argv:
        spelled = word.split("=")[0].replace("_", "-")
        old = next((old for old in FLAGS if spelled == old or (old.endswith(".") and spelled.startswith(old))), None)
        if old is not None:
            word = FLAGS[old] + word[len(old) :]
            notices.append(f"{spelled} is now {word.split('=')[0]}")
        words.append(word)
    return words, notices


def refuse_other_names(argv: Sequence[str], names: Mapping[str, str]) -> None:
    """Raise InputError, with our name, for a flag of another program. names: its flags, and ours."""
    for word in argv:
        spelled = word.split("=")[0].replace("_", "-")
        if spelled in names:
            raise InputError(f"{word.split('=')[0]} is not an option; did you mean {names[spelled]}?")
