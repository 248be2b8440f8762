"""Import and export published models: `python -m jaxlm.convert import hf:PATH --run RUN`, `… export RUN --to hf:PATH`.

import creates a run directory from a published model, which serves as the start of other runs. export writes a run as a
directory that Hugging Face's `from_pretrained` loads, with tokenizer and model card. Both directions use every tensor
exactly once. --verify compares with the outputs of the other program.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from jaxlm.atomic_write import write_json
from jaxlm.config import command_line, to_json
from jaxlm.errors import InputError, run_command
from jaxlm.inference.activations import IdRows, activations
from jaxlm.inference.loaded_run import LoadedRun, load_run, published_config, with_columns
from jaxlm.interop.cards import model_card
from jaxlm.interop.export import planned_export, write_export
from jaxlm.interop.published import Published
from jaxlm.interop.sources import read_published
from jaxlm.interop.verify import transformers_installed, verify
from jaxlm.models import build
from jaxlm.runs.checkpoints import Checkpoints
from jaxlm.runs.directory import RunDirectory
from jaxlm.runs.trees import named_leaves, nested_leaves
from jaxlm.tasks import CustomConfig
from jaxlm.text import Case, Tokenizer
from jaxlm.training.config import resolved_json


@dataclass(frozen=True)
class Import:
    """Create a run directory from a published model."""

    source: tyro.conf.Positional[str]
    """Directory of the model's files: hf:PATH, openai:PATH or google:PATH."""
    run: str
    """Run directory to create, local or gs://BUCKET/RUN."""
    verify: bool = False
    """Compare each layer's output with transformers' own, or with the reference output beside the files."""
    unanswerable: bool = False
    """Allow questions without an answer, as in SQuAD 2.0. For models that answer questions."""
    custom: CustomConfig = CustomConfig()
    """Columns of a fine-tuned model's rows, for predict and evaluate. Default: one column `text` or `sentence`."""
    wordpiece_case: Case = "auto"
    """Case of text for a WordPiece vocabulary. cased: upper case and accents are kept. uncased: neither is kept.
    auto: from its tokenizer_config.json, else guessed from the vocabulary."""


@dataclass(frozen=True)
class Export:
    """Write a run as a model directory of Hugging Face."""

    run: tyro.conf.Positional[str]
    """A run: RUN or RUN@STEP."""
    to: str
    """hf:PATH, a directory that does not exist yet."""
    verify: bool = False
    """Compare each layer's output with transformers' own."""


Command = Annotated[Import, tyro.conf.subcommand("import")] | Annotated[Export, tyro.conf.subcommand("export")]
ARGUMENTS = (Command,)


def import_model(arguments: Import) -> None:
    """Read everything, then create the run directory; a model that cannot be read leaves no directory behind."""
    published = with_columns(read_published(arguments.source, arguments.wordpiece_case), arguments.custom)
    if arguments.unanswerable:
        if published.task is None or published.task.kind != "span":
            raise InputError(
                f"--unanswerable must be off for {published.architecture}, which answers no questions; leave it out"
            )
        published = replace(published, task=replace(published.task, no_answer=True))
    if arguments.verify:
        of_hf = arguments.source.startswith("hf:")
        directory = Path(arguments.source.partition(":")[2]).expanduser()
        _verify(published, directory, published.architecture if of_hf else "", published.tokenizer)
    resolved = _resolved(published, arguments.custom)
    count = sum(leaf.size for leaf in published.leaves.values())
    largest = max(leaf.nbytes for leaf in published.leaves.values())
    with RunDirectory(arguments.run) as run:
        run.open(resolved)
        with Checkpoints(run.checkpoints, write_at_once=largest) as checkpoints:
            if checkpoints.steps():
                print(f"{run.name} is complete: {published.name} was imported; nothing to do")
                return
            if published.tokenizer is not None:
                run.save_tokenizer(published.tokenizer)
            if published.task is not None:
                write_json(run.path / "task.json", published.task.to_json(), signed=True)
            run.record_start(started_from=published.name)
            leaves = {}
            while published.leaves:  # one by one, so that memory never holds a second copy of the model
                name, values = published.leaves.popitem()
                leaves[name] = jax.block_until_ready(jnp.asarray(values))
            checkpoints.save(0, {"params": nested_leaves(leaves)}, config=resolved)
            checkpoints.wait()
    print(f"{run.name}: {published.architecture} from {published.name}, {count:,} parameters, {published.dtype}")
    for note in published.notes:
        print(f"  {note}")


def _resolved(published: Published, custom: CustomConfig) -> dict[str, Any]:
    """Return the content of the run's config.json: the model, its origin and, if it is fine-tuned, its task."""
    fingerprints = {
        "tokenizer": None if published.tokenizer is None else published.tokenizer.fingerprint,
        "published": published.fingerprint,
    }
    origin = {
        "published": {
            "architecture": published.architecture,
            "dtype": published.dtype,
            "config": dict(published.config),
        }
    }
    resolved = resolved_json(published_config(published), fingerprints) | origin
    if published.task is None:
        return resolved
    tuned: dict[str, Any] = {"task": "custom", "start": published.name, "seeds": 1, "options": None}
    tuned["custom"] = None if custom == CustomConfig() else to_json(custom)
    return resolved | tuned


def _verify(model: Published | LoadedRun, directory: Path, architecture: str, tokenizer: Tokenizer | None) -> None:
    """Compare with the model in `directory`, and print the table."""
    config = model.model if isinstance(model, Published) else model.model.config
    kind = None if model.task is None else model.task.kind

    def ours(ids: list[list[int]]) -> dict[str, np.ndarray]:
        return activations(config, model.params, kind, IdRows(ids, None))

    for line in verify(directory, architecture, ours, tokenizer, config.vocab_size, build(config).max_length):
        print(line)


def export_run(arguments: Export) -> None:
    """Read the run, choose the class that it is exported as, and write it."""
    kind, _, location = arguments.to.partition(":")
    if kind != "hf" or not location:
        raise InputError(f"--to must be hf:PATH, a directory for Hugging Face's files, got {arguments.to}")
    if arguments.verify and not transformers_installed():
        raise InputError(
            "--verify needs transformers and PyTorch, and nothing was exported; install them "
            "(launch/setup.sh cpu parity), or leave --verify out"
        )
    run = load_run(arguments.run)
    directory = RunDirectory(run.path)
    saved = directory.config.get("published") or {}
    leaves = {name: np.asarray(leaf) for name, leaf in named_leaves(run.params).items()}
    export = planned_export(
        run.model.config, leaves, run.task, architecture=saved.get("architecture"), config=saved.get("config")
    )
    target = Path(location).expanduser()
    longest = run.trained_length if run.task is None else run.config.length
    write_export(
        target,
        export,
        tokenizer=run.given_tokenizer,
        dtype=saved.get("dtype", "F32"),
        longest=longest,
        card=model_card(
            export,
            name=target.name,
            run=run.name,
            config=directory.config,
            directory=directory.path,
            task=run.task,
            tokenizer=run.given_tokenizer,
            longest=longest,
        ),
    )
    print(f"{target}: {export.architecture}, {sum(leaf.size for leaf in export.leaves.values()):,} parameters")
    for note in export.notes:
        print(f"  {note}")
    if arguments.verify:
        _verify(run, target, export.architecture, run.given_tokenizer)


def main() -> None:
    """Run the command."""
    kind: Any = Command  # a union: one subcommand each
    arguments, _ = command_line(kind, program="convert", description=__doc__)
    jax.config.update("jax_platforms", "cpu")  # the only computation is that of checksums
    (import_model if isinstance(arguments, Import) else export_run)(arguments)


if __name__ == "__main__":
    run_command(main)
