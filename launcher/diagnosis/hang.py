"""Compares the ranks' positions, and finds the ranks that their peers are waiting for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from headway.ipc import records
from headway.ipc.stderr import named, ranges, shown
from headway.launcher.diagnosis.stacks import (
    ProcessState,
    Stack,
    format_stack,
    is_joining_threads,
    parse_traceback,
    user_frame,
    user_stacks,
)
from headway.launcher.diagnosis.torch_messages import EQUAL_SIZE_COLLECTIVES

EXIT_CODE = 124
"""The launcher's exit code after `hang_timeout`, the same as that of timeout(1)."""

_INIT_FUNCTION = "init_process_group"  # creates the default process group


class NoStack(Enum):
    """The reason why the stack of a running rank is unknown."""

    UNCONNECTED = (
        "it is not a Python process, is still starting, or has closed the launcher's descriptors"
    )
    STOPPED = "its process is stopped"
    SILENT = "it does not answer: C code holds Python's GIL, or it gets no CPU time"


class Exit(NamedTuple):
    code: int
    is_reported: bool = False  # False after os._exit or a signal
    at: records.Frame | None = None  # the sys.exit call

    def __str__(self) -> str:
        if not self.is_reported:
            return f"exit code {self.code}"
        place = "at the end of the script" if self.at is None else f"by sys.exit at {self.at}"
        return f"exit code {self.code}, {place}"


class RankStatus(NamedTuple):
    rank: int
    exit: Exit | None = None  # None while the rank is running
    no_stack: NoStack | None = None
    stacks: tuple[Stack, ...] = ()  # of all threads, the main thread first
    groups: tuple[records.Group, ...] | None = None  # None: unknown
    progress: records.ProgressSnapshot | None = None  # None: the script has no Accelerator
    process: ProcessState | None = None  # the kernel's view, if the rank does not answer

    @property
    def is_absent(self) -> bool:
        return self.exit is not None or self.process is not None

    @property
    def place(self) -> records.Frame | None:
        return user_frame(self.stacks[0]) if self.stacks else None

    def group(self, name: str) -> records.Group | None:
        return next((g for g in self.groups or () if g.name == name), None)


class RankFacts(NamedTuple):
    rank: int
    code: int | None = None  # exit code; None while the process is running
    ends: Sequence[records.Crash | records.ScriptEnd] = ()  # as reported
    groups: tuple[records.Group, ...] | None = None
    progress: records.ProgressSnapshot | None = None
    answer: records.StatusReply | None = None  # the last answer; None if the channel is closed
    process: ProcessState | None = None  # set if the rank does not answer


def rank_status(facts: RankFacts) -> RankStatus:
    """Return a rank's status, which contains the rank's stacks or its exit.

    A process is treated as exited once its script has finished, no collective is pending, and
    Python is not waiting for threads.
    """
    status = RankStatus(facts.rank, groups=facts.groups, progress=facts.progress)
    end = next((end for end in facts.ends if isinstance(end, records.ScriptEnd)), None)
    crash = next((end for end in facts.ends if isinstance(end, records.Crash)), None)
    if facts.code is None:
        stacks, no_stack = _stacks_of(facts)
        is_waiting = any(group.first_pending is not None for group in facts.groups or ())
        if end is None or is_waiting or is_joining_threads(stacks):
            return status._replace(stacks=stacks, no_stack=no_stack, process=facts.process)
    if crash is not None:
        last = ((group, group.collectives[-1:]) for group in facts.groups or ())
        groups = facts.groups and tuple(  # torch marks a failed collective as done
            group._replace(collectives=tuple(call._replace(is_done=False) for call in calls))
            for group, calls in last
        )
        return status._replace(stacks=(parse_traceback(crash.traceback),), groups=groups)
    if end is None:
        return status._replace(exit=Exit(facts.code or 0))
    code = end.code if facts.code is None else facts.code
    return status._replace(exit=Exit(code, True, end.exited_at))


def _stacks_of(facts: RankFacts) -> tuple[tuple[Stack, ...], NoStack | None]:
    if facts.process is not None:
        return (), NoStack.STOPPED if facts.process.is_stopped else NoStack.SILENT
    if facts.answer is None:
        return (), NoStack.UNCONNECTED
    return user_stacks(facts.answer.stacks), None


class Divergence(NamedTuple):
    """Two sets of ranks at different positions, each described by an unfinished sentence."""

    ranks: tuple[int, ...]  # the ranks that the others wait for; may be empty
    sentence: str
    others: tuple[int, ...]  # the waiting ranks
    others_sentence: str


class Hang(NamedTuple):
    """A hang, in which no rank makes progress; has the interface of `failures.Failure`."""

    statuses: tuple[RankStatus, ...]
    after_s: int
    aftermath: str = ""  # a clause that names the killed ranks
    world_size: int = 0  # larger than `statuses` on multi-node runs
    exit_code: int = EXIT_CODE
    site: records.CrashSite | None = None  # a restart may help

    @property
    def cause(self) -> str:
        return f"no progress for {self.after_s} s: {explain(self.statuses)[0]}"

    @property
    def fix(self) -> str:
        phases = {status.progress.phase for status in self.statuses if status.progress is not None}
        calls = phases.intersection(records.CALLED_BY_ALL_RANKS)
        what = "see the stacks"
        if self.world_size > len(self.statuses):
            what = (
                "see the stacks on all machines: if all ranks wait in the same collective, check "
                "the network between the machines"
            )
        if explain_divergence(self.statuses):
            what = "fix the script where the ranks diverge"
            if calls and calls != phases:
                what = f"call accelerator.{min(calls)} there on all ranks, or on none"
        return f"{what}; if the script is only slow, raise --hang-timeout"

    @property
    def details(self) -> str:
        return "\n".join(explain(self.statuses)[1:])


def describe_stacks(statuses: Sequence[RankStatus]) -> str:
    """Return the formatted stacks of all running ranks, without duplicates."""
    ranks_by_stacks: dict[tuple[tuple[Stack, ...], str], list[int]] = {}
    for status in statuses:
        if status.exit is None:
            ranks_by_stacks.setdefault((status.stacks, _no_stack_reason(status)), []).append(
                status.rank
            )
    lines = []
    for (stacks, why), ranks in ranks_by_stacks.items():
        lines += ["", f"{named(ranks)}, most recent call last:"]
        lines += format_stack(stacks[0]) if stacks else [f"  no stack: {why}"]
        for stack, count in Counter(stacks[1:]).items():
            lines.append("  another thread:" if count == 1 else f"  {count} other threads:")
            lines += format_stack(stack)
    return "\n".join(lines)


def _no_stack_reason(status: RankStatus) -> str:
    if status.no_stack is None:
        return "it is not in the script"
    process = f" (its main thread is {status.process})" if status.process else ""
    return status.no_stack.value + process


def explain(statuses: Sequence[RankStatus]) -> list[str]:
    """Return the ranks' positions, one line per set of ranks; waiting ranks come last."""
    found = find_divergences(statuses)
    lines = [item.sentence + _format_places(statuses, item.ranks) for item in found if item.ranks]
    stopped = [status.rank for status in statuses if status.no_stack is NoStack.STOPPED]
    why = f"{named(stopped)}: {NoStack.STOPPED.value}" if stopped else ""
    lines = lines or [why or "no rank is known to be behind its peers"]
    lines += [item.others_sentence + _format_places(statuses, item.others) for item in found]
    mentioned = {rank for item in found for rank in item.ranks + item.others}
    ranks_by_place: dict[str, list[int]] = {}
    for status in statuses:
        place = ", ".join(filter(None, [_open_collective(status), _format_place(status)]))
        if place and status.rank not in mentioned:
            ranks_by_place.setdefault(place, []).append(status.rank)
    lines += [f"{named(ranks)}: {place}" for place, ranks in ranks_by_place.items()]
    return [shown(line) for line in lines]


def _open_collective(status: RankStatus) -> str:
    for group in status.groups or () if status.exit is None else ():
        entered = None if group.first_pending is None else group.collective(group.first_pending)
        if entered is not None:
            return f"in {entered.name} #{entered.number}{_group_suffix(group.name, group.ranks)}"
    return ""


def explain_divergence(statuses: Sequence[RankStatus]) -> list[str]:
    """Return the lines of `explain` if the ranks diverge, otherwise an empty list."""
    is_known = any(divergence.ranks for divergence in find_divergences(statuses))
    return explain(statuses) if is_known else []


def find_divergences(statuses: Sequence[RankStatus]) -> list[Divergence]:
    """Return the divergences, starting with those whose ranks do not wait for other ranks."""
    names = dict.fromkeys(group.name for status in statuses for group in status.groups or ())
    found = [d for name in names if (d := _find_divergence(name, statuses)) is not None]
    waiting = {rank for item in found for rank in item.others}
    found.sort(key=lambda d: (not d.ranks, bool(waiting & {*d.ranks})))
    return found or _find_missing_in_init(statuses)


def _find_divergence(name: str, statuses: Sequence[RankStatus]) -> Divergence | None:
    groups = {s.rank: group for s in statuses if (group := s.group(name)) is not None}
    members = next((group.ranks for group in groups.values() if group.ranks), tuple(groups))
    absent = {s.rank: s for s in statuses if s.is_absent and s.rank in members}
    for rank in absent:
        groups.setdefault(rank, records.Group(name, None, ()))  # its collectives are unknown
    suffix = _group_suffix(name, members)
    return _find_mismatch(groups, suffix) or _find_missing(groups, absent, suffix)


def _group_suffix(name: str, members: Sequence[int] | None) -> str:
    if name in ("0", records.HEADWAY_GROUP):
        return ""
    return f" of group {name}" + (f" (ranks {ranges(members)})" if members else "")


def _find_mismatch(groups: Mapping[int, records.Group], suffix: str) -> Divergence | None:
    for number in sorted({call.number for group in groups.values() for call in group.collectives}):
        ranks_by_collective: dict[str, list[int]] = {}
        for rank, group in sorted(groups.items()):
            entered = group.collective(number)
            if entered is not None:
                is_sized = entered.name in EQUAL_SIZE_COLLECTIVES
                size = f" of {entered.input_sizes}" if is_sized else ""
                text = f"{entered.name} #{number}{suffix}{size}"
                ranks_by_collective.setdefault(text, []).append(rank)
        if len(ranks_by_collective) > 1:
            (at, ranks), *rest = sorted(ranks_by_collective.items(), key=lambda item: len(item[1]))
            others = tuple(rank for _, those in rest for rank in those)
            return Divergence(
                tuple(ranks),
                f"the ranks entered different collectives: {named(ranks)} {at}",
                others,
                f"{named(others)} entered {' or '.join(text for text, _ in rest)}",
            )
    return None


def _find_missing(
    groups: Mapping[int, records.Group], absent: Mapping[int, RankStatus], suffix: str
) -> Divergence | None:
    has_ended = {rank for rank, status in absent.items() if status.exit}
    numbers = {rank: group.first_pending for rank, group in groups.items() if rank not in has_ended}
    number = min((number for number in numbers.values() if number is not None), default=None)
    if number is None:
        return None
    waiting = tuple(rank for rank, at in sorted(numbers.items()) if at == number)
    entered = groups[waiting[0]].collective(number)
    at = f"{entered.name if entered else 'a collective'} #{number}{suffix}"
    missing = [rank for rank, group in sorted(groups.items()) if group.last_entered < number]
    return _describe_missing(missing, absent, at, waiting)


def _describe_missing(
    missing: Sequence[int], absent: Mapping[int, RankStatus], at: str, waiting: tuple[int, ...]
) -> Divergence:
    others = f"{named(waiting)} {'waits' if len(waiting) == 1 else 'wait'} in {at}"
    gone = tuple(rank for rank in missing if rank in absent and absent[rank].exit)
    if gone:
        exit_ = absent[gone[0]].exit
        return Divergence(gone, f"{named(gone)} exited ({exit_}) before {at}", waiting, others)
    answered = tuple(rank for rank in missing if rank not in absent)
    if answered or not missing:
        verb = "has" if len(answered) == 1 else "have"
        return Divergence(answered, f"{named(answered)} {verb} not entered {at}", waiting, others)
    verb = "does" if len(missing) == 1 else "do"
    silent = f"{named(missing)} {verb} not answer, and had not entered {at} before"
    return Divergence(tuple(missing), silent, waiting, others)


def _find_missing_in_init(statuses: Sequence[RankStatus]) -> list[Divergence]:
    """Compare the stacks during init_process_group, before torch records collectives."""
    calls = {s.rank: [frame.function for frame in (*s.stacks, ())[0]] for s in statuses}
    inside = tuple(rank for rank, functions in calls.items() if _INIT_FUNCTION in functions)
    absent = {s.rank: s for s in statuses if s.is_absent}
    known = [s for s in statuses if s.exit or s.no_stack or s.place]  # other ranks are exiting
    missing = [s.rank for s in known if s.rank not in inside]
    if not inside or not missing:
        return []
    return [_describe_missing(missing, absent, _INIT_FUNCTION, inside)]


def _format_places(statuses: Sequence[RankStatus], ranks: Sequence[int]) -> str:
    those = [status for status in statuses if status.rank in ranks]
    return "".join(f", {place}" for place in dict.fromkeys(map(_format_place, those)) if place)


def _format_place(status: RankStatus) -> str:
    if status.place is None:
        return f"its main thread is {status.process}" if status.process else ""
    progress = status.progress
    doing = "" if progress is None else f"in step {progress.step + 1} ({progress.phase}), "
    return f"{doing}at {status.place}"


def describe(statuses: Sequence[RankStatus], idle_s: float) -> str:
    """Format the ranks' positions and stacks; `idle_s` is the time since the last progress."""
    if not statuses:
        return "no rank has started yet"
    heading = f"{named([status.rank for status in statuses])}: last progress {idle_s:.0f} s ago"
    return "\n".join(
        [heading, *(f"  {line}" for line in explain(statuses)), describe_stacks(statuses)]
    )


def last_collective_at(statuses: Sequence[RankStatus]) -> float:
    """Return the Unix time at which a rank last entered a collective; 0 if none has."""
    groups = (group for status in statuses for group in status.groups or ())
    return max((call.entered_at for group in groups for call in group.collectives), default=0.0)
