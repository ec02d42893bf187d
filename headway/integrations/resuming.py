"""Chooses the checkpoint from which a library's Trainer resumes, and stops all ranks together.

A library's checkpoint is used only if the list in the output folder contains it. A checkpoint is
listed after all ranks have written their parts.

A training run resumes only if this is requested by the script, by `--resume`, by a restart of the
ranks (`--max-restarts`), or by a scheduler that has requeued the job.
"""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from headway.checkpoint.stopping import Agreement, StopRequest, StopSignals, log_stopped
from headway.distributed.world import rank_and_size
from headway.errors import CheckpointError, Code
from headway.history import process_record
from headway.ipc.paths import is_absent, write_atomic
from headway.ipc.progress import process_progress
from headway.ipc.records import PROJECT
from headway.ipc.run_contract import IF_ANY, NEWEST, RunContract, is_requeued, is_restart, job_of
from headway.ipc.stderr import log, log_once
from headway.ipc.typed import plain, read

LIST = "_headway-checkpoints.json"  # newest last; Trainer's push_to_hub skips names with `_`

_trainings: Counter[str] = Counter()  # training runs started in this process, by output folder


class TrainerSave(NamedTuple):
    """A checkpoint or, while `path` is empty, the training run that will save one."""

    path: str = ""
    owner: str = ""  # the scheduler's job, or the start time of the launch
    number: int = 1  # position among the script's training runs in this folder


class TrainingStart(NamedTuple):
    training: TrainerSave  # identifies the checkpoints that it will save
    path: str | None = None  # checkpoint to resume from; None: start from the beginning
    line: str = ""  # message to print


def select_start(
    run: RunContract, folder: Path, given: str | bool | None, last_file: str = ""
) -> TrainingStart:
    """Return how this process's next training run in `folder` starts.

    The script's own choice (`given`) takes precedence. Restarts and requeued jobs resume from the
    checkpoints of the job or, outside a job, of the launch. Otherwise, `--resume` applies; a path
    in `--resume` applies only to the script's first training run in the folder. Checkpoints without
    `last_file`, the file that the library writes last, are skipped.

    Raises:
        CheckpointError: `--resume latest` finds no checkpoint, or a path does not exist.
    """
    _trainings[str(folder.absolute())] += 1
    number = _trainings[str(folder.absolute())]
    upcoming = TrainerSave("", job_of() or str(run.began_at), number)
    if given not in (None, False):
        return TrainingStart(upcoming, str(given))
    listed = read_list(folder, last_file)
    own = [entry for entry in listed if entry.number == number]
    why = f"job {upcoming.owner} was requeued" if is_requeued() else ""
    why = "the ranks were restarted" if is_restart() else why
    saved = [entry for entry in own if entry.owner == upcoming.owner]
    if why and saved:
        return TrainingStart(upcoming, saved[-1].path, f"{why}: resuming from {saved[-1].path}")
    if run.resume is None:
        line = f"{why} before a checkpoint was saved: starting from the beginning" if why else ""
        return TrainingStart(upcoming, None, line)
    if run.resume not in NEWEST:
        own = _named(run, Path(run.resume), last_file) if number == 1 else []
    elif not listed and run.resume != IF_ANY:
        raise CheckpointError(
            "no complete checkpoint to resume from",
            where=f"{folder}, requested by {run.origins.get('resume', 'resume')}",
            fix=f"omit resume to start from the beginning; --resume {IF_ANY} does so only if there"
            " is no checkpoint; use --resume FOLDER for a checkpoint saved without Headway",
            code=Code.NO_CHECKPOINT,
        )
    if own:
        return TrainingStart(upcoming, own[-1].path, f"resuming from {own[-1].path}")
    return TrainingStart(upcoming, None, f"no checkpoint in {folder}: starting from the beginning")


def _named(run: RunContract, path: Path, last_file: str) -> list[TrainerSave]:
    listed = read_list(path, last_file)
    if not listed and is_absent(path):
        raise CheckpointError(
            "the checkpoint does not exist",
            where=f"{path}, requested by {run.origins.get('resume', 'resume')}",
            fix="pass the path of an existing checkpoint",
            code=Code.NO_CHECKPOINT,
        )
    return listed or [TrainerSave(str(path))]


def read_list(folder: Path, last_file: str = "") -> list[TrainerSave]:
    """Return the folder's listed checkpoints that still exist, with `last_file`, newest last.

    Raises:
        CheckpointError: the list cannot be read.
    """
    try:
        text = (folder / LIST).read_text(encoding="utf-8")
        listed = read(tuple[TrainerSave, ...], json.loads(text))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"the list of checkpoints cannot be read: {error}",
            where=str(folder / LIST),
            fix="remove the file, and pass the checkpoint to resume from with --resume FOLDER",
            code=Code.DAMAGED,
        ) from None
    found = (entry._replace(path=os.path.join(folder, entry.path)) for entry in listed)
    return [entry for entry in found if not is_absent(Path(entry.path, last_file))]


def add_to_list(folder: Path, checkpoint: TrainerSave) -> None:
    """Append a complete checkpoint to the list, atomically; failures are only logged."""
    own = os.path.realpath(checkpoint.path)
    others = [entry for entry in read_list(folder) if os.path.realpath(entry.path) != own]
    within = [c._replace(path=os.path.relpath(c.path, folder)) for c in (*others, checkpoint)]
    try:
        write_atomic(str(folder / LIST), json.dumps(plain(within), indent=1), flushes=True)
    except OSError as error:
        what = f"{checkpoint.path} cannot be listed in {folder}: {error.strerror}"
        log(f"note: {what}; to use the checkpoint, pass its path to --resume")


def log_start(library: str, start: TrainingStart, folder: Path) -> None:
    """Log on rank 0 that Headway is hooked into a library, and how training starts.

    Raises:
        CheckpointError: a rank cannot see the checkpoint from which rank 0 resumes.
    """
    process_progress().note_output_path(PROJECT, str(folder))
    rank, size = rank_and_size()
    lines = [start.line] * size
    if size > 1:
        dist.all_gather_object(lines, start.line)
    if other := next((number for number, line in enumerate(lines) if line != lines[0]), None):
        raise CheckpointError(
            f"rank {other} cannot see the checkpoint from which rank 0 resumes",
            where=str(folder),
            fix="put the output folder on a disk shared by all machines",
            code=Code.NOT_SHARED,
        )
    if rank == 0:
        log_once(
            f"hooked into {library}: it saves and exits when the job is stopped (--set"
            " library_hooks=no disables this)"
        )
        if start.line:
            log(start.line)


@contextmanager
def replaced(owner: Any, **wrappers: Callable[..., Any]) -> Iterator[None]:
    """Wrap an object's methods in the block; each wrapper receives the method and its arguments."""
    own = vars(owner)
    before = {name: own[name] for name in wrappers if name in own}
    own.update({name: partial(wrap, getattr(owner, name)) for name, wrap in wrappers.items()})
    try:
        yield
    finally:
        for name in wrappers:
            del own[name]
        own.update(before)


class TrainerPreemption:
    """Traps stop requests for a library's Trainer; all ranks agree on `request`."""

    def __init__(self, run: RunContract, device: torch.device) -> None:
        self.request = StopRequest.NONE
        self._has_exited = False
        self.progress = process_progress()
        self._signals = StopSignals(self.progress, run.deadline())
        self._by_steps, self._by_saves = Agreement(device), Agreement(device)

    def begin(self, step: int, num_steps: int) -> None:
        """Start trapping stop signals at `step` of `num_steps` (0 if unknown)."""
        self.progress.note_use(resuming=True, stopping=True)
        self.progress.follow(step, num_steps, None)
        if threading.current_thread() is threading.main_thread():
            self._signals.trap()
        else:
            log_once(
                "note: training does not run in the main thread, so signals terminate the process"
            )

    def should_stop(self) -> bool:
        """Return whether the job must stop; all ranks must call this the same number of times."""
        if not self.request:
            self.request = self._by_steps.ask(self._signals.request)
        return bool(self.request)

    def barrier(self) -> None:
        self._by_saves.agree(0, StopRequest.NONE)

    def exit(self, step: int, saved: str) -> NoReturn:
        self.barrier()
        hint = "--resume latest resumes from it"
        if job_of() and self.request is not StopRequest.SIGINT:
            hint += ", as does the job if it is requeued"
        log_stopped(self.request, step, saved, hint)
        self._signals.leave()
        self._has_exited = True
        code = self._signals.exit_code(self.request)
        process_record.mark_ended(code)
        raise SystemExit(code)

    def release(self) -> None:
        if self._has_exited:
            return
        if (late := self._signals.request) and rank_and_size()[0] == 0:
            log(f"{late} has no effect: training has finished")
        self._signals.release()
