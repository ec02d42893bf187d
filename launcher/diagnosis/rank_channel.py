"""The launcher's side of one rank's status channel: asks, and keeps what the rank has sent."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

from headway.contract.notes import say
from headway.contract.records import (
    Answer,
    Crash,
    End,
    Frame,
    Group,
    Heartbeat,
    Progress,
    Ready,
    Record,
    RecordReader,
    Refused,
    Saved,
    WillSave,
)
from headway.contract.step_clock import Figures
from headway.launcher.diagnosis.hang import Exit, NoStack, RankStatus
from headway.launcher.diagnosis.process_state import handles_quit, read_state
from headway.launcher.diagnosis.stacks import (
    describe_crash,
    is_complete,
    parse_stacks,
    parse_traceback,
    users_stacks,
    waits_for_threads,
)

_QUIET_S = 0.5  # stacks that have not grown for so long are complete, whatever they end with
_READ_SIZE = 65536
_MAX_READ = 2**20  # bytes of one descriptor at a time, more than a pipe or socket usually holds
_MAX_REFUSED = 100  # lines of one rank; then nothing more that it sends is looked at


class RankChannel:
    """One rank and what it has sent on its status channel, and by faulthandler, through `stacks`.

    `send_signal` does nothing once its process has ended.
    """

    def __init__(
        self,
        rank: int,
        pid: int,
        channel: int,
        stacks: int,
        send_signal: Callable[[int], object],
        note_figures: Callable[[Figures], None] = lambda _: None,
    ) -> None:
        self.rank = rank
        self._note_figures = note_figures
        self.fds = (channel, stacks)
        self.closed: set[int] = set()  # of these, by the rank
        self.code: int | None = None  # of its process, once that has ended
        self.ends: list[Crash | End] = []  # as it reported them
        # on the monotonic clock
        self.began_at = time.monotonic()
        self.asked_at: float | None = None  # when it was asked what it has not answered yet
        self.moved_after = 0.0  # the last progress that it showed is later than this
        self.will_save = False  # once it is asked to stop
        self.saved_in = ""  # the folder of its checkpoints, once there is one
        self._pid, self._send_signal = pid, send_signal
        self._reader = RecordReader()
        self._num_refused = 0  # lines on its channel
        self._is_ready = False  # to be asked
        self._answer: Answer | None = None
        self._before: Answer | None = None  # the answer before that
        self._groups: tuple[Group, ...] | None = None
        self._progress: Progress | None = None
        self._text = ""  # what faulthandler wrote
        self._grew_at = 0.0  # the text
        self._is_interrupted = False  # by the signal for stacks

    def read(self) -> bool:
        """Read what has come, up to a limit; return whether it shows progress."""
        if self.code is not None:
            return False
        sent = self._read_available(self.fds[0])
        written = self._read_available(self.fds[1])
        if written:
            self._text += written.decode(errors="replace")
            self._grew_at = time.monotonic()
        shows_progress = False
        if self._num_refused < _MAX_REFUSED:  # else still read: the rank must not wait for it
            for record in self._reader.read(sent):
                shows_progress |= self._take_in(record)
                if self._num_refused == _MAX_REFUSED:
                    break
        return shows_progress

    def _read_available(self, fd: int) -> bytes:
        """Return what is in a pipe or socket, up to a limit, without waiting for more."""
        parts: list[bytes] = []
        with suppress(BlockingIOError, ConnectionResetError):
            for _ in range(_MAX_READ // _READ_SIZE):
                part = os.read(fd, _READ_SIZE)
                if not part:
                    self.closed.add(fd)
                    break
                parts.append(part)
        return b"".join(parts)

    def _take_in(self, record: Record | Refused) -> bool:
        """Keep what a record says; return whether it shows progress."""
        if isinstance(record, Refused):
            self._num_refused += 1
            if self._num_refused == 1:
                say(
                    f"note: rank {self.rank} wrote to the launcher's status channel; ignored, "
                    f"as it is not a record: {record.reason}"
                )
        elif isinstance(record, Ready):
            self._is_ready = True
            return True
        elif isinstance(record, WillSave):
            self.will_save = True
        elif isinstance(record, Saved):
            self.saved_in = record.folder
        elif isinstance(record, Heartbeat):
            self._progress = record.progress
            self.moved_after = time.monotonic()
            return True
        elif isinstance(record, Figures):
            self._progress = Progress(record.step, total=record.total, loss=record.loss)
            self.moved_after = time.monotonic()
            self._note_figures(record)
            return True
        elif isinstance(record, Answer):
            return self._take_in_answer(record)
        elif isinstance(record, (Crash, End)):
            self.ends.append(record)
            self._groups = record.groups
            return True
        return False

    def _take_in_answer(self, answer: Answer) -> bool:
        self.asked_at = None
        self._before, self._answer, self._groups = self._answer, answer, answer.groups
        if answer.progress != Progress():  # the script uses an Accelerator
            self._progress = answer.progress
        if self._before is None:
            return True
        if _movement(answer) == _movement(self._before):
            return False
        self.moved_after = self._before.time
        return True

    def ask(self) -> None:
        """Ask where the rank is, unless it has not answered the last question yet."""
        if self.code is None and self._is_ready and self.asked_at is None:
            with suppress(OSError):
                os.write(self.fds[0], b"?")
                self.asked_at = time.monotonic()

    def interrupt(self) -> None:
        """Have faulthandler write the stacks of a rank that does not answer, by SIGQUIT."""
        handled = self._answer is not None and self._answer.handles_quit
        if self.is_silent and not handled and handles_quit(self._pid):
            self._text, self._is_interrupted = "", True
            self._send_signal(signal.SIGQUIT)

    @property
    def is_silent(self) -> bool:
        """Whether it has not answered yet."""
        return self.code is None and self.asked_at is not None and not self._is_closed

    @property
    def _is_closed(self) -> bool:
        """Return whether the rank's script has closed all descriptors, and cannot be asked."""
        return self.code is None and self.fds[0] in self.closed

    @property
    def owes_stacks(self) -> bool:
        """Whether faulthandler has not finished to write its stacks."""
        is_quiet = self._text and time.monotonic() - self._grew_at > _QUIET_S
        return self.is_silent and self._is_interrupted and not (is_quiet or is_complete(self._text))

    @property
    def crash_stack(self) -> list[str]:
        """Where its process crashed, if faulthandler wrote it."""
        return describe_crash(self._text)

    @property
    def step(self) -> int:
        """The optimizer steps that it has told of."""
        return self._progress.step if self._progress is not None else 0

    @property
    def has_trained(self) -> bool:
        return self.step > 0

    @property
    def status(self) -> RankStatus:
        """What is known of it now."""
        status = RankStatus(self.rank, groups=self._groups, progress=self._progress)
        if self.code is None:
            stacks = self._stacks
            if self._is_closed and not self.ends:
                return status._replace(groups=None, no_stack=self._no_stack)
            if waits_for_threads(stacks) or not self._is_ending:
                return status._replace(
                    stacks=stacks,
                    no_stack=self._no_stack,
                    process=read_state(self._pid) if self.is_silent else None,
                    is_working=self._is_working,
                )
        crash = next((one for one in self.ends if isinstance(one, Crash)), None)
        if crash is None:
            return status._replace(exit=self._exit)
        return status._replace(
            stacks=(parse_traceback(crash.traceback),),
            groups=self._groups and tuple(map(_before_crash, self._groups)),
        )

    @property
    def _stacks(self) -> tuple[tuple[Frame, ...], ...]:
        if self.is_silent:
            return parse_stacks(self._text) if self._is_interrupted else ()
        if self._is_closed:
            return ()
        return users_stacks(self._answer.stacks) if self._answer is not None else ()

    @property
    def _is_working(self) -> bool:
        """Return whether the main thread was elsewhere when it answered before."""
        if self.is_silent or self._before is None or self._answer is None:
            return False
        return self._before.stacks[:1] != self._answer.stacks[:1]

    @property
    def _no_stack(self) -> NoStack | None:
        if self._is_ready and self._is_closed:
            return NoStack.CLOSED
        if self.is_silent:
            return NoStack.STOPPED if read_state(self._pid).is_stopped else NoStack.SILENT
        return NoStack.NOT_PYTHON if self._answer is None else None

    @property
    def _is_ending(self) -> bool:
        """Return whether the script has ended and its process has not, and no collective is open.

        Threads of the script may still be in one.
        """
        waits = any(group.waits_for is not None for group in self._groups or ())
        return not waits and any(isinstance(one, End) for one in self.ends)

    @property
    def _exit(self) -> Exit:
        end = next((one for one in self.ends if isinstance(one, End)), None)
        if end is None:
            return Exit(self.code or 0)
        return Exit(end.code if self.code is None else self.code, True, end.exited_at)


def _movement(answer: Answer) -> object:
    """Return what differs from answer to answer of a rank that makes progress."""
    progress = answer.progress  # whose loss may be nan, which differs from itself
    return answer.groups, progress.step, progress.phase, answer.num_modules


def _before_crash(group: Group) -> Group:
    """Return a group as it was before: torch marks a collective that failed as done."""
    return group._replace(
        collectives=tuple(one._replace(is_done=False) for one in group.collectives[-1:])
    )


def say_too_early(number: int) -> None:
    """Print that a signal came while there were no ranks to send it on to."""
    name = signal.Signals(number).name
    say(f"{name} came before the ranks had started, and is not sent on to them")
