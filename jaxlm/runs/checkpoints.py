"""Checkpoints of one run: the only file that imports Orbax.

A checkpoint is a directory `checkpoints/STEP` of plain data: the arrays as a nested dictionary (the treedef is not
saved, so code that renames an optimizer's tuple still reads old checkpoints) and a JSON description with the config,
`extra`, each leaf's shape, dtype and 32-bit checksum, and a hash of itself. Orbax writes asynchronously and atomically,
but returns corrupted bytes as data, hides a full disk until `wait_until_finished`, and returns False if a newer step
exists; here each of these is an error of one line.

Other names in the directory: `damaged-STEP` (failed its checksums), `superseded-STEP` (newer than the one resumed
from). Every process must see the directory or URL, and must call every method that reads or writes.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import SingleDeviceSharding
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, EveryNSteps, LatestN

from jaxlm.distributed.devices import returning_memory
from jaxlm.distributed.mesh import abstract_leaf
from jaxlm.distributed.processes import first_process_decides, of_every_process
from jaxlm.errors import InputError, RunError, quiet_orbax
from jaxlm.runs.remote import NO_ROOM, failure_reason, free_space, not_a_file, raise_unless_damage
from jaxlm.runs.trees import leaf_checksums, listed, named_leaves, nested_leaves, shape_and_type

PyTree = Any
FORMAT = 1  # of the description; readers reject newer formats
_ARRAYS, _DESCRIPTION = "state", "description"  # Orbax's items: subdirectories of the step
_COMMITTED = "commit_success.txt"  # written last by Orbax on storage without renames
_CHUNK = 2**21  # bytes of a chunk on disk: other shards than the saved ones read only the chunks they need
_READ_AT_ONCE = 2**28  # bytes of temporary host memory, or the size of the largest leaf if that is larger
quiet_orbax()  # if a command runs; it has set up its messages before Orbax was imported
_managers = itertools.count()  # the same in every process, as all open checkpoints in the same order


class DamagedCheckpoint(InputError):
    """Error for corrupted, truncated or missing files of a checkpoint. The message names the step and the leaves."""


@dataclasses.dataclass(frozen=True)
class Metadata:
    """Description of a checkpoint. tree: nested dictionaries of jax.ShapeDtypeStruct without shardings."""

    step: int
    tree: dict
    config: dict
    extra: dict
    checksums: dict[str, int]

    @property
    def weights(self) -> str:
        """The name of the part of the tree to use: the best parameters so far if there are any, else the averaged
        ones, else the parameters."""
        return next((name for name in ("selected", "average") if name in self.tree), "params")


@dataclasses.dataclass(frozen=True)
class Restored:
    """Restored and verified state, its step, and notes: sentences for the log about skipped checkpoints."""

    state: PyTree
    step: int
    config: dict
    extra: dict
    notes: tuple[str, ...] = ()


class Checkpoints:
    """Checkpoints of one run: the newest `keep_newest` and the multiples of `keep_every` are kept.

    read_only: for another run's directory, which may be in use; nothing in it is created, cleaned up or moved.
    write_at_once: number of bytes that a save compresses in memory and writes at a time, at least those of the largest
    leaf. Default: all.
    """

    def __init__(
        self,
        directory: Path | epath.Path,
        *,
        keep_newest: int = 3,
        keep_every: int | None = None,
        read_only: bool = False,
        write_at_once: int | None = None,
    ):
        self.directory = epath.Path(directory if "://" in str(directory) else Path(directory).absolute())
        self.run = str(directory).removesuffix("/checkpoints")
        self.read_only = read_only
        self._manager: _Manager | None = None
        self._saving: _Saving | None = None
        self._finished: list[int] = []
        if not read_only:
            policies = [LatestN(keep_newest)] + ([EveryNSteps(keep_every)] if keep_every else [])
            options = ocp.CheckpointManagerOptions(
                preservation_policy=AnyPreservationPolicy(policies),
                cleanup_tmp_directories=True,  # left by killed saves
                enable_async_checkpointing=True,
                # Two managers of one run may save at the same time: their barriers need different names.
                multiprocessing_options=ocp.options.MultiprocessingOptions(
                    barrier_sync_key_prefix=f"jaxlm{next(_managers)}"
                ),
                lightweight_initialize=True,  # list steps by name only, so that a damaged step does not prevent opening
            )
            handlers = None
            if write_at_once is not None:  # + 1: Orbax rejects a leaf of exactly this size
                arrays = ocp.BasePyTreeCheckpointHandler(save_concurrent_bytes=write_at_once + 1)
                handlers = {
                    _ARRAYS: ocp.PyTreeCheckpointHandler(handler_impl=arrays),
                    _DESCRIPTION: ocp.JsonCheckpointHandler(),
                }
            try:
                self._manager = _Manager(self.directory, options=options, item_handlers=handlers)
            except OSError as error:
                raise InputError(f"{self.directory} cannot hold checkpoints: {error}; choose another --run") from error

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Saving

    def save(self, step: int, state: PyTree, *, config: dict, extra: dict | None = None) -> None:
        """Start a save, and return when the arrays are copied off the devices. It counts once `finished` returns it.

        config, extra: JSON values. Waits for a save in progress. Raises RunError if that one failed or this one is
        rejected.
        """
        if self._manager is None:
            raise ValueError(f"{self.directory} was opened read-only")
        self._collect(wait=True)
        leaves = {name: jnp.asarray(leaf) for name, leaf in named_leaves(state).items()}
        if dotted := [name for name in leaves if "." in name]:
            raise ValueError(
                f"names of leaves must not contain dots, which Orbax uses as separators, got {listed(dotted)}"
            )
        content = {
            "format": FORMAT,
            "step": step,
            "config": config,
            "extra": extra or {},
            "leaves": {name: [list(leaf.shape), str(leaf.dtype)] for name, leaf in leaves.items()},
            "checksums": leaf_checksums(leaves),
        }
        items = ocp.args.Composite(
            **{
                _ARRAYS: ocp.args.PyTreeSave(
                    nested_leaves(leaves),
                    save_args=nested_leaves(dict.fromkeys(leaves, ocp.SaveArgs(chunk_byte_size=_CHUNK))),
                ),
                _DESCRIPTION: ocp.args.JsonSave({"content": content, "sha256": _hash(content)}),
            }
        )
        try:
            accepted = self._manager.save(step, args=items)
        except (OSError, ValueError, RuntimeError) as error:
            raise self._failure(step, error) from error
        if not accepted:
            raise RunError(
                f"{self.directory}: the checkpoint of step {step} was rejected, as step {max(self.steps())} exists; "
                "first move aside the steps that are newer than the one that training resumed from"
            )
        self._saving = _Saving(step, self._manager.wait_until_finished)

    def finished(self) -> list[int]:
        """Return the steps whose saves completed since the last call; does not block, takes about a microsecond.

        Raises RunError if a save failed, for example on a full disk. Processes may see a save finish at different
        steps.
        """
        self._collect(wait=False)
        steps, self._finished = self._finished, []
        return steps

    def wait(self) -> list[int]:
        """Wait for the save in progress, then return `finished`."""
        self._collect(wait=True)
        return self.finished()

    def close(self) -> None:
        """Wait for the save in progress and free the threads. Raises RunError if that save failed."""
        if self._manager is None:
            return
        manager, self._manager = self._manager, None
        try:
            self._collect(wait=True)
        finally:
            try:
                manager.close()
            except (OSError, ValueError, RuntimeError):
                # The same failure again, which Orbax raises once per thread; _collect has reported it.
                logging.getLogger(__name__).debug("closing after a failed save", exc_info=True)

    def _collect(self, *, wait: bool) -> None:
        saving = self._saving
        if saving is None or not (wait or saving.done.is_set()):
            return
        saving.done.wait()
        self._saving = None
        if saving.error is not None:
            raise self._failure(saving.step, saving.error) from saving.error
        if jax.process_index() == 0 and not _is_final(self.directory / str(saving.step)):
            raise self._failure(saving.step, FileNotFoundError("the finished checkpoint is missing"))
        self._finished.append(saving.step)

    def _failure(self, step: int, error: BaseException) -> RunError:
        if jax.process_count() == 1:  # free space on a full disk; with several processes the next start cleans up
            for path in self.directory.glob(f"{step}.*tmp*"):
                with contextlib.suppress(OSError):
                    path.rmtree(missing_ok=True)
        older = [known for known in self.steps() if known < step]
        newest = f"step {older[-1]} is the newest complete one" if older else "there is no older one"
        goes_on = "the same command resumes from there" if older else "the same command begins again"
        reason = failure_reason(error)
        if reason in NO_ROOM:
            why, remedy = f"{reason}{free_space(self.directory)}", "free some space, then"
        elif "ArrayMetadata" in reason or not ("://" in str(self.directory) or self.directory.is_dir()):
            why, remedy = (
                "the directory was changed meanwhile",
                "keep other programs from moving or removing files there, then",
            )
        else:
            why, remedy = reason, "fix the cause, then"
        return RunError(
            f"{self.directory}: the checkpoint of step {step} could not be written: {why}; {newest}; {remedy} {goes_on}"
        )

    # Reading

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, ascending. Raises RunError if the directory cannot be read."""
        try:
            found = [int(path.name) for path in self.directory.iterdir() if path.name.isdecimal() and _is_final(path)]
        except FileNotFoundError:  # not created yet, or of another run that is being removed
            return []
        except Exception as error:  # each storage has its own; a run taken as empty would start from scratch
            raise RunError(f"{self.directory} could not be read: {failure_reason(error)}; try again") from error
        return sorted(found)

    def agreed_steps(self) -> list[int]:
        """Return `steps` as process 0 sees them, on every process, each of which must call this.

        A shared file system may show a directory as it was some seconds ago, so that one process would resume and
        another begin, and each would wait for the other.
        """
        return first_process_decides(self.steps)

    def restore(
        self,
        abstract_state: PyTree | Callable[[Metadata], PyTree],
        *,
        step: int | None = None,
        without: Sequence[str] = (),
    ) -> Restored:
        """Restore and verify the state of `step`, or of the newest intact checkpoint, with given shardings.

        abstract_state: a tree of jax.ShapeDtypeStruct (a leaf without a sharding goes to the first device), or a
        function from the description of a checkpoint to such a tree. Leaves, shapes and dtypes must be those that were
        saved; otherwise an InputError lists the differences. without: parts of the saved tree, entries of its top
        level, that are not read. Without `step`, damaged checkpoints newer than the intact
        one are moved to `damaged-STEP` and named in `notes`.
        Raises DamagedCheckpoint if `step`, or every checkpoint, is damaged (then nothing is moved).
        """
        return self._restore(abstract_state, step, partial=False, without=without)

    def restore_partial(self, abstract_tree: PyTree, *, step: int | None = None) -> Restored:
        """Restore a part of the saved tree, for example `{"params": {…}}`; the other leaves are not read."""
        return self._restore(abstract_tree, step, partial=True)

    def metadata(self, step: int | None = None) -> Metadata:
        """Return the description of `step` (default: the newest intact one), without reading arrays."""
        damage: DamagedCheckpoint | None = None
        for candidate in self._candidates(step):
            try:
                return self._describe(candidate)
            except DamagedCheckpoint as error:
                damage = damage or error
        assert damage is not None
        raise damage

    def move_aside_after(self, step: int) -> list[str]:
        """Move checkpoints newer than `step` to `superseded-STEP`, so that training from `step` can save again.

        Returns sentences for the log. Every process must call this after resuming from `step`.
        """
        newer = [known for known in self.agreed_steps() if known > step]
        moved = self._move_aside(newer, "superseded")
        return [
            f"checkpoint {old} is newer than step {step}, from which training resumes; it was moved to {name}"
            for old, name in moved.items()
        ]

    def _restore(
        self, abstract_tree: PyTree, step: int | None, *, partial: bool, without: Sequence[str] = ()
    ) -> Restored:
        damaged: dict[int, DamagedCheckpoint] = {}
        for candidate in self._candidates(step):
            try:
                description = self._describe(candidate)
                with returning_memory():
                    tree = abstract_tree(description) if callable(abstract_tree) else abstract_tree
                    saved = {name: part for name, part in description.tree.items() if name not in without}
                    state = self._read(dataclasses.replace(description, tree=saved), tree, partial=partial)
            except DamagedCheckpoint as error:
                if step is not None:
                    raise DamagedCheckpoint(f"{error}; checkpoints there: {_words(self.steps())}") from error
                damaged[candidate] = error
                continue
            moved = {} if self.read_only else self._move_aside(list(damaged), "damaged")
            notes = [
                f"{error}; {f'moved to {moved[bad]}' if bad in moved else 'skipped'}, step {candidate} is used"
                for bad, error in damaged.items()
            ]
            return Restored(state, candidate, description.config, description.extra, tuple(notes))
        raise DamagedCheckpoint(
            f"{self.directory}: none of the checkpoints {_words(damaged)} is intact; put one back from a copy, or "
            f"start again in another directory; {next(iter(damaged.values()))}"
        )

    def _candidates(self, step: int | None) -> list[int]:
        """Return the steps to try, newest first, the same on every process."""
        steps = first_process_decides(self.steps)
        if not steps:
            raise InputError(f"{self.directory} has no complete checkpoint; name a run that has saved one")
        if step is not None and step not in steps:
            raise InputError(f"{self.run} has no checkpoint of step {step}; choose one of {_words(steps)}")
        return [step] if step is not None else steps[::-1]

    def _describe(self, step: int) -> Metadata:
        """Return the description of a step, read by process 0, so that all processes use the same."""
        content = first_process_decides(lambda: self._description(step))
        if isinstance(content, str):
            raise DamagedCheckpoint(content)
        if content["format"] > FORMAT:
            raise InputError(
                f"{self.directory / str(step)} must have format {FORMAT} or older, got {content['format']}; "
                "use a newer version of jaxlm"
            )
        structs = {
            name: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for name, (shape, dtype) in content["leaves"].items()
        }
        return Metadata(step, nested_leaves(structs), content["config"], content["extra"], content["checksums"])

    def _description(self, step: int) -> dict | str:
        """Return the content of the JSON item, or a sentence about its damage."""
        path = self.directory / str(step) / _DESCRIPTION
        if (strange := not_a_file(path.parent)) is not None:
            return f"checkpoint {path.parent} is damaged: {strange} is not a regular file"
        try:
            wrapped = ocp.JsonCheckpointHandler().restore(path)
            content = wrapped["content"]
            if wrapped["sha256"] == _hash(content) and content["step"] == step:
                return content
            reason = "its hash does not match its content"
        except Exception as error:  # corrupted bytes lead to many kinds of errors
            raise_unless_damage(path, error)
            reason = failure_reason(error)
        return f"checkpoint {path.parent} is damaged in its description: {reason}"

    def _read(self, description: Metadata, abstract_tree: PyTree, *, partial: bool) -> PyTree:
        wanted = {name: _abstract(leaf) for name, leaf in named_leaves(abstract_tree).items()}
        place = self.directory / str(description.step)
        _check_fit(place, named_leaves(description.tree), wanted, partial=partial)
        names = list(wanted)
        leaves, failed = _read_arrays(place / _ARRAYS, wanted)
        bad = of_every_process(np.array([name in failed for name in names], bool))  # each reads its own shards
        if bad.any():
            named = [names[index] for index in np.flatnonzero(bad.any(axis=0))]
            reason = next(iter(failed.values()), f"process {int(bad.any(axis=1).argmax())} could not read it")
            raise DamagedCheckpoint(f"checkpoint {place} is damaged in {listed(named)}: {reason}")
        checksums = leaf_checksums(leaves)
        if named := [name for name in names if checksums[name] != description.checksums[name]]:
            raise DamagedCheckpoint(f"checkpoint {place} is damaged in {listed(named)}: the checksum does not match")
        return jax.tree.unflatten(jax.tree.structure(abstract_tree), [leaves[name] for name in names])

    def _move_aside(self, steps: Sequence[int], reason: str) -> dict[int, str]:
        if not steps:
            return {}
        if self._manager is None:
            raise ValueError(f"{self.directory} was opened read-only")

        def move() -> list[str]:
            names = []
            for step in steps:
                free = itertools.chain([f"{reason}-{step}"], (f"{reason}-{step}-{n}" for n in itertools.count(2)))
                name = next(name for name in free if not (self.directory / name).exists())
                (self.directory / str(step)).rename(self.directory / name)
                names.append(name)
            return names

        names = first_process_decides(move)
        self._manager.reload()
        return dict(zip(steps, names, strict=True))


class _Manager(ocp.CheckpointManager):
    """Orbax's manager without its calls of the preemption service, which the training loop calls itself."""

    def reached_preemption(self, step: int) -> bool:
        return False


class _Saving:
    """Save in progress. Orbax reports success and failure only to a caller that waits, so a thread waits."""

    def __init__(self, step: int, wait: Callable[[], None]):
        self.step = step
        self.error: Exception | None = None
        self.done = threading.Event()
        self._wait = wait
        threading.Thread(target=self._watch, name=f"checkpoint-{step}", daemon=True).start()

    def _watch(self) -> None:
        try:
            self._wait()
        except Exception as error:  # raised in the loop by `finished`
            self.error = error
        finally:
            self.done.set()


def _read_arrays(
    directory: epath.Path, wanted: dict[str, jax.ShapeDtypeStruct]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the leaves, and a reason for each that cannot be read. No process waits for another here."""
    try:
        return _read_leaves(directory, wanted), {}
    except Exception as error:  # Orbax raises bare Exceptions too
        raise_unless_damage(directory, error)
    failed = {}
    for name, leaf in wanted.items():  # read leaves separately to name the damaged ones
        try:
            _read_leaves(directory, {name: leaf})
        except Exception as error:
            raise_unless_damage(directory, error)
            failed[name] = failure_reason(error)
    return {}, failed or dict.fromkeys(wanted, "readable only at the second attempt")


def _read_leaves(directory: epath.Path, wanted: dict[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
    # The handler instead of the manager: Checkpointer.restore ends in a barrier, where the other processes would wait
    # for one that has failed on a damaged file.
    tree = nested_leaves(wanted)
    restore_args = ocp.checkpoint_utils.construct_restore_args(tree)
    args = ocp.args.PyTreeRestore(tree, restore_args=restore_args, partial_restore=True)
    largest = max((leaf.size * leaf.dtype.itemsize for leaf in wanted.values()), default=0)
    arrays = ocp.BasePyTreeCheckpointHandler(restore_concurrent_bytes=max(_READ_AT_ONCE, largest) + 1)
    leaves = named_leaves(ocp.PyTreeCheckpointHandler(handler_impl=arrays).restore(directory, args=args))
    if missing := wanted.keys() - leaves.keys():
        raise ValueError(f"not in Orbax's metadata: {listed(sorted(missing))}")
    return leaves


def _check_fit(place: epath.Path, saved: dict[str, Any], wanted: dict[str, Any], *, partial: bool) -> None:
    lines = []
    for name in [*wanted, *(name for name in saved if name not in wanted)]:
        if name not in wanted:
            if not partial:
                lines.append(f"- {name} {shape_and_type(saved[name])}")
        elif name not in saved:
            lines.append(f"+ {name} {shape_and_type(wanted[name])}")
        elif (saved[name].shape, saved[name].dtype) != (wanted[name].shape, wanted[name].dtype):
            lines.append(f"- {name} {shape_and_type(saved[name])} + {name} {shape_and_type(wanted[name])}")
    if lines:
        raise InputError(
            f"checkpoint {place} does not match this model (- saved, + wanted): {listed(lines)}; use the config it "
            "was saved with"
        )


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None) or SingleDeviceSharding(jax.local_devices()[0])
    return abstract_leaf(leaf, sharding)


def _hash(content: dict) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, allow_nan=False).encode()).hexdigest()


def _is_final(path: epath.Path) -> bool:
    if "://" in str(path):  # `exists` raises if the server is unreachable, `is_dir` returns False
        return (path / _COMMITTED).exists()
    return path.is_dir() and ocp.utils.is_checkpoint_finalized(path)


def _words(steps: Any) -> str:
    return ", ".join(str(step) for step in steps)
