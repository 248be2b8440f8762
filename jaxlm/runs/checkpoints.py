"""The checkpoints of one run: the only file that knows Orbax.

A checkpoint is a directory `checkpoints/STEP` of plain data: the arrays as a nested dictionary (the treedef is not
kept, so code that renames an optimizer's tuple still reads old checkpoints) and a JSON description with the config,
`extra`, each leaf's shape, dtype and 32-bit checksum, and a hash of itself. Orbax writes asynchronously and atomically,
but returns an altered byte as if it were data, hides a full disk until somebody waits, and answers False when a newer
step is there; here each of these is an error of one line.

Names beside the steps: `damaged-STEP` (did not prove itself), `superseded-STEP` (newer than the one resumed from).
The directory, or URL, must be seen by every process, and every process calls every method that reads or writes.
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

from jaxlm.distributed.agreement import first_process_decides, of_every_process
from jaxlm.distributed.devices import returning_memory
from jaxlm.errors import InputError, RunError
from jaxlm.runs.checksums import leaf_checksums
from jaxlm.runs.storage_errors import failure_reason, free_space, not_a_file, raise_unless_damage
from jaxlm.runs.trees import listed, named_leaves, nested_leaves, shape_and_type

PyTree = Any
FORMAT = 1  # of the description; a reader refuses what is newer
_ARRAYS, _DESCRIPTION = "state", "description"  # Orbax's items, directories below the step
_COMMITTED = "commit_success.txt"  # what Orbax writes last where there are no renames
_CHUNK = 2**21  # bytes on the disk that are read together: other shards than those saved read what they need of them
_READ_AT_ONCE = 2**28  # bytes of host memory beside the arrays, or the largest leaf's if that is more
_managers = itertools.count()  # the same number in every process, as all open their checkpoints in the same order


class DamagedCheckpoint(InputError):
    """A checkpoint whose files are altered, cut or missing. The message names the step and the leaves."""


@dataclasses.dataclass(frozen=True)
class Metadata:
    """What a checkpoint says of itself. tree: nested dictionaries of jax.ShapeDtypeStruct without shardings."""

    step: int
    tree: dict
    config: dict
    extra: dict
    checksums: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Restored:
    """A checked state, the step it is from, and notes: sentences for the log about what was passed over."""

    state: PyTree
    step: int
    config: dict
    extra: dict
    notes: tuple[str, ...] = ()


class Checkpoints:
    """The checkpoints of one run: the newest `keep_newest` and every step that `keep_every` divides are kept.

    read_only: for another run's directory, which may be in use; nothing in it is created, cleaned up or moved.
    write_at_once: the bytes that a save compresses, in memory, and writes at a time, the largest leaf's at least; all
    of them unless given.
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
        self.read_only = read_only
        self._manager: _Manager | None = None
        self._saving: _Saving | None = None
        self._finished: list[int] = []
        if not read_only:
            policies = [LatestN(keep_newest)] + ([EveryNSteps(keep_every)] if keep_every else [])
            options = ocp.CheckpointManagerOptions(
                preservation_policy=AnyPreservationPolicy(policies),
                cleanup_tmp_directories=True,  # a killed save leaves one, for ever
                enable_async_checkpointing=True,
                # Two managers of one run may save at once: their barriers must not meet.
                multiprocessing_options=ocp.options.MultiprocessingOptions(
                    barrier_sync_key_prefix=f"jaxlm{next(_managers)}"
                ),
                lightweight_initialize=True,  # steps by name alone: a damaged step must not keep others from opening
            )
            handlers = None
            if write_at_once is not None:  # Orbax refuses a leaf that takes all of it
                arrays = ocp.BasePyTreeCheckpointHandler(save_concurrent_bytes=write_at_once + 1)
                handlers = {
                    _ARRAYS: ocp.PyTreeCheckpointHandler(handler_impl=arrays),
                    _DESCRIPTION: ocp.JsonCheckpointHandler(),
                }
            try:
                self._manager = _Manager(self.directory, options=options, item_handlers=handlers)
            except OSError as error:
                raise InputError(f"{self.directory}: cannot keep checkpoints there: {error}") from error

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Saving

    def save(self, step: int, state: PyTree, *, config: dict, extra: dict | None = None) -> None:
        """Start to save; returns when the arrays are copied off the devices. The save counts once `finished` says so.

        config and extra: JSON values. Waits for a save that is under way. RunError when that one failed or this one
        is refused.
        """
        if self._manager is None:
            raise ValueError(f"{self.directory} was opened for reading")
        self._collect(wait=True)
        leaves = {name: jnp.asarray(leaf) for name, leaf in named_leaves(state).items()}
        if dotted := [name for name in leaves if "." in name]:
            raise ValueError(f"{listed(dotted)}: Orbax joins names with dots, so a leaf's must not contain one")
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
                f"{self.directory}: the checkpoint of step {step} was refused, as step {max(self.steps())} is there; "
                "move steps newer than the one resumed from aside first"
            )
        self._saving = _Saving(step, self._manager.wait_until_finished)

    def finished(self) -> list[int]:
        """The steps whose saves completed since this was last asked; never blocks, costs about a microsecond.

        RunError (one line) when a save failed, a full disk say. Processes may see a save finish at different steps.
        """
        self._collect(wait=False)
        steps, self._finished = self._finished, []
        return steps

    def wait(self) -> list[int]:
        """Wait for the save that is under way, then as `finished`."""
        self._collect(wait=True)
        return self.finished()

    def close(self) -> None:
        """Wait for the save that is under way and free the threads. RunError when that save failed."""
        if self._manager is None:
            return
        manager, self._manager = self._manager, None
        try:
            self._collect(wait=True)
        finally:
            try:
                manager.close()
            except (OSError, ValueError, RuntimeError):
                # The same failed save again (Orbax raises it once per thread); it was reported by _collect.
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
            raise self._failure(saving.step, FileNotFoundError("the finished checkpoint is not there"))
        self._finished.append(saving.step)

    def _failure(self, step: int, error: BaseException) -> RunError:
        if jax.process_count() == 1:  # give a full disk its space back; otherwise the next start cleans up
            for path in self.directory.glob(f"{step}.*tmp*"):
                with contextlib.suppress(OSError):
                    path.rmtree(missing_ok=True)
        older = [known for known in self.steps() if known < step]
        sound = f"step {older[-1]} is the newest complete one" if older else "there is no older one"
        return RunError(
            f"{self.directory}: the checkpoint of step {step} could not be written: {failure_reason(error)}"
            f"{free_space(self.directory)}; {sound}; make room, then the same command continues from there"
        )

    # Reading

    def steps(self) -> list[int]:
        """The complete checkpoints, ascending, as they are there now. RunError where that cannot be told."""
        try:
            found = [int(path.name) for path in self.directory.iterdir() if path.name.isdecimal() and _is_final(path)]
        except FileNotFoundError:  # not there yet, or another run's that is being removed
            return []
        except Exception as error:  # each storage has its own; a run that seems empty would begin from scratch
            raise RunError(f"{self.directory} could not be read: {failure_reason(error)}; try again") from error
        return sorted(found)

    def restore(self, abstract_state: PyTree | Callable[[Metadata], PyTree], *, step: int | None = None) -> Restored:
        """The whole state of `step`, or of the newest sound one, on the shardings of `abstract_state`, checked.

        abstract_state: a tree of jax.ShapeDtypeStruct (a leaf without a sharding goes to the first device). Leaves,
        shapes and dtypes must be those that were saved; an InputError lists what differs. A function is asked for the
        tree of each checkpoint that is tried, by its description. Without `step`, damaged
        checkpoints newer than the sound one are moved to `damaged-STEP` and named in `notes`.
        DamagedCheckpoint when `step`, or every checkpoint there is, is damaged (then nothing is moved).
        """
        return self._restore(abstract_state, step, partial=False)

    def restore_partial(self, abstract_tree: PyTree, *, step: int | None = None) -> Restored:
        """As `restore`, for a part of the saved tree, `{"params": {…}}` alone say; the other leaves are not read."""
        return self._restore(abstract_tree, step, partial=True)

    def metadata(self, step: int | None = None) -> Metadata:
        """The description of `step` (the newest with a sound one), without reading arrays."""
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

        Returns sentences for the log. To be called after resuming from `step`, by every process.
        """
        newer = first_process_decides(lambda: [known for known in self.steps() if known > step])
        moved = self._move_aside(newer, "superseded")
        return [
            f"checkpoint {old} is newer than step {step} resumed from; moved to {name}" for old, name in moved.items()
        ]

    def _restore(self, abstract_tree: PyTree, step: int | None, *, partial: bool) -> Restored:
        damaged: dict[int, DamagedCheckpoint] = {}
        for candidate in self._candidates(step):
            try:
                description = self._describe(candidate)
                with returning_memory():
                    tree = abstract_tree(description) if callable(abstract_tree) else abstract_tree
                    state = self._read(description, tree, partial=partial)
            except DamagedCheckpoint as error:
                if step is not None:
                    raise DamagedCheckpoint(f"{error}; checkpoints there: {_words(self.steps())}") from error
                damaged[candidate] = error
                continue
            moved = {} if self.read_only else self._move_aside(list(damaged), "damaged")
            notes = [
                f"{error}; {f'moved to {moved[bad]}' if bad in moved else 'passed over'}, step {candidate} is used"
                for bad, error in damaged.items()
            ]
            return Restored(state, candidate, description.config, description.extra, tuple(notes))
        raise DamagedCheckpoint(
            f"{self.directory}: none of the checkpoints {_words(damaged)} is sound; put one back from a copy, or start "
            f"anew in another directory; {next(iter(damaged.values()))}"
        )

    def _candidates(self, step: int | None) -> list[int]:
        """Newest first, the same on every process."""
        steps = first_process_decides(self.steps)
        if not steps:
            raise InputError(f"{self.directory} holds no complete checkpoint; name a run that has saved one")
        if step is not None and step not in steps:
            raise InputError(f"{self.directory} has no checkpoint of step {step}; there are {_words(steps)}")
        return [step] if step is not None else steps[::-1]

    def _describe(self, step: int) -> Metadata:
        """The description of a step: read by process 0, so that all act on the same one."""
        content = first_process_decides(lambda: self._description(step))
        if isinstance(content, str):
            raise DamagedCheckpoint(content)
        if content["format"] > FORMAT:
            raise InputError(
                f"{self.directory / str(step)} has format {content['format']}, this version reads up to {FORMAT}; "
                "use a newer jaxlm"
            )
        structs = {
            name: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for name, (shape, dtype) in content["leaves"].items()
        }
        return Metadata(step, nested_leaves(structs), content["config"], content["extra"], content["checksums"])

    def _description(self, step: int) -> dict | str:
        """The content of the JSON item, or a sentence about its damage."""
        path = self.directory / str(step) / _DESCRIPTION
        if (strange := not_a_file(path.parent)) is not None:
            return f"checkpoint {path.parent} is damaged: {strange} is not a regular file"
        try:
            wrapped = ocp.JsonCheckpointHandler().restore(path)
            content = wrapped["content"]
            if wrapped["sha256"] == _hash(content) and content["step"] == step:
                return content
            reason = "its hash does not fit its content"
        except Exception as error:  # whatever altered bytes lead a JSON reader to
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
        named = [name for name in names if checksums[name] != description.checksums[name]]
        if named:
            raise DamagedCheckpoint(f"checkpoint {place} is damaged in {listed(named)}: altered, by its checksum")
        return jax.tree.unflatten(jax.tree.structure(abstract_tree), [leaves[name] for name in names])

    def _move_aside(self, steps: Sequence[int], reason: str) -> dict[int, str]:
        if not steps:
            return {}
        if self._manager is None:
            raise ValueError(f"{self.directory} was opened for reading")

        def move() -> list[str]:
            names = []
            for step in steps:
                name = f"{reason}-{step}"
                tries = 1
                while (self.directory / name).exists():
                    tries += 1
                    name = f"{reason}-{step}-{tries}"
                (self.directory / str(step)).rename(self.directory / name)
                names.append(name)
            return names

        names = first_process_decides(move)
        self._manager.reload()
        return dict(zip(steps, names, strict=True))


class _Manager(ocp.CheckpointManager):
    """Orbax's manager, which would ask the preemption service about old steps from its thread; the loop asks it."""

    def reached_preemption(self, step: int) -> bool:
        return False


class _Saving:
    """A save under way. Orbax tells of success and failure only to who waits: a thread waits."""

    def __init__(self, step: int, wait: Callable[[], None]):
        self.step = step
        self.error: Exception | None = None
        self.done = threading.Event()
        self._wait = wait
        threading.Thread(target=self._watch, name=f"checkpoint-{step}", daemon=True).start()

    def _watch(self) -> None:
        try:
            self._wait()
        except Exception as error:  # handed to the loop by `finished`
            self.error = error
        finally:
            self.done.set()


def _read_arrays(
    directory: epath.Path, wanted: dict[str, jax.ShapeDtypeStruct]
) -> tuple[dict[str, Any], dict[str, str]]:
    """The leaves, or for those that cannot be read a reason each. No process waits for another here."""
    try:
        return _read_leaves(directory, wanted), {}
    except Exception as error:  # Orbax raises bare Exceptions too
        raise_unless_damage(directory, error)
    failed = {}
    for name, leaf in wanted.items():  # again one by one, to name the damaged ones
        try:
            _read_leaves(directory, {name: leaf})
        except Exception as error:
            raise_unless_damage(directory, error)
            failed[name] = failure_reason(error)
    return {}, failed or dict.fromkeys(wanted, "read only at the second try")


def _read_leaves(directory: epath.Path, wanted: dict[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
    # The handler and not the manager: Checkpointer.restore ends in a barrier, where the other processes would wait
    # for one that met a damaged file.
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
            f"checkpoint {place} does not fit this model (- saved, + asked for): {listed(lines)}; use the config it "
            "was saved with"
        )


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None) or SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _hash(content: dict) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, allow_nan=False).encode()).hexdigest()


def _is_final(path: epath.Path) -> bool:
    if "://" in str(path):  # `exists` raises where the server is away, `is_dir` says no
        return (path / _COMMITTED).exists()
    return path.is_dir() and ocp.utils.is_checkpoint_finalized(path)


def _words(steps: Any) -> str:
    return ", ".join(str(step) for step in steps)
