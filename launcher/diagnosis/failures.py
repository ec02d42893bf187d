"""Turns the exits of the ranks into one report: the first failure, its cause and its effects."""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Iterable, Mapping, Sequence
from hashlib import sha256
from typing import NamedTuple

from headway.errors import UsageError
from headway.ipc.records import STOPPED_AND_SAVED, Crash, CrashSite, FeatureUse
from headway.ipc.signals import shell_exit_code
from headway.ipc.stderr import named
from headway.launcher.diagnosis.reasons import (
    Evidence,
    Reason,
    find_reason,
    formatted,
    is_communication_error,
)
from headway.launcher.diagnosis.stacks import Stack, describe_crash, parse_traceback, user_frame
from headway.launcher.diagnosis.torch_messages import COMMUNICATION, COMMUNICATION_ERRORS, contains

_EXIT_DELAY_S = 5.0  # for the launcher to notice an exit on a busy machine
_MAX_LINES = 12  # of a failed rank's output in the report
# text that differs between repetitions of an error: addresses, numbers of loader workers
_VARYING = re.compile(r"0x[0-9a-fA-F]+|(?<=worker process )\d+")


class RankExit(NamedTuple):
    """The exit of one rank; `code` is negative for a signal, as in `subprocess`."""

    rank: int
    pid: int
    code: int
    time: float  # of the failure or exit, in seconds since the epoch
    was_stopping: bool  # exited after the launcher started to stop the ranks
    crash: Crash | None = None  # the unhandled exception
    message: str = ""  # the text of sys.exit("text")
    exited_silently: bool = True  # by os._exit or a signal, without a report
    feature_use: FeatureUse | None = None  # features used, if the program ran to completion
    killed_after_s: float | None = None  # time until the launcher killed the rank

    @property
    def is_failure(self) -> bool:
        """Whether the rank failed; an excepthook may exit with 0 after an unhandled exception."""
        return self.crash is not None or self.code not in (0, STOPPED_AND_SAVED)


class Failure(NamedTuple):
    first: RankExit
    same: tuple[int, ...]  # ranks with the same failure
    different: tuple[RankExit, ...]  # ranks with a different, independent failure
    victims: tuple[int, ...]  # ranks that failed or were stopped as a consequence
    world_size: int
    evidence: Evidence  # for the first failure
    last_lines: tuple[str, ...]  # of the first rank's output
    suspicion: int  # the likelihood that another machine caused this failure, from 0 to 2 (high)
    killed: str  # a clause that names the ranks killed after the grace period

    @property
    def reason(self) -> Reason:
        return find_reason(self.evidence)

    @property
    def site(self) -> CrashSite | None:
        """The key that identifies repetitions of this failure; None if a restart may help."""
        crash = self.first.crash
        if crash is None or crash.may_pass or crash.code < 0:
            return None
        is_misuse = crash.fix and crash.code == UsageError.exit_code
        if crash.step < 1 and not is_misuse:
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
        if self.evidence.divergence and self.first.crash is not None:
            then = f"; rank {self.first.rank} then failed with {self.first.crash.name}"
            return then + self.killed
        words = f"; so did {named(self.same)}" if self.same else ""
        for end in self.different:
            words += f"; rank {end.rank} failed with {end.crash.name if end.crash else end.code}"
        if self.victims:
            words += f"; {named(self.victims)} stopped after rank {self.first.rank} failed"
        return words + self.killed

    @property
    def is_final(self) -> bool:
        """Whether the run ends: the launcher forwarded the signal that killed the rank."""
        return self.evidence.is_forwarded

    @property
    def details(self) -> str:
        if self.first.crash is not None:
            return "\n".join([self.first.crash.traceback.rstrip(), *self.evidence.divergence[1:]])
        message = self.first.message.splitlines()
        lines = list(self.last_lines)
        if message and lines[-len(message) :] == message:  # `cause` contains it
            lines = lines[: -len(message)]
        heading = [f"last output of rank {self.first.rank}:"] if lines else []
        return "\n".join([*heading, *lines[-_MAX_LINES:]])

    @property
    def fix(self) -> str:
        """The fix from a HeadwayError, or the reason's; empty if the rank printed why it exited."""
        crash, is_printed = self.first.crash, self.reason.name == "exit_code" and self.details
        fix = "" if is_printed else formatted(self.reason.fix, self.evidence)
        return (crash.fix if crash is not None else "") or fix

    @property
    def exit_code(self) -> int:
        """The launcher's exit code; 1 after os._exit(0), or if a crash has a save's exit code."""
        is_unsaved = self.first.crash is not None and self.first.code == STOPPED_AND_SAVED
        return 1 if is_unsaved else shell_exit_code(self.first.code) or 1


def find_failure(
    exits: Iterable[RankExit],
    *,
    ranks: Sequence[int],
    world_size: int,
    memory_kills: int | None = None,
    last_lines: Mapping[int, Sequence[str]] | None = None,
    divergence: Sequence[str] = (),
    lost_reader: str = "",
    signals_received: Collection[int] = (),
    silent_fails: bool = False,
) -> Failure | None:
    """Return the first failure among `exits`, or None if no rank failed.

    A silent exit (os._exit, a signal) takes precedence over the failure of a rank that lost its
    connection to the exited rank, even if the launcher noticed the exit slightly later. An abort
    does not count as silent if the rank's last lines contain a communication error, because victims
    abort, too.

    `ranks` are all ranks of this machine. `divergence` is used only if the first failure is a
    communication error. If `silent_fails` is set, os._exit(0) counts as a failure. For the other
    arguments, see `Failure` and `Evidence`.
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
    fine = {end.rank for end in ended if end.code == 0 and not end.is_failure | end.was_stopping}
    alike = [first, *(end for end in own if _failed_alike(end, first))]
    first = min(alike, key=lambda end: end.rank)  # their order in time says nothing
    same = {end.rank for end in alike} - {first.rank}
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
    suspicion = 0
    if _may_be_victim(first):
        suspicion = 2 if first.crash is not None or _mentions_communication(lines) else 1
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
            tuple(lines),
        ),
        last_lines=tuple(describe_crash(lines) or lines),
        suspicion=suspicion,
        killed=describe_killed(ended),
    )


def _may_be_victim(end: RankExit) -> bool:
    """Return whether the failure may be a consequence of another rank's failure."""
    if end.crash is None:
        return end.exited_silently and end.code <= 0  # the script chose a positive code
    return _mentions_communication([end.crash.traceback])


def _mentions_communication(lines: Sequence[str]) -> bool:
    return contains("\n".join(lines), (*COMMUNICATION, *COMMUNICATION_ERRORS))


def _failed_alike(end: RankExit, first: RankExit) -> bool:
    if end.was_stopping:
        return False
    if end.crash is None or first.crash is None:
        return end.crash is first.crash and end.code == first.code > 0
    # exit codes are not compared, because the rank may have been stopped while it was exiting
    return end.crash.kind == first.crash.kind and _crash_line(end.crash) == _crash_line(first.crash)


def _crash_line(crash: Crash) -> Stack:
    return parse_traceback(crash.traceback)[-1:]


def describe_killed(exits: Iterable[RankExit]) -> str:
    """Return a clause that names the ranks killed after the grace period, if any."""
    after_s = {end.rank: end.killed_after_s for end in exits if end.killed_after_s is not None}
    if not after_s:
        return ""
    verb, they = ("were", "they") if len(after_s) > 1 else ("was", "it")
    why = f"because {they} had not stopped after {max(after_s.values()):.0f} s (--grace-period-s)"
    if max(after_s.values()) < 0.5:
        why = "at once, because of a second Ctrl-C or --grace-period-s 0"
    return f"; {named([*after_s])} {verb} killed {why}"


class ServerDeath(NamedTuple):
    """The exit of the fork server, which terminates all ranks."""

    evidence: Evidence
    aftermath: str = "; its ranks exited, too"
    details: str = ""
    site: CrashSite | None = None  # a restart may help

    @property
    def cause(self) -> str:
        reason = find_reason(self.evidence)
        return formatted(reason.cause, self.evidence, "the launcher's fork server")

    @property
    def fix(self) -> str:
        fix = formatted(find_reason(self.evidence).fix, self.evidence)
        if self.evidence.code > 0:
            return f"{fix}, or try --set start_method=exec"
        return f"{fix}; --max-restarts 1 restarts the ranks automatically"

    @property
    def exit_code(self) -> int:
        return shell_exit_code(self.evidence.code) or 1
