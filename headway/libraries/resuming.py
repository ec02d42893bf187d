"""From which checkpoint a library's training goes on, if it does, and how all ranks stop it.

In the folder of its output lies a record of the training: when it began, in which launch and job,
and what has stopped it. A run that is typed again begins anew, as the library does by itself.
"""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch

from headway.checkpoint.stopping import Agreement, Request, StopSignals, tell_stopped
from headway.contract.notes import say, say_once
from headway.contract.records import channel
from headway.contract.run import IF_ANY, NEWEST, RunContract, is_requeued, is_restart, job_of
from headway.contract.typed import parse, plain, read
from headway.distributed.world import rank_and_size
from headway.errors import CheckpointError
from headway.libraries.folders import RECORD, WEIGHTS_ALONE, Saved

_trainings: Counter[str] = Counter()  # of this process, by the folder of their output


class Training(NamedTuple):
    """A training, as its record says."""

    launched_at: float  # when the launch that trains began, in seconds since the epoch
    job: str = ""  # of the scheduler; empty outside of one
    number: int = 1  # of the script's trainings in this folder
    began_at: float = 0.0  # by the clock of its disk; runs that go on keep it
    stopped_by: str = ""  # with exit code 75: run it again


class Start(NamedTuple):
    """How a training starts: from which checkpoint, if not anew, and what is said of it."""

    training: Training
    path: str | None = None
    lines: tuple[str, ...] = ()


class Checkpoints(NamedTuple):
    """Returns a library's checkpoints at a path, and says why training does not go on from one."""

    at: Callable[[Path], Sequence[Saved]]
    fault: Callable[[Path], str | None]

    def newest(
        self, found: Sequence[Saved], training: Training | None
    ) -> tuple[Saved | None, tuple[str, ...]]:
        """Return the last complete one, a training's own first; and lines on those left out."""

        def order(one: Saved) -> tuple[bool, int, float]:
            return _is_of(training, one), one.step, one.at

        lines: list[str] = []
        for one in sorted(found, key=order, reverse=True):
            if (fault := self.fault(one.path)) is None:
                return one, tuple(lines)
            lines.append(f"left out: {one.path}, which is not complete: {fault}")
        return None, tuple(lines)


def read_record(folder: Path) -> Training | None:
    """Return the record in the folder of a training's output, if it has a readable one."""
    try:
        return read(Training, parse((folder / RECORD).read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError):
        return None


def write_record(folder: Path, training: Training) -> Training:
    """Write the record of a training, in place of an older one; return it with its beginning."""
    folder.mkdir(parents=True, exist_ok=True)
    pending = folder / f"{RECORD}.pending"
    if not training.began_at:
        pending.write_bytes(b"")
        training = training._replace(began_at=pending.stat().st_mtime)
    with open(pending, "w", encoding="utf-8") as file:
        json.dump(plain(training), file)
        file.flush()
        os.fsync(file.fileno())
    pending.replace(folder / RECORD)
    return training


def note_stop(folder: Path, training: Training, request: Request) -> bool:
    """Note what stops a training, so that it goes on when it is run again; not after Ctrl-C.

    Return whether that is written: a disk may be full after the checkpoint.
    """
    if request is Request.SIGINT:
        return False
    try:
        write_record(folder, training._replace(stopped_by=str(request)))
    except OSError as error:
        say(f"note: {folder / RECORD} cannot be written: {error.strerror}")
        return False
    return True


def tell_start(library: str, start: Start) -> None:
    """Say on rank 0 that a library is joined, and how its training starts."""
    if rank_and_size()[0] == 0:
        say_once(
            f"joined {library}: it saves and leaves when the job has to stop, and goes on when it"
            " is run again (--library-hooks no: it does not)"
        )
        for line in start.lines:
            say(line)


def select_start(
    run: RunContract, folder: Path, given: str | bool | None, checkpoints: Checkpoints
) -> Start:
    """Return how the next training of this process in the folder of its output starts.

    `given` is the script's: a checkpoint, True for the last one in the folder, or none.
    """
    _trainings[str(folder.absolute())] += 1
    number, before = _trainings[str(folder.absolute())], read_record(folder)
    anew, found = Training(run.began_at, job_of(), number), checkpoints.at(folder)
    if before is not None and before.number != number:
        before = None  # another training of the script
    if given not in (None, False):
        return _start_of_script(given, folder, before, anew, checkpoints)
    why = "" if before is None else _why_it_goes_on(run, before)
    if why:
        own = [one for one in found if _is_of(before, one)]
        newest, lines = checkpoints.newest(own, before)
        if newest is not None:
            lines += (f"{why}: going on from {newest.path}",)
            return Start(_continued(before, newest, anew), str(newest.path), lines)
        if run.resume is None:
            return Start(anew, None, (*lines, f"{why} before it had saved: beginning anew"))
    if run.resume is None or number > 1:
        return Start(anew)
    named = None if run.resume in NEWEST else Path(run.resume)
    newest, lines = checkpoints.newest(found if named is None else checkpoints.at(named), before)
    if newest is not None:
        training = anew if named is not None else _continued(before, newest, anew)
        return Start(training, str(newest.path), (*lines, f"going on from {newest.path}"))
    if run.resume == IF_ANY:
        return Start(anew, None, (*lines, f"no complete checkpoint in {folder}: beginning anew"))
    left_out = f" ({'; '.join(lines)})" if lines else ""
    raise CheckpointError(
        f"there is no complete checkpoint to go on from{left_out}",
        where=f"{named or folder}, asked for by {run.origins.get('resume', 'resume')}",
        fix=f"leave it out to begin anew; --resume {IF_ANY} does that where there is none",
    )


def _start_of_script(
    given: str | bool | None,
    folder: Path,
    before: Training | None,
    anew: Training,
    checkpoints: Checkpoints,
) -> Start:
    """Return how a training starts that the script lets go on.

    A script that looks for the last folder by its number may find one that was being written.
    """
    if given is not True:
        path = Path(str(given))
        one = next((one for one in checkpoints.at(path) if one.path == path), None)
        fault = None if one is None else checkpoints.fault(path)
        if one is None or fault in (None, WEIGHTS_ALONE):
            return Start(anew if one is None else _continued(before, one, anew), str(given))
        if path.absolute().parent != folder.absolute():
            text = f"note: {path}, which the script goes on from, is not complete: {fault}"
            return Start(anew, str(given), (text,))
    newest, lines = checkpoints.newest(checkpoints.at(folder), before)
    if newest is None:
        return Start(anew, None, (*lines, f"no complete checkpoint in {folder}"))
    lines += (f"going on from {newest.path}",)
    return Start(_continued(before, newest, anew), str(newest.path), lines)


def _why_it_goes_on(run: RunContract, before: Training) -> str:
    """Return why this run is the same training as before; empty if it is not."""
    if is_restart() and before.launched_at == run.began_at:
        return "the ranks were restarted"
    if before.job and before.job == job_of() and is_requeued():
        return f"job {before.job} was put back into the queue"
    return f"{before.stopped_by} has stopped this training" if before.stopped_by else ""


def _is_of(training: Training | None, saved: Saved) -> bool:
    """Return whether a training has saved this checkpoint."""
    return training is not None and saved.at >= training.began_at


def _continued(before: Training | None, saved: Saved, anew: Training) -> Training:
    """Return the training that goes on from a checkpoint: the one before, or a new one."""
    if before is None or not _is_of(before, saved):
        return anew
    return anew._replace(began_at=before.began_at)


class Stopping:
    """Notes what asks a training to stop, from its beginning to its end.

    `request` is what all ranks have agreed on.
    """

    def __init__(self, run: RunContract, device: torch.device) -> None:
        self.request = Request.NONE
        self._has_left = False
        self._signals = StopSignals(run.deadline())
        self._by_steps, self._by_saves = Agreement(device), Agreement(device)

    def begin(self) -> None:
        """Begin to note signals."""
        channel.has_resumed = channel.obeys_stops = True
        if threading.current_thread() is threading.main_thread():
            self._signals.trap()
        else:
            say_once("note: training in another thread than the first: signals end it as ever")

    def is_asked(self) -> bool:
        """Return whether the job has to stop; every rank asks equally often."""
        if not self.request:
            self.request = self._by_steps.ask(self._signals.request)
        return bool(self.request)

    def meet(self) -> bool:
        """Wait until all ranks have called this, and return whether the job has to stop."""
        wanted = self.request or self._signals.request
        self.request, _ = self._by_saves.agree(0, wanted)
        return bool(self.request)

    def leave(self, step: int, saved: str, *, is_noted: bool) -> NoReturn:
        """End this process, on all ranks, once all is saved.

        `is_noted`: rank 0 has noted the stop, so that the same run, when it is run again, goes on.
        """
        again = "run the same command again to go on" if is_noted else "--resume latest goes on"
        tell_stopped(self.request, step, saved, again)
        self._signals.leave()
        self._has_left = True
        raise SystemExit(self.request.exit_code)

    def release(self) -> None:
        """Let signals do what they did before, once the training is over."""
        if self._has_left:
            return
        if (late := self._signals.request) and rank_and_size()[0] == 0:
            say(f"the training is over: {late} stops nothing any more")
        self._signals.release()
