"""Saves periodic checkpoints, stops gracefully on preemption, and resumes."""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import dropwhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn, TypeVar

from headway.checkpoint.checkpointer import Checkpointer
from headway.checkpoint.folders import (
    STEP,
    Candidate,
    candidates,
    named_folder,
    newest_complete,
    note_unwritable,
    remove_leftovers,
    resolve_checkpoint,
)
from headway.checkpoint.manifest import read_json, read_manifest, unusable
from headway.checkpoint.schedule import RECORD_FILE, Interval, TrainingRecord, interval_of
from headway.checkpoint.stopping import Agreement, StopRequest, StopSignals, log_stopped
from headway.distributed.call_barrier import call_barrier
from headway.errors import CheckpointError, Code, UsageError
from headway.history import process_record
from headway.ipc.paths import is_absent
from headway.ipc.progress import Progress
from headway.ipc.run_contract import LATEST, NEWEST, RunContract, is_restart
from headway.ipc.stderr import log
from headway.ipc.typed import read
from headway.trackers.tracker_group import RUNS_FILE, TrackedRuns, Tracking
from headway.training.arguments import CALL

T = TypeVar("T")

_KEEP = 2
"""The number of checkpoints that `checkpoint()` keeps by default; see `total_limit`."""


class _Position(NamedTuple):
    epoch: int = 0
    step: int = 0
    samples: int = 0
    checkpoint: str | None = None


class ResumedRun(_Position):
    """The position from which training resumes; all counts are 0 for a fresh start.

    Args:
        epoch: the number of the epoch to resume or start. If the checkpoint was saved outside of
            loops, reading it before the first training step restores the states of the random
            number generators, so read it where the loop over epochs begins.
        step: number of completed optimizer steps.
        samples: number of samples that all ranks together have trained on, including those of
            earlier epochs. Batches of unknown size are not counted.
        checkpoint: the folder that was loaded; None for a fresh start.
    """

    _begin: Callable[[], object] = bool
    _count: Callable[[int], Iterator[int]]

    @property
    def epoch(self) -> int:
        self._begin()
        return self[0]

    def epochs(self, total: int) -> Iterator[int]:
        """Yield the numbers of the remaining epochs, from the resumed epoch to `total` - 1.

        Use this if an epoch loops over several loaders: in the resumed epoch, finished loops are
        empty, and the interrupted loop continues. With one loader, use `range(run.epoch, total)`.

        Args:
            total: number of epochs to train, including epochs that are already completed.

        Examples:
            >>> import torch
            >>> from headway import Accelerator
            >>> accelerator = Accelerator(cpu=True, project_dir="runs/phases")
            >>> loader = accelerator.prepare(torch.utils.data.DataLoader(range(4), batch_size=2))
            >>> run = accelerator.resume()
            >>> [[epoch, *map(len, loader)] for epoch in run.epochs(2)]
            [[0, 2, 2], [1, 2, 2]]
        """
        return self._count(total)


class Preemption:
    """Saves before the deadline, exits after the same step on all ranks, and resumes later.

    Stop signals are trapped from the first use of `checkpoint()` or `should_stop` until
    `release()`. Before the process exits, `end` is called to finish the training run.
    """

    def __init__(
        self,
        checkpoints: Checkpointer,
        tracking: Tracking,
        settings: RunContract,
        end: Callable[[], None],
    ) -> None:
        self._checkpoints, self._training = checkpoints, checkpoints.training
        self._tracking, self._settings, self._end = tracking, settings, end
        self._deadline = settings.deadline()
        self._schedule = checkpoints.schedule
        self._every: int | str | None = None  # argument of the last `checkpoint()`
        self._interval = Interval()  # parsed from `_every`
        self._signals: StopSignals | None = None  # set by the first `checkpoint()` or `should_stop`
        self._request = StopRequest.NONE  # agreed on by all ranks
        # until the first `checkpoint()` with `every`, a step at which any save is due
        self._optimizers: Any = (SimpleNamespace(step_count=sys.maxsize),)
        self._resumed_with: int | None = None  # number of objects prepared before `resume`
        self._exit_code: int | None = None  # set once this process is exiting
        self._at_end: Callable[[], object] = bool  # exit hook that saves if a save is due
        self._report: Callable[[], object] = bool  # exit hook of a resumed run
        device = self._training.world.device
        self._by_steps, self._by_calls = Agreement(device), Agreement(device)

    def checkpoint(
        self, every: int | str | None = None, *, allow_pickle: bool = False, wait: bool = True
    ) -> str | None:
        if every is not self._every:
            self._interval, self._every = interval_of(every), every
        due = self._training.run.checkpoint
        if every is not None and due.action is None:
            check_at = self._schedule.check_at
            for optimizer in self._optimizers:
                if optimizer.step_count >= check_at:
                    break
            else:
                if due.requests:
                    due.update_leader()
                return None
        with self._training.progress.calling("checkpoint"):
            return self._checkpoint_now(every, allow_pickle, wait)

    @property
    def should_stop(self) -> bool:
        if not self._by_calls.is_near:
            return self._by_calls.ask(StopRequest.NONE) is not StopRequest.NONE
        if self._request is StopRequest.NONE and not self._training.accumulation.is_open:
            with self._training.progress.calling("should_stop"):
                call_barrier("should_stop")
                self._record_request(self._by_calls.ask(self._trap_signals().request))
        return self._request is not StopRequest.NONE

    def resume(self, *, fall_back: bool = False, allow_pickle: bool = False) -> ResumedRun:
        from headway.checkpoint.saving import on_rank_0

        project = self._checkpoints.project_folder("resume")
        call_barrier("resume()")
        self._checkpoints.wait_for_checkpoint()  # otherwise its unfinished folder would be removed
        training = self._training
        self._resumed_with = training.num_objects
        training.progress.note_use(resuming=True)
        self._require_positions()
        with self._training.progress.calling("resume"):
            path, lines = on_rank_0(lambda: _select_checkpoint(self._settings, project, fall_back))
        if path is not None:
            self._load(Path(path), project, allow_pickle)
        loader, step = training.loader, training.steps_done
        self._schedule.saved(step)
        self._by_steps.begin(step)
        run = ResumedRun(step=step, checkpoint=path)
        if path is not None and loader is not None:
            epoch = loader.epoch if training.run.epoch is None else training.run.epoch
            run = ResumedRun(epoch, step, loader.epochs.samples, path)
        training.run.await_epochs()
        if training.world.is_main:
            start = f"resuming from {path} (epoch {run[0]}, step {step})"
            if path is None:
                start = f"starting from the beginning: no checkpoint in {project}"
            for line in (*lines, start):
                log(line)
            if self._checkpoints.lock_checkpoints(project.absolute()):
                remove_leftovers(project)
            note_unwritable(project.absolute())
            self._report_at_end(path)
        is_unknown = step and training.run.epoch is None and not training.has_trained_epochs

        def begin() -> None:
            if is_unknown:
                training.run.report(_NO_EPOCH)
            training.run.begin_epochs()

        vars(run).update(_count=training.count_epochs, _begin=begin)
        return run

    def _report_at_end(self, path: str | None) -> None:
        """Register an exit hook that logs a note if the resumed run did not train."""
        atexit.unregister(self._report)
        if path is not None and self._training.optimizers:
            progress = self._training.progress
            report = partial(_log_if_untrained, progress, progress.num_trained, path)
            self._report = atexit.register(report)

    def _load(self, path: Path, project: Path, allow_pickle: bool) -> None:
        from headway.checkpoint.saving import on_rank_0

        try:
            runs, record = on_rank_0(lambda: _read_records(path))
            self._checkpoints.load_state(path, allow_pickle=allow_pickle)
        except CheckpointError as error:
            _explain_damage(error, path, project)
            raise
        self._tracking.continue_runs(runs)
        self._schedule.resume(record)

    def release(self) -> None:
        """Restore the previous signal handlers; call this after the last checkpoint is written."""
        atexit.unregister(self._at_end)
        self._report()
        atexit.unregister(self._report)
        if self._signals is not None:
            received = self._signals.request
            is_unheard = self._request is StopRequest.NONE and received > StopRequest.TIME_LIMIT
            if is_unheard and self._training.world.is_main:
                log(f"{received} arrived after the last checkpoint(); the training is complete")
            self._signals.release()

    # ------------------------------------------------------------------ saving

    def _checkpoint_now(
        self, every: int | str | None, allow_pickle: bool, wait: bool
    ) -> str | None:
        if self._exit_code is not None:  # the script has caught SystemExit
            raise SystemExit(self._exit_code)
        if self._signals is None:
            self._checkpoints.project_folder("checkpoint")  # raises an error if there is none
            call_barrier("checkpoint(...)")
            self._trap_signals()
        if every is not None and self._training.accumulation.is_open:
            return None
        call_barrier("checkpoint(...)")
        self._require_prepared_before()
        self._optimizers = self._training.optimizers
        if every is not None and not self._optimizers:
            raise UsageError(
                "checkpoint(every=...) saves between optimizer steps, but no optimizer is prepared",
                where=f"the script's checkpoint(every={every!r})",
                fix="prepare the optimizer, or check accelerator.should_stop and call checkpoint()",
                code=Code.NOT_PREPARED,
            )
        step = self._training.steps_done
        is_due, due = self._is_due(step), self._training.run.checkpoint
        if not (is_due or self._request is not StopRequest.NONE or due.action is not None):
            return None
        take = partial(self._save_and_stop, allow_pickle, wait)
        self._schedule.saved(step)
        if due.schedule(take, is_last=self._request is not StopRequest.NONE):
            atexit.unregister(self._at_end)
            self._at_end = self._checkpoints.save_due_at_exit
            atexit.register(self._at_end)  # also keeps the Accelerator of a function that returned
            return str(named_folder(self._checkpoints.project_folder("checkpoint"), STEP, step))
        return take()

    def _save_and_stop(self, allow_pickle: bool, wait: bool) -> str:
        must_stop, step = self._request is not StopRequest.NONE, self._training.steps_done
        began_at = time.monotonic()
        atexit.unregister(self._at_end)
        with self._training.accumulation.uncounted():
            with self._training.progress.calling("checkpoint"):
                folder = self._save_step(step, allow_pickle, wait or must_stop)
            self._schedule.note_cost(time.monotonic() - began_at)
            if must_stop:
                self._exit(folder, step)
        return folder

    def _is_due(self, step: int) -> bool:
        """Return whether a save is due at this step, and schedule the next check."""
        interval, schedule = self._interval, self._schedule
        is_due = schedule.is_due(interval, step)
        if self._request is StopRequest.NONE and (is_due or step >= self._by_steps.next_at):
            due_in_s, asked = schedule.due_in_s(interval), self._trap_signals().request
            request, is_late = self._by_steps.agree(step, asked, due_in_s=due_in_s)
            self._record_request(request)
            is_due |= is_late
        schedule.schedule_check(interval, step, self._by_steps.next_at)
        return is_due

    def _save_step(self, step: int, allow_pickle: bool, wait: bool) -> str:
        project = self._checkpoints.project_folder("checkpoint")
        folder = named_folder(project, STEP, step)
        keep = self._checkpoints.project.total_limit or _KEEP
        self._wait_for_earlier()
        if self._training.world.is_main:
            with suppress(OSError):  # the save reports the error
                project.mkdir(parents=True, exist_ok=True)
            self._checkpoints.lock_checkpoints(project.absolute())
        self._checkpoints.save_to(folder, allow_pickle, wait=wait, name=STEP, keep=keep)
        return str(folder)

    def _wait_for_earlier(self) -> None:
        """Wait until the earlier checkpoint is written; if the job must stop, only log failures."""
        try:
            self._checkpoints.wait_for_checkpoint()
        except CheckpointError as error:
            if self._request is StopRequest.NONE:
                raise
            if self._training.world.is_main:
                log(str(error))

    # ------------------------------------------------------------------ stopping

    def _trap_signals(self) -> StopSignals:
        if self._signals is None:
            if self._resumed_with is None:
                self._require_resumed()
                self._schedule.saved(0)
            self._signals = StopSignals(self._training.progress, self._deadline)
            self._signals.trap()
            self._training.progress.may_be_killed = self._signals.may_be_killed
            self._training.progress.note_use(resuming=True)
        return self._signals

    def _record_request(self, request: StopRequest) -> None:
        self._request = request
        if request is not StopRequest.NONE:
            self._schedule.check_at = 0  # check at the next call
            self._schedule.note_stop()

    def _exit(self, folder: str, step: int) -> NoReturn:
        signals = self._trap_signals()
        self._exit_code = signals.exit_code(self._request)
        self._schedule.check_at = 0  # check at the next call
        log_stopped(self._request, step, folder, self._resume_hint())
        self._signals = None
        atexit.unregister(self._report)
        self._report = bool
        signals.leave()
        self._end()
        process_record.mark_ended(self._exit_code)
        raise SystemExit(self._exit_code)

    def _resume_hint(self) -> str:
        settings = self._settings
        if settings.resume in (None, *NEWEST):
            return "run the same command again to resume"
        return (
            f"to resume, run the same command again without resume={settings.resume}"
            f" ({settings.origins.get('resume', CALL)})"
        )

    # ------------------------------------------------------------------ checks

    def _require_resumed(self) -> None:
        """Raise CheckpointError if this run would replace the checkpoints of an earlier run."""
        from headway.checkpoint.saving import on_rank_0

        project = self._checkpoints.project_path
        if project is None or self._checkpoints.has_state:
            return
        found = on_rank_0(lambda: [str(candidate.path) for candidate in candidates(project)[-1:]])
        if found:
            raise CheckpointError(
                "the project folder has checkpoints of an earlier run; this run did not resume from"
                " them, and would replace them",
                where=found[0],
                fix="call accelerator.resume() after prepare() to resume from them, or pass another"
                " project_dir",
                code=Code.CHECKPOINT_EXISTS,
            )

    def _require_positions(self) -> None:
        if len(self._training.all_loaders) > len(self._training.loaders):
            raise UsageError(
                "a headway.compat loader cannot resume within an epoch",
                where="the script's resume()",
                fix="use `from headway import Accelerator`; or call load_state() instead of"
                " resume(), and skip_first_batches() in the interrupted epoch",
                code=Code.UNSUPPORTED,
            )

    def _require_prepared_before(self) -> None:
        num_objects = self._training.num_objects
        num_later = 0 if self._resumed_with is None else num_objects - self._resumed_with
        if num_later > 0:
            raise UsageError(
                f"{num_later} objects were prepared or registered after resume(), so their saved"
                " state was not loaded",
                where="the script's resume()",
                fix="call accelerator.resume() after every prepare() and"
                " register_for_checkpointing(); loaders that are created later and need no position"
                " in checkpoints can be prepared by another Accelerator()",
                code=Code.NOT_PREPARED,
            )


_NO_EPOCH = (
    "note: run.epoch is 0 and the run does not resume within its data, because no prepared loader"
    " was used in training before the checkpoint. Pass the loader to prepare()"
)


def _log_if_untrained(progress: Progress, num_trained: int, path: str) -> None:
    """Log a note if a resumed run finishes successfully without taking an optimizer step."""
    has_failed = getattr(sys, "last_type", None) or sys.exc_info()[0]
    if progress.num_trained == num_trained and not has_failed:
        log(f"note: nothing was left to train: no optimizer has stepped since resuming from {path}")


def _select_checkpoint(
    settings: RunContract, project: Path, fall_back: bool
) -> tuple[str | None, list[str]]:
    """Return the checkpoint to resume from (None for a fresh start), and the lines to log.

    With `fall_back`, damaged checkpoints are skipped, and a line reports each of them.
    """
    wanted, there = settings.resume, candidates(project)
    found = there
    if wanted is not None and wanted not in NEWEST:
        found = _saved_before_restart(settings, there)
        if not found:
            path = resolve_checkpoint(Path(wanted).expanduser())
            read_manifest(path)
            return str(path), []
    if not found:
        if wanted == LATEST:
            raise CheckpointError(
                "no checkpoint to resume from",
                where=f"{project}, requested by {settings.origins.get('resume', CALL)}",
                fix="do not set resume: accelerator.resume() then resumes from the newest"
                " checkpoint or, if there is none, starts from the beginning",
                code=Code.NO_CHECKPOINT,
            )
        return None, []
    if not fall_back:
        return str(found[-1].path), []
    complete, errors = newest_complete(found)
    if complete is None and candidates(project) != there:  # removed by another run
        return _select_checkpoint(settings, project, fall_back)
    if complete is None:
        raise CheckpointError(
            f"all {len(found)} checkpoints are damaged: {'; '.join(errors)}",
            where=str(project),
            fix="move them elsewhere to start from the beginning",
            code=Code.DAMAGED,
        )
    return str(complete), [f"skipped: {error}" for error in errors]


def _read_records(folder: Path) -> tuple[TrackedRuns, TrainingRecord]:
    return _read(TrackedRuns, folder / RUNS_FILE), _read(TrainingRecord, folder / RECORD_FILE)


def _read(kind: type[T], path: Path) -> T:
    """Return the content of a checkpoint's file, whose checksum is not verified."""
    content = read_json(path)
    try:
        return read(kind, content)
    except ValueError as error:
        raise unusable(str(error), path) from None


def _saved_before_restart(settings: RunContract, found: list[Candidate]) -> list[Candidate]:
    """Return the checkpoints that this launch saved before it restarted the ranks, newest last.

    A checkpoint with a damaged manifest does not identify the launch that saved it. It is included
    if it is newer than another checkpoint of this launch.
    """
    if not is_restart() or not settings.began_at:
        return []
    began_at = settings.began_at
    saved = [item for item in found if not item.manifest or item.manifest.launched_at == began_at]
    return [*dropwhile(lambda item: item.manifest is None, saved)]


def _explain_damage(error: CheckpointError, path: Path, project: Path) -> None:
    """If `path` is damaged, raise an error that suggests a fix; every rank must call this."""
    from headway.checkpoint.saving import on_rank_0

    def inspect() -> tuple[bool, bool, Path | None]:
        others = [candidate for candidate in candidates(project) if candidate.path != path]
        is_complete = newest_complete([Candidate(0.0, path)])[0] is not None
        exists = not is_absent(path)
        return exists, is_complete, None if is_complete else newest_complete(others)[0]

    exists, is_complete, other = on_rank_0(inspect)
    problem = error.problems[0]
    if is_complete or problem.code is Code.OTHER_VERSION:
        return
    what, fix = problem.what, f"move {path} elsewhere to start from the beginning"
    if not exists:
        what = "the checkpoint was removed while it was being loaded"
        fix = "run again while no other run saves or prunes checkpoints in this project folder"
    elif other is not None:
        fix = f"call accelerator.resume(fall_back=True) to resume from {other}, or move {path}"
        fix += " elsewhere"
    code = problem.code if exists else Code.NOT_SHARED
    raise CheckpointError(what, where=problem.where, fix=fix, code=code) from None
