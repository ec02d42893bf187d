"""Saves and loads checkpoints of a training run; every rank must call each method."""

from __future__ import annotations

import gc
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.hooks import RemovableHandle

from headway.checkpoint import folders
from headway.checkpoint.schedule import RECORD_FILE, Schedule
from headway.distributed.call_barrier import call_barrier
from headway.distributed.nested import checksum_of
from headway.distributed.world import rank_and_size, require_group
from headway.errors import CheckpointError, Code, UsageError
from headway.ipc.paths import is_absent
from headway.ipc.records import CHECKPOINTS
from headway.ipc.run_contract import is_restart
from headway.ipc.stderr import log_once, named
from headway.ipc.typed import plain
from headway.strategies.compilation import model_has_dtensor
from headway.trackers.project import Folder, ProjectConfiguration
from headway.trackers.tracker_group import RUNS_FILE, TrackedRuns
from headway.training.replicas import note_raw_scheduler, note_unsaved, require_equal
from headway.training.training import Training

if TYPE_CHECKING:
    from headway.checkpoint.background import Background
    from headway.checkpoint.saving import Contents

# modules that import torch.distributed.checkpoint, which is slow, are imported when used


@contextmanager
def _without_gc() -> Iterator[None]:
    """Pause the cyclic garbage collector, which takes a fifth of the time for many parameters."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Checkpointer:
    """Saves the state of a training run to folders, and restores it.

    Args:
        project: how checkpoints are named and how many are kept.
        began_at: start time of the job, in seconds since 1970, for the manifest.
        runs: returns the trackers' runs, which each checkpoint contains.
    """

    def __init__(
        self,
        training: Training,
        project: ProjectConfiguration,
        *,
        began_at: float,
        runs: Callable[[], TrackedRuns],
    ) -> None:
        self.training = training
        self.project = project
        self.has_state = False  # whether this run has saved or loaded a checkpoint
        self._lock: int | None = None  # the project's locked file; rank 0 only
        self._began_at, self._runs = began_at, runs
        self._began_in = _working_folder()
        self._times = folders.SaveTimes()
        self.schedule = Schedule()
        self._save_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self._load_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self._checksums, self._is_compared = list[int](), False  # of registered objects
        self._background: Background | None = None  # created by the first save with wait=False

    def save_state(
        self, output_dir: Folder = None, *, allow_pickle: bool = False, wait: bool = True
    ) -> str:
        """Save a checkpoint and return its folder, which appears once all files are written."""
        target = self._next_folder(output_dir)
        project = self.project
        name = folders.NUMBERED if project.automatic_checkpoint_naming else None
        with self.training.progress.calling("save_state"):
            require_group("save_state(...)")
            call_barrier("save_state(...)")
            self.wait_for_checkpoint()
            with self.training.run.saving_at_end():
                self.save_to(target, allow_pickle, wait=wait, name=name, keep=project.total_limit)
        project.iteration += 1
        return str(target)

    def save_to(
        self,
        target: Path,
        allow_pickle: bool,
        *,
        wait: bool = True,
        name: str | None = None,
        keep: int | None = None,
    ) -> None:
        """Save a checkpoint to `target`.

        If `name` and `keep` are given, rank 0 then removes the checkpoints whose names start with
        `name`, except the newest `keep`.
        """
        from headway.checkpoint.saving import CheckpointProgress, prepare_checkpoint, write_prepared
        from headway.checkpoint.training_state import diverging_buffers

        def then() -> None:
            training.progress.note_output_path(CHECKPOINTS, str(parent))
            if name is not None and keep is not None:
                self._times.prune(parent, keep, name)

        training, parent = self.training, target.absolute().parent
        require_equal(training, "a checkpoint")
        own_buffers = diverging_buffers(training.inner_models)
        hooked: list[list[dict[str, Any]]] = []  # the weights that the hooks have left

        def call_hooks(folder: Path) -> None:
            if self._save_hooks:
                hooked.append(self._call_save_hooks(folder))

        def state(folder: Path) -> Contents:
            weights = hooked[0] if hooked else self._weights()
            return self._state_to_save(folder, weights, own_buffers, allow_pickle)

        with _without_gc():
            prepared = prepare_checkpoint(
                target,
                state,
                CheckpointProgress(training.steps_done, training.epoch, self._began_at),
                self._times,
                begin=call_hooks,
                then=then,
            )
            if not self.has_state:
                note_raw_scheduler(training)
                note_unsaved(training)
            self.has_state = True
            self._compare_objects()
            if wait:
                write_prepared(prepared)
            else:
                from headway.checkpoint.background import Background

                if self._background is None:
                    self._background = Background()
                self._background.start(prepared)

    def _state_to_save(
        self,
        folder: Path,
        weights: list[dict[str, Any]],
        own_buffers: list[Any],
        allow_pickle: bool,
    ) -> Contents:
        from headway.checkpoint.manifest import write_json
        from headway.checkpoint.training_state import state_of

        if self.training.world.is_main:
            write_json(folder / RUNS_FILE, self._runs()._asdict())
            write_json(folder / RECORD_FILE, plain(self.schedule.record()))
            if self.training.is_in_evaluation:
                log_once(
                    "note: the checkpoint was saved during an evaluation; in a run that resumes"
                    " from it, the next loop over the evaluation loader yields only the remaining"
                    " batches. Save before or after the evaluation"
                )
        state = state_of(self.training, weights, own_buffers, allow_pickle=allow_pickle)
        if not self._is_compared:
            self._checksums = []
            with suppress(Exception):  # an unusual tensor
                objects = state.shared["objects"]
                self._checksums = [checksum_of(saved.get("state")) for saved in objects]
        return state

    def _compare_objects(self) -> None:
        """In the first save, log on rank 0 which registered objects differ between ranks."""
        if self._is_compared:
            return
        self._is_compared = True
        ranks = call_barrier("a checkpoint", " ".join(map(str, self._checksums)))
        for number, sums in enumerate(zip(*map(str.split, ranks or ()), strict=False)):
            differ = [rank for rank, checksum in enumerate(sums) if checksum != sums[0]]
            if differ and self.training.world.is_main:
                log_once(
                    f"note: the state of registered object {number}, a"
                    f" {type(self.training.registered[number]).__name__}, differs between"
                    f" {named(differ)} and rank 0: checkpoints contain only rank 0's state, which"
                    " all ranks restore; fix: return the states of all ranks from state_dict():"
                    " gather_object([state])"
                )

    def wait_for_checkpoint(self) -> None:
        """Save a checkpoint if one is due, and wait until the latest checkpoint is written."""
        self.training.run.checkpoint.save()
        if self._background is not None:
            self._background.wait()

    def save_due_at_exit(self) -> None:
        """Unless the script has failed, save a checkpoint if one is due; wait for the write."""
        if getattr(sys, "last_type", None) is None:
            try:
                self.training.run.checkpoint.save()
            except Exception as error:  # noqa: BLE001  any error fails the exit
                from headway.checkpoint.background import fail_at_exit

                fail_at_exit(error)
            if self._background is not None:
                self._background.end()

    def close(self) -> None:
        """Save a checkpoint if one is due, wait for this rank's write, and unlock the project.

        Raises:
            CheckpointError: this rank could not save the checkpoint.
        """
        try:
            self.training.run.checkpoint.save()
            if self._background is not None:
                self._background.close()
        finally:
            lock, self._lock = self._lock, None
            if lock is not None:
                os.close(lock)

    def load_state(
        self, input_dir: Folder = None, *, allow_pickle: bool = False, strict: bool = True
    ) -> None:
        from headway.checkpoint.loading import load_checkpoint
        from headway.checkpoint.saving import agree, on_rank_0
        from headway.checkpoint.training_state import SavedState, parts_of, shard_like

        with _without_gc(), self.training.progress.calling("load_state"):
            call_barrier("load_state(...)")
            self.wait_for_checkpoint()
            given = self._folder_to_load(input_dir)
            # rank 0's folder, as in save_state: some scripts create a temporary folder on each rank
            folder = Path(on_rank_0(lambda: str(given)))
            # after a restart, this launch's own checkpoints are still in the page cache
            launched_at = self._began_at if is_restart() else 0.0
            loaded = load_checkpoint(folder, shard_like(self.training), launched_at=launched_at)
            parts = parts_of(self.training)
            checkpoint = SavedState(loaded, folder, parts, strict=strict, allow_pickle=allow_pickle)
            agree(checkpoint.check)
            models = self.training.inner_models
            agree(lambda: _call(self._load_hooks, models, str(folder)))
            agree(lambda: checkpoint.check_models(models))
            checkpoint.apply(models)
        self.has_state = True
        self.training.progress.step = self.training.steps_done
        project = self.project
        if project.automatic_checkpoint_naming:
            named_in = self.project_folder("load_state")
            project.iteration = max(
                project.iteration, on_rank_0(lambda: folders.next_number(named_in))
            )

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Include these objects' state on rank 0 in checkpoints, and restore it on all ranks."""
        without = [
            f"Item at index {index} ({type(obj).__name__})"
            for index, obj in enumerate(objects)
            if not all(hasattr(obj, name) for name in ("state_dict", "load_state_dict"))
        ]
        if without:
            raise UsageError(
                f"{', '.join(without)}: missing state_dict() or load_state_dict()",
                where="the script's register_for_checkpointing(...)",
                fix="implement both methods",
                code=Code.UNSAVABLE,
            )
        self.training.registered.extend(objects)

    def register_save_state_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        return _register(self._save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        return _register(self._load_hooks, hook)

    def _weights(self) -> list[dict[str, Any]]:
        return [model.state_dict() for model in self.training.inner_models]

    def _call_save_hooks(self, folder: Path) -> list[dict[str, Any]]:
        """Return the weights to save, after the hooks have changed them; a collective call."""
        from headway.checkpoint.saving import agree, on_rank_0

        models, weights = self.training.inner_models, agree(self._weights)

        def require_same_names() -> None:
            if [[*weight] for weight in weights] != saved:
                raise UsageError(
                    "the save_state() hooks kept different weights on this rank than on rank 0, but"
                    " each rank must save its shard of the same weights",
                    where=f"rank {rank_and_size()[0]}",
                    fix="change the hook's list of weights in the same way on every rank",
                    code=Code.MODELS_DIFFER,
                )

        agree(lambda: _call(self._save_hooks, models, weights, str(folder)))
        training = self.training
        if not (training.strategy.shards or any(map(model_has_dtensor, training.models))):
            return weights if self.training.world.is_main else []
        saved = on_rank_0(lambda: [[*weight] for weight in weights])
        agree(require_same_names)
        return weights

    def lock_checkpoints(self, project: Path) -> bool:
        """Lock the checkpoints of `project`; on failure, log once, retry at the next call."""
        if self._lock is None:  # the other run may have ended
            self._lock = folders.lock_project(project)
        return self._lock is not None

    @property
    def project_path(self) -> Path | None:
        """The project folder, the same one after the script has changed the working directory."""
        if self.project.project_dir is None:
            return None
        path = Path(self.project.project_dir).expanduser()
        return path if _working_folder() == self._began_in else self._began_in / path

    def project_folder(self, method: str) -> Path:
        """Return the project folder; if there is none, raise a UsageError that names `method`."""
        folder = self.project_path
        if folder is None:
            raise UsageError(
                f"{method}() needs a project folder for its checkpoints",
                where=f"the script's {method}()",
                fix='pass Accelerator(project_dir="runs/my_run"), one folder per training run',
                code=Code.NO_FOLDER,
            )
        return folder

    def _next_folder(self, output_dir: Folder) -> Path:
        if not self.project.automatic_checkpoint_naming:
            return _given(output_dir, "save_state")
        path, project = self.project_folder("save_state"), self.project
        folder = folders.named_folder(path, folders.NUMBERED, project.iteration)
        is_first = project.iteration == 0 and not self.has_state
        if not is_absent(folder) or (is_first and folders.next_number(path)):
            raise CheckpointError(
                "this run has not loaded the checkpoints of an earlier run, and would replace them",
                where=str(folder.parent),
                fix="resume from them with load_state(), use another project_dir, or set"
                " accelerator.project_configuration.iteration",
                code=Code.CHECKPOINT_EXISTS,
            )
        return folder

    def _folder_to_load(self, input_dir: Folder) -> Path:
        if input_dir is not None or not self.project.automatic_checkpoint_naming:
            return _given(input_dir, "load_state")
        from headway.checkpoint.saving import on_rank_0

        parent = self.project_folder("load_state") / folders.FOLDER
        newest = on_rank_0(lambda: folders.newest_in(parent))
        if newest is None:
            raise CheckpointError(
                "no checkpoint found",
                where=str(parent),
                fix="call save_state() before load_state()",
                code=Code.NO_CHECKPOINT,
            )
        return newest


def _working_folder() -> Path:
    """Return the working directory; an empty path if it was removed."""
    try:
        return Path.cwd()
    except OSError:
        return Path()


def _given(folder: Folder, method: str) -> Path:
    if folder is None:
        raise UsageError(
            f"{method}() needs a folder, because checkpoints are not named automatically",
            where=f"the script's {method}()",
            fix=f"call {method}(folder), or pass Accelerator(project_config=ProjectConfiguration("
            "project_dir=..., automatic_checkpoint_naming=True))",
            code=Code.NO_FOLDER,
        )
    return Path(folder).expanduser()


def _call(hooks: Mapping[int, Callable[..., Any]], *args: Any) -> None:
    for hook in hooks.values():
        hook(*args)


def _register(hooks: OrderedDict[int, Callable[..., Any]], hook: Any) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
