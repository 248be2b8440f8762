"""A run opened for reading: its config, parameters and tokenizer, for all commands that use a trained model."""

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlm.config import from_json
from jaxlm.data.config import MEMBERS, DataConfig, Windows, check_order
from jaxlm.distributed.devices import platform
from jaxlm.distributed.mesh import MeshConfig, abstract_leaf, make_mesh, state_shardings
from jaxlm.errors import InputError
from jaxlm.files import read_signed
from jaxlm.inference.arguments import Weights
from jaxlm.inference.decoding import prefix_token
from jaxlm.interop.published import Published
from jaxlm.interop.sources import KINDS, check_run_path, read_published, tokenizer_spec
from jaxlm.models import build, family_of
from jaxlm.models.model import Model
from jaxlm.nn.config import Execution
from jaxlm.objectives.config import OBJECTIVES
from jaxlm.objectives.language_model import CLASSIFIERS
from jaxlm.runs.checkpoints import Checkpoints
from jaxlm.runs.config import completed
from jaxlm.runs.directory import RunDirectory, split_start
from jaxlm.tasks import FORMATS, CustomConfig, Task, TaskData, TaskOptions, read_task, task_from_json
from jaxlm.tasks.custom import with_rows
from jaxlm.tasks.text_to_text import as_text
from jaxlm.text import Tokenizer, load_tokenizer
from jaxlm.training.config import FINETUNING, MAY_DIFFER, FinetuneConfig, PretrainConfig, kind_of_run
from jaxlm.training.start import limited, trained_length
from jaxlm.training.task_model import TaskLearner, make_task_learner

log = logging.getLogger(__name__)
UNBOUNDED_ROW = 512  # tokens of a row of published models without a table of positions, those of T5


@dataclass(frozen=True)
class LoadedRun:
    """A run at one of its checkpoints.

    params: {"backbone": …}, and "head" of a fine-tuned run, on the devices of `mesh`; the average, if the run has one.
    model: the model of `params`, with the run's dtype and attention backend, without rematerialization. task: the task
    of a fine-tuned run, None for a pretrained one. given_tokenizer: None if the run was imported from files without
    one. trained_length: the number of positions that were trained. raw: True if the run has an average, and these are
    not it. step: None of published weights, whose `path` is their specification.
    """

    config: PretrainConfig | FinetuneConfig
    model: Model
    params: Any
    given_tokenizer: Tokenizer | None
    step: int | None
    path: Path | str
    mesh: Mesh
    trained_length: int
    task: Task | None = None
    raw: bool = False

    @property
    def data(self) -> DataConfig:
        """The layout of the rows of pretraining; windows for a fine-tuned run."""
        return self.config.data if isinstance(self.config, PretrainConfig) else Windows()

    @property
    def prefix_ids(self) -> list[int]:
        """The id before a text as in training, as a list; empty if the text's own first token comes first."""
        tokenizer = self.tokenizer
        if self.data.of_documents and "end" not in tokenizer.specials:
            return []
        return prefix_token(tokenizer, finetuned=self.task is not None and self.task.special_tokens == "gpt1")

    def with_prefix(self, ids: Sequence[int]) -> list[int]:
        """Return the ids of a text as the model was trained to read them.

        Rows of documents begin with `prefix_ids`, other rows begin anywhere. A text without tokens begins with
        `prefix_ids` too.
        """
        return [*self.prefix_ids, *ids] if not ids or self.data.of_documents else list(ids)

    def prompt_of(self, ids: Sequence[int]) -> tuple[list[int], Sequence[int]]:
        """Return the tokens that a continuation of a text begins with, and the source that an encoder reads, if any.

        A model of a task whose predictions are texts, and an encoder-decoder, read the text as a source: what follows
        is its target.
        """
        if not (self.model.has_source or (self.task is not None and self.task.generates)):
            return self.with_prefix(ids), ()
        arrange = FORMATS[self.model.family.input_format].arrange_text
        assert arrange is not None  # the model generates
        length, special_tokens = len(ids) + 3, "gpt1" if self.task is None else self.task.special_tokens
        found, _ = arrange(ids, None, self.tokenizer.specials, length, 1, special_tokens=special_tokens)
        return list(found.prompt), found.source

    def positions(self, *, beyond: bool) -> int:
        """Return the number of positions to use: those that were trained, or with `beyond` all of the model."""
        return self.model.max_length if beyond else self.trained_length

    @property
    def limit(self) -> str:
        """A note that a command uses the trained length only."""
        return limited(self.trained_length, self.model.max_length, self.name)

    @property
    def tokenizer(self) -> Tokenizer:
        """The run's tokenizer. InputError without one."""
        if self.given_tokenizer is None:
            raise InputError(
                f"{self.path} has no tokenizer, and text needs one; import it again with the tokenizer's files next to "
                "the weights"
            )
        return self.given_tokenizer

    @property
    def tokenizer_spec(self) -> str:
        """The `--tokenizer` that prepares a text for the model."""
        return tokenizer_spec(str(self.path), self.model.config) or f"store:{self.path}"

    @property
    def name(self) -> str:
        """RUN@STEP, followed by ` (raw)` without the average that the run has, or the name of published weights."""
        return str(self.path) if self.step is None else f"{self.path}@{self.step}{' (raw)' if self.raw else ''}"

    def require_one_text(self, command: str) -> None:
        """Raise InputError, with the command, for a model whose states depend on a source besides the text."""
        if self.model.has_source:
            raise InputError(
                f"{command} must have a model that reads one text, got {self.path}, {self.model.family.title}; use "
                "generate, predict or evaluate task"
            )

    def finetuned_parts(self, command: str) -> tuple[Task, FinetuneConfig, TaskLearner]:
        """Return the task, config and learner of a fine-tuned run. InputError, with the command, for another run."""
        if self.task is None or not isinstance(self.config, FinetuneConfig):
            raise InputError(f"{command} must have a fine-tuned run, got the pretraining run {self.path}; fine-tune it")
        network = make_task_learner(self.config, self.task, for_reading(self.config.execution))
        return self.task, self.config, network

    def require_decoder(self, command: str, remedy: str) -> Model:
        """Return the model of a run that predicts the next token. InputError, with a remedy, for an encoder's."""
        if self.model.family.role not in ("decoder", "encoder_decoder"):
            raise InputError(f"{self.path} is {self.model.family.title}: {command} needs a decoder; {remedy}")
        return self.model


def load_run(path_spec: str | Path, *, mesh: Mesh | None = None, weights: Weights = "average") -> LoadedRun:
    """Open `RUN` (its newest valid checkpoint) or `RUN@STEP`; the parameters go onto `mesh`, by default one device.

    weights: the average of the parameters, or the best ones, if the run has them; raw: the last step's own.

    The directory may be in use: nothing in it is changed. InputError, one line, if it is not a run, has no finished
    checkpoint, or is inconsistent.
    """
    path, step = split_run(path_spec)
    run = RunDirectory(path)
    config = run_config(run)
    task = saved_task(run) if isinstance(config, FinetuneConfig) else None
    checkpoints = Checkpoints(run.checkpoints, read_only=True)
    if not checkpoints.steps():
        verb = "pretrain" if task is None else "finetune"
        raise InputError(
            f"{path} has no finished checkpoint yet: run its python -m jaxlm.{verb} command again, which resumes it"
        )
    # Some published models have no tokenizer, and some have more rows in their token table than the tokenizer has ids.
    tokenizer = None if "published" in run.config and not run.tokenizer.exists() else load_tokenizer(run.tokenizer)
    expected = run.config.get("fingerprints", {}).get("tokenizer")
    if tokenizer is not None and (
        tokenizer.fingerprint != expected if expected is not None else tokenizer.size != config.model.vocab_size
    ):
        raise InputError(f"{path}: its tokenizer is not that of its model; restore the run's own tokenizer directory")
    check_order(run.config, run.name)
    mesh = mesh or one_device()
    model = build(config.model, for_reading(config.execution))
    metadata = checkpoints.metadata(step)
    run.check_config(metadata.config, f"checkpoint {metadata.step}", MAY_DIFFER)
    part = metadata.weights if weights == "average" else "params"
    wanted = {part: abstract_params(config.model, metadata.tree[part], mesh)}
    restored = checkpoints.restore_partial(wanted, step=step)
    for note in restored.notes:
        log.warning("%s", note)
    return LoadedRun(
        config,
        model,
        restored.state[part],
        tokenizer,
        restored.step,
        path,
        mesh,
        trained_length(run, restored.step),
        task,
        raw=part != metadata.weights,
    )


def load_model(
    source: str | Path, *, mesh: Mesh | None = None, custom: CustomConfig | None = None, weights: Weights = "average"
) -> LoadedRun:
    """Open a run, RUN or RUN@STEP, or published weights: hf:DIR, openai:DIR or google:DIR.

    mesh: by default one device. custom: see `load_published`. weights: see `load_run`; published weights have no
    average. Raises as `load_run` and `load_published` do.
    """
    columns = custom or CustomConfig()
    if str(source).startswith(KINDS):
        return load_published(str(source), mesh=mesh or one_device(), custom=columns)
    if columns != CustomConfig():
        raise InputError(f"custom must be left out for {source}, a run, which has its own columns; leave it out")
    return load_run(source, mesh=mesh, weights=weights)


def load_published(spec: str, *, mesh: Mesh, custom: CustomConfig) -> LoadedRun:
    """Read published weights, hf:DIR, openai:DIR or google:DIR, onto `mesh`. Nothing is written.

    custom: columns of the rows of a model with a head. InputError, one line, if the files are damaged or do not fit.
    """
    published = with_columns(read_published(spec), custom)
    config = published_config(published)
    for note in published.notes:
        log.info("%s", note)
    model = build(config.model, for_reading(config.execution))
    params = jax.tree.map(_placed, published.params, abstract_params(config.model, published.params, mesh))
    return LoadedRun(
        config, model, params, published.tokenizer, None, spec, mesh, published.trained_length, published.task
    )


def one_device() -> Mesh:
    """Return the mesh of the first device."""
    return make_mesh(MeshConfig(), jax.devices()[:1])


def _placed(value: np.ndarray, wanted: jax.ShapeDtypeStruct) -> jax.Array:
    """Return a value, equal on every process, with the dtype and the sharding of `wanted`."""
    value = np.asarray(value, wanted.dtype)
    return jax.make_array_from_callback(value.shape, wanted.sharding, lambda index: value[index])


def with_columns(published: Published, custom: CustomConfig) -> Published:
    """Return a published model whose head reads rows with these columns. InputError for a model without a head."""
    if custom == CustomConfig():
        return published
    if published.task is None:
        raise InputError(f"custom: {published.architecture} has no head that reads rows; remove all --custom settings")
    return replace(published, task=with_rows(published.task, custom))


def published_config(published: Published) -> PretrainConfig | FinetuneConfig:
    """Return the config of a run that would have trained a published model."""
    if published.task is not None:
        return FinetuneConfig(published.model, length=published.longest and published.trained_length)
    family = family_of(published.model)
    pretraining: dict[str, Any] = {}
    if objectives := family.objectives(published.model):  # a network over words has none
        pretraining = {"objective": OBJECTIVES[objectives[0]](), "data": MEMBERS[family.layouts[0]]()}
    length = published.trained_length if family.positions is not None else published.longest or UNBOUNDED_ROW
    return PretrainConfig(published.model, length=length, **pretraining)


def split_run(path_spec: str | Path) -> tuple[Path | str, int | None]:
    """Split `RUN` or `RUN@STEP` into a path or URL, and a step. InputError for a missing directory or a bad step."""
    try:
        path, step = split_start(str(path_spec))
    except InputError:
        raise InputError(
            f"{path_spec}: the part after @ is not a step; write RUN@STEP, for example runs/gpt1@2000"
        ) from None
    if isinstance(path, Path):
        check_run_path(path)
    return path, step


def run_config(run: RunDirectory) -> PretrainConfig | FinetuneConfig:
    """Return the config of a run, from its config.json, which also has fingerprints and a fine-tuning's arguments.

    A field that did not exist when the run was made gets the value that describes the behaviour of that time.
    """
    values = completed(run.config)
    kind: type = FinetuneConfig if kind_of_run(values) == FINETUNING else PretrainConfig
    names = {field.name for field in dataclasses.fields(kind)}
    return from_json(kind, {name: value for name, value in values.items() if name in names}, f"{run.name}/config.json")


def saved_task(run: RunDirectory) -> Task:
    """Return the task of a fine-tuning run, with its label mapping."""
    file = run.path / "task.json"
    try:
        return task_from_json(read_signed(file))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{file} cannot be read: {error}; put it back from a copy") from error


def task_data(run: RunDirectory) -> tuple[Task, TaskData]:
    """Read again the rows of a fine-tuning run, from its files where they exist now. The files may have changed."""
    saved = completed(run.config)
    task_dir = saved.get("task_dir") and run.located(saved["task_dir"])
    custom = from_json(CustomConfig, saved["custom"], "custom") if saved.get("custom") else None
    if custom is not None and not task_dir:
        files = {name: run.located(file) for name in ("train", "dev", "test") if (file := getattr(custom, name))}
        custom = dataclasses.replace(custom, **files)  # type: ignore[arg-type]
    options = from_json(TaskOptions, saved["options"], "options") if saved.get("options") else None
    seed = saved.get("held_out_seed", 0)
    task, data = read_task(saved["task"], task_dir, custom, seed=seed, options=options, sample=saved.get("sample"))
    return as_text(task, data) if saved.get("as_text") else (task, data)


def for_reading(execution: Execution) -> Execution:
    """Return the execution for a run's model without training. A TPU reads a run in float16 in its own dtype."""
    dtype = "auto" if execution.dtype == "float16" and platform() == "tpu" else execution.dtype
    return dataclasses.replace(execution, dtype=dtype, remat="none", unroll=Execution.unroll)


def abstract_params(config: Any, saved: dict, mesh: Mesh) -> dict:
    """Return shapes, dtypes and shardings of a run's parameters: the model's own, and the heads that were saved.

    The classifiers of auxiliary losses, which only training uses, are left out.
    """
    boxed = dict(jax.eval_shape(lambda: build(config).init(jax.random.key(0))))
    pooler = family_of(config).pooler
    if pooler not in saved["backbone"]:  # some published encoders have none
        boxed.pop(pooler, None)

    whole = NamedSharding(mesh, PartitionSpec())
    heads = {name: part for name, part in saved.items() if name != "backbone"}
    if CLASSIFIERS in heads.get("head", {}):
        kept = {name: part for name, part in heads["head"].items() if name != CLASSIFIERS}
        heads = {"head": kept} if kept else {}
    return {"backbone": jax.tree.map(abstract_leaf, nn.unbox(boxed), state_shardings(boxed, mesh))} | jax.tree.map(
        lambda leaf: abstract_leaf(leaf, whole), heads
    )
