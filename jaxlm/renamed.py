"""Flags that have new names, which are accepted with a notice, and those of other programs, which are explained."""

from collections.abc import Mapping, Sequence

from jaxlm.errors import InputError

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
