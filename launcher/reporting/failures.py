"""How the ranks ended -> one report: which failed first and why, and what the rest did. Pure."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from headway.contract.records import Crash

STOPPED_AND_SAVED = 75
"""A rank's exit code for: stopped by request, state saved, run me again. No failure."""

_COMMUNICATION = (
    *("/gloo/", "Gloo ", "NCCL error", "NCCL communicator", "WorkNCCL"),
    *("monitoredBarrier", "Connection closed by peer"),
)
_FOUND_DEAD_WITHIN_S = 5.0  # on a machine that is busy
_MOST_LINES = 12  # of a failed rank's last output
_MEMORY_ADVICE = (
    "the device's memory is full: make the batch smaller (and gradient_accumulation_steps larger, "
    "so that an optimizer step sees as many samples as before)"
)
_PYTORCH_ISSUES = "https://github.com/pytorch/pytorch/issues"
_NO_NCCL = ("doesn't have NCCL built in", "ProcessGroupNCCL is only supported with GPUs")
_NCCL_ADVICE = (
    "NCCL needs NVIDIA GPUs, and a torch that is built for them: on CPUs use "
    'init_process_group("gloo")'
)
_MPS_LACKS_IT = (
    "let the CPU compute this operator: --mps-fallback on; it can be asked for at "
    f"{_PYTORCH_ISSUES}"
)
_MPS_FAILED = f"try --cpu; where only MPS fails, report it to PyTorch: {_PYTORCH_ISSUES}"


class RankExit(NamedTuple):
    """How one rank ended; `code` is negative for a signal, as `subprocess` gives it."""

    rank: int
    pid: int
    code: int
    time: float  # when its program failed or ended, in seconds since the epoch
    was_stopping: bool  # it ended after the launcher had begun to stop the ranks
    crash: Crash | None = None  # the exception that nobody handled
    reason: str = ""  # the text of sys.exit("text")
    left_silently: bool = True  # neither an end nor an exception: os._exit, or a signal

    @property
    def is_failure(self) -> bool:
        return self.code not in (0, STOPPED_AND_SAVED)


class Failure(NamedTuple):
    """The root of a failed run, and what it took with it."""

    first: RankExit
    alike: tuple[int, ...]  # ranks that failed by themselves in the same way
    apart: tuple[RankExit, ...]  # ranks that failed by themselves in another way
    victims: tuple[int, ...]  # ranks that failed or were stopped because of it
    world_size: int
    evidence: str  # what else is known: the kernel's memory killer
    last_lines: tuple[str, ...]  # of the first rank's output
    parted: tuple[str, ...] = ()  # who kept the failed rank waiting, and where they all were

    @property
    def cause(self) -> str:
        """One sentence: which rank failed, and of what."""
        first = self.first
        if self.parted:
            return self.parted[0]
        whose = f"rank {first.rank}" + (f" of {self.world_size}" if self.world_size > 1 else "")
        if first.crash is not None:
            return f"{whose} failed with {first.crash.kind}"
        if first.code == 0:
            return f"{whose} left by os._exit(0) while the others went on"
        if first.code < 0:
            return f"{whose} was ended by {signal_name(-first.code)}{self.evidence}"
        reason = f": {first.reason}" if first.reason else ""
        return f"{whose} ended with exit code {first.code}{reason}"

    @property
    def aftermath(self) -> str:
        """What the other ranks did, in a few words."""
        words = ""
        if self.parted and self.first.crash is not None:
            return f"; rank {self.first.rank} then failed with {self.first.crash.kind}"
        if self.alike:
            words += f"; so did {named(self.alike)}"
        for end in self.apart:
            words += f"; rank {end.rank} failed with {end.crash.kind if end.crash else end.code}"
        if self.victims:
            words += f"; {named(self.victims)} stopped after rank {self.first.rank} failed"
        return words

    @property
    def details(self) -> str:
        """The failed rank's traceback, or its last lines where there is none."""
        if self.first.crash is not None:
            return "\n".join([self.first.crash.traceback.rstrip(), *self.parted[1:]])
        return "\n".join(self.last_lines[-_MOST_LINES:])

    @property
    def fix(self) -> str:
        """What to do next."""
        crash = self.first.crash
        if self.parted:
            return "have every rank enter the same collectives in the same order"
        if crash is not None and is_out_of_memory(crash):
            return _MEMORY_ADVICE
        if crash is not None and "not currently implemented for the MPS device" in crash.message:
            return _MPS_LACKS_IT
        if crash is not None and "MPS" in crash.message:
            return _MPS_FAILED
        if crash is not None and any(words in crash.message for words in _NO_NCCL):
            return _NCCL_ADVICE
        if "memory killer" in self.evidence:
            return "use less memory on this machine: fewer processes, loader workers or samples"
        if self.first.code == -signal.SIGSEGV:
            return "the stack above names the native code; a mismatched wheel is the usual cause"
        if self.first.code == 0:
            return "let every rank end by itself, or by sys.exit()"
        return "mend the script where the traceback points" if crash else "see its output above"

    @property
    def exit_code(self) -> int:
        """The code that the launcher ends with; a rank that left by os._exit(0) gives 1."""
        return shell_code(self.first.code) or 1

    def as_json(self) -> Mapping[str, object]:
        """Return the report for programs."""
        return {
            "cause": self.cause,
            "rank": self.first.rank,
            "pid": self.first.pid,
            "exit_code": self.exit_code,
            "time": self.first.time,
            "exception": None if self.first.crash is None else self.first.crash._asdict(),
            "victims": list(self.victims),
            "last_lines": list(self.last_lines),
            "parted": list(self.parted),
            "fix": self.fix,
        }

    def is_repeat_of(self, earlier: object) -> bool:
        """True when the same exception came at the same place again, so that retrying is vain."""
        if not isinstance(earlier, Failure):
            return False
        if self.first.crash is None or earlier.first.crash is None:
            return False
        ours, theirs = self.first.crash, earlier.first.crash
        return ours.traceback == theirs.traceback


def find_failure(
    exits: Iterable[RankExit],
    *,
    ranks: Sequence[int],
    world_size: int,
    evidence: str = "",
    last_lines: Mapping[int, Sequence[str]] | None = None,
    parted: Sequence[str] = (),
) -> Failure | None:
    """Return the first failure among `exits`, or None when no rank failed.

    A rank that left silently (os._exit, a signal) is to blame if it left before another one failed
    on the connection that it dropped. Exceptions of that kind may be noted a moment before its
    process is found dead. An abort is no silent death: that is how gloo's victims die.

    Args:
        exits: how this machine's ranks ended.
        ranks: all ranks of this machine.
        world_size: ranks on all machines.
        evidence: of the kernel's memory killer.
        last_lines: by rank, the end of its output.
        parted: how the ranks' ways parted; told where the first failure is one of communication.
    """
    ended = sorted(exits, key=lambda end: end.time)
    failures = [end for end in ended if end.is_failure]
    own = [end for end in failures if not end.was_stopping] or failures
    if not own:
        return None
    first = own[0]
    for end in ended if _may_be_a_victim(first) else ():
        is_silent = end.left_silently and not end.was_stopping and end.code != -signal.SIGABRT
        if is_silent and end.time < first.time + _FOUND_DEAD_WITHIN_S:
            first = end
            break
    fine = {end.rank for end in ended if end.code == 0 and not end.was_stopping}
    alike = {end.rank for end in own if end is not first and _is_alike(end, first)}
    apart = [
        end
        for end in own
        if end is not first
        and end.rank not in alike
        and end.crash is not None
        and not _may_be_a_victim(end)
    ]
    others = sorted({*ranks} - fine - {first.rank} - {end.rank for end in apart})
    return Failure(
        first=first,
        alike=tuple(rank for rank in others if rank in alike),
        apart=tuple(apart),
        victims=tuple(rank for rank in others if rank not in alike),
        world_size=world_size,
        evidence=evidence if first.code == -signal.SIGKILL else "",
        last_lines=tuple((last_lines or {}).get(first.rank, ())),
        parted=tuple(parted) if first.crash and is_of_communication(first.crash) else (),
    )


def _may_be_a_victim(end: RankExit) -> bool:
    """True where a rank may have failed because another one left; the script may have wrapped the
    error in one of its own.
    """
    if end.crash is None:
        return end.left_silently
    words = (*_COMMUNICATION, "DistBackendError", "DistNetworkError", "DistStoreError")
    return any(word in end.crash.traceback for word in words)


def _is_alike(end: RankExit, first: RankExit) -> bool:
    if end.was_stopping:
        return False
    if end.crash is None or first.crash is None:
        return end.crash is first.crash and end.code == first.code > 0
    # not by the exit code: it may have been stopped on its way out
    return (end.crash.kind, end.crash.message) == (first.crash.kind, first.crash.message)


def is_out_of_memory(crash: Crash) -> bool:
    """True for torch's errors of a full device: CUDA's class, and the words of MPS and the CPU."""
    words = ("out of memory", "can't allocate memory")
    return crash.kind == "OutOfMemoryError" or any(word in crash.message for word in words)


def is_of_communication(crash: Crash) -> bool:
    """True for an error of gloo's or NCCL's, whose cause is what another rank does."""
    if crash.kind in ("DistBackendError", "DistNetworkError", "DistStoreError"):
        return True
    is_torchs = crash.kind == "RuntimeError" and crash.is_from_torch
    return is_torchs and any(word in crash.message for word in _COMMUNICATION)


def signal_name(number: int) -> str:
    """Return SIGKILL for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def shell_code(code: int) -> int:
    """Return an exit code as a shell would: 128+n for signal n."""
    return code if code >= 0 else 128 - code


def ranges(ranks: Iterable[int]) -> str:
    """Return 0, 2-7 for 0, 2, 3, 4, 5, 6, 7."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and parts[-1][-1] == rank - 1:
            parts[-1] = [parts[-1][0], rank]
        else:
            parts.append([rank])
    return ", ".join("-".join(map(str, part)) for part in parts)


def named(ranks: Sequence[int]) -> str:
    """Return rank 3, or ranks 0, 2-7."""
    return f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)}"
