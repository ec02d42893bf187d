"""How the ranks ended -> one report: which failed first and why, and what the rest did. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Iterable, Mapping, Sequence
from hashlib import sha256
from typing import NamedTuple

from headway.ipc.records import STOPPED_AND_SAVED, Crash, CrashSite, FeatureUse
from headway.ipc.signals import shell_code
from headway.ipc.stderr import named
from headway.launcher.diagnosis.reasons import (
    Evidence,
    Reason,
    find_reason,
    formatted,
    is_communication_error,
    is_transient,
)
from headway.launcher.diagnosis.stacks import Stack, describe_crash, parse_traceback, user_frame
from headway.launcher.diagnosis.torch_messages import COMMUNICATION, COMMUNICATION_ERRORS, contains

_EXIT_DELAY_S = 5.0  # on a busy machine
_MAX_LINES = 12  # of a failed rank's last output, in the report
_RECORDED_LINES = 40  # in the record
# of a message: an address, and which of a loader's workers has read a bad sample
_VARYING = re.compile(r"0x[0-9a-fA-F]+|(?<=worker process )\d+")


class RankExit(NamedTuple):
    """How one rank ended; `code` is negative for a signal, as `subprocess` gives it."""

    rank: int
    pid: int
    code: int
    time: float  # when its program failed or ended, in seconds since the epoch
    was_stopping: bool  # it ended after the launcher had begun to stop the ranks
    crash: Crash | None = None  # the exception that nothing handled
    message: str = ""  # the text of sys.exit("text")
    exited_silently: bool = True  # reported neither an end nor an exception: os._exit, or a signal
    feature_use: FeatureUse | None = None  # what its program used, if it came to its end
    killed_after_s: float | None = None  # by the launcher: it had not stopped in its grace period

    @property
    def is_failure(self) -> bool:
        return self.code not in (0, STOPPED_AND_SAVED)


class Failure(NamedTuple):
    first: RankExit
    same: tuple[int, ...]  # ranks that failed by themselves in the same way
    different: tuple[RankExit, ...]  # ranks that failed by themselves in another way
    victims: tuple[int, ...]  # ranks that failed or were stopped because of it
    world_size: int
    evidence: Evidence  # of the first one
    last_lines: tuple[str, ...] = ()  # of the first rank's output
    mentions_communication: bool = False  # these lines
    killed: tuple[RankExit, ...] = ()  # victims that the launcher killed while they were stopping

    @property
    def reason(self) -> Reason:
        return find_reason(self.evidence)

    @property
    def suspicion(self) -> int:
        """How likely it follows from a failure on another machine: 0 it does not, 1, 2 it may."""
        if not _may_be_victim(self.first):
            return 0
        return 2 if self.first.crash is not None or self.mentions_communication else 1

    @property
    def site(self) -> CrashSite | None:
        """What its repetition would have in common with it; None where a restart may help."""
        crash = self.first.crash
        if crash is None or crash.step < 1 or is_transient(self.evidence) or self.suspicion:
            return None
        frame = user_frame(parse_traceback(crash.traceback))
        message = sha256(_VARYING.sub("", crash.message).encode(errors="replace")).hexdigest()[:16]
        return None if frame is None else CrashSite(crash.name, message, frame, crash.step)

    @property
    def cause(self) -> str:
        of = f" of {self.world_size}" if self.world_size > 1 else ""
        return formatted(self.reason.cause, self.evidence, f"rank {self.first.rank}{of}")

    @property
    def aftermath(self) -> str:
        words = ""
        if self.evidence.divergence and self.first.crash is not None:
            words = f"; rank {self.first.rank} then failed with {self.first.crash.name}"
            return words + describe_killed(self.killed)
        if self.same:
            words += f"; so did {named(self.same)}"
        for end in self.different:
            words += f"; rank {end.rank} failed with {end.crash.name if end.crash else end.code}"
        if self.victims:
            words += f"; {named(self.victims)} stopped after rank {self.first.rank} failed"
        return words + describe_killed(self.killed)

    @property
    def details(self) -> str:
        if self.first.crash is not None:
            return "\n".join([self.first.crash.traceback.rstrip(), *self.evidence.divergence[1:]])
        message = self.first.message.splitlines()
        lines = list(self.last_lines)
        if message and lines[-len(message) :] == message:  # `cause` has it
            lines = lines[: -len(message)]
        return "\n".join(lines[-_MAX_LINES:])

    @property
    def fix(self) -> str:
        """What to do next; a HeadwayError raised in the script carries its own fix."""
        crash = self.first.crash
        return (crash.fix if crash is not None else "") or formatted(self.reason.fix, self.evidence)

    @property
    def exit_code(self) -> int:
        """The code that the launcher ends with; a rank that left by os._exit(0) gives 1."""
        return shell_code(self.first.code) or 1


def find_failure(
    exits: Iterable[RankExit],
    *,
    ranks: Sequence[int],
    world_size: int,
    memory_kills: int = 0,
    last_lines: Mapping[int, Sequence[str]] | None = None,
    divergence: Sequence[str] = (),
    lost_reader: str = "",
    signals_received: Collection[int] = (),
    silent_fails: bool = False,
) -> Failure | None:
    """Return the first failure among `exits`, or None when no rank failed.

    A rank that left silently (os._exit, a signal) is the first one if it left before another failed
    on the connection that it dropped, even if its process is found dead a moment later. An abort
    that the rank's last lines explain by communication is not silent: victims abort, too.

    `ranks` are all of this machine. `divergence` is kept where the first failure is one of
    communication; `silent_fails`: os._exit(0) is a failure; the rest is as in `Evidence`.
    """
    last_lines = last_lines or {}
    ended = sorted(exits, key=lambda end: end.time)
    failures = [end for end in ended if end.is_failure or (silent_fails and end.exited_silently)]
    own = [end for end in failures if not end.was_stopping] or failures
    if not own:
        return None
    first = own[0]
    for end in ended if _may_be_victim(first) else ():
        is_silent = end.exited_silently and not end.was_stopping
        if end.code == -signal.SIGABRT:
            is_silent &= not _mentions_communication(last_lines.get(end.rank, ()))
        if is_silent and end.time < first.time + _EXIT_DELAY_S:
            first = end
            break
    fine = {end.rank for end in ended if end.code == 0 and not end.was_stopping}
    same = {end.rank for end in own if end is not first and _failed_alike(end, first)}
    different = [
        end
        for end in own
        if end is not first
        and end.rank not in same
        and end.crash is not None
        and not _may_be_victim(end)
    ]
    others = sorted({*ranks} - fine - {first.rank} - {end.rank for end in different})
    lines = last_lines.get(first.rank, ())
    return Failure(
        first=first,
        same=tuple(rank for rank in others if rank in same),
        different=tuple(different),
        victims=tuple(rank for rank in others if rank not in same),
        world_size=world_size,
        evidence=Evidence(
            first.code,
            first.crash,
            first.message,
            memory_kills,
            lost_reader,
            tuple(divergence) if first.crash and is_communication_error(first.crash) else (),
            first.killed_after_s,
            first.exited_silently,
            -first.code in signals_received,
        ),
        last_lines=tuple(describe_crash(lines) or lines[-_RECORDED_LINES:]),
        mentions_communication=_mentions_communication(lines),
        killed=tuple(end for end in ended if end.killed_after_s is not None),
    )


def _may_be_victim(end: RankExit) -> bool:
    """Return whether the failure may be a consequence of another rank's failure."""
    if end.crash is None:
        return (
            end.exited_silently and end.code <= 0
        )  # an exit code that the script chose is its own failure
    return _mentions_communication([end.crash.traceback])


def _mentions_communication(lines: Sequence[str]) -> bool:
    return contains("\n".join(lines), (*COMMUNICATION, *COMMUNICATION_ERRORS))


def _failed_alike(end: RankExit, first: RankExit) -> bool:
    if end.was_stopping:
        return False
    if end.crash is None or first.crash is None:
        return end.crash is first.crash and end.code == first.code > 0
    # not by the exit code: it may have been stopped on its way out
    return end.crash.kind == first.crash.kind and _crash_line(end.crash) == _crash_line(first.crash)


def _crash_line(crash: Crash) -> Stack:
    return parse_traceback(crash.traceback)[-1:]


def describe_killed(exits: Iterable[RankExit]) -> str:
    """Return which ranks the launcher killed before they had stopped, to continue a sentence."""
    after_s = {end.rank: end.killed_after_s for end in exits if end.killed_after_s is not None}
    if not after_s:
        return ""
    verb = "were" if len(after_s) > 1 else "was"
    seconds = f"{max(after_s.values()):.0f} s"
    return f"; {named([*after_s])} {verb} killed, still stopping after {seconds} (--grace-period-s)"


class ServerDeath(NamedTuple):
    """The fork server ended, and all ranks with it."""

    evidence: Evidence
    aftermath: str = "; the ranks ended with it"
    details: str = ""

    @property
    def cause(self) -> str:
        reason = find_reason(self.evidence)
        return formatted(reason.cause, self.evidence, "the process that starts the ranks")

    @property
    def fix(self) -> str:
        fix = formatted(find_reason(self.evidence).fix, self.evidence)
        if self.evidence.code > 0:
            return f"{fix}, or try --set start_method=exec"
        return f"{fix}; with --max-restarts 1 it is started again"

    @property
    def exit_code(self) -> int:
        return shell_code(self.evidence.code) or 1
