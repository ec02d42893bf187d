"""A machine of a run: whether it may join, and how it is reported that one cannot go on. Pure."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from headway.contract.figures import Figures
from headway.errors import HeadwayError
from headway.launcher.machines.messages import (
    Facts,
    Failed,
    HeartbeatLost,
    Join,
    Ready,
    Refused,
)
from headway.settings.setting import Machines

LAUNCH_FAILED = 4
"""The exit code of a run that has failed outside of its ranks, as that of a LaunchError."""


class Seen(NamedTuple):
    """Who is told what machine 0 learns of the ranks of others, by the thread of the channel."""

    steps: Callable[[int, Figures, int, str], object] = lambda *_: None  # rank, ..., machine, host
    loss: Callable[[int], object] = lambda _: None  # of this machine


UNSEEN = Seen()
"""Nobody."""


@dataclass(eq=False)
class Machine:
    """A machine that has joined.

    Args:
        peer: its connection.
        join: what it has told.
        address: where it is, as machine 0 sees it; empty for machine 0 itself.
        reached_at: the address of machine 0 that it has connected to.
        clock_ahead_s: of machine 0's clock.
        facts: those of machine 0, unless it tells others.
        heard_at: when it has last said something, on the monotonic clock.
        rank: the one it asked for, until it is given one.
        ready: what it said when it last waited for a round; None while it does not.
        has_ranks: in the current round.
        word: the last one of its ranks.
        failure: doubt, when, what: how its ranks have failed in the current round.
    """

    peer: int
    join: Join
    address: str
    reached_at: str
    clock_ahead_s: float
    facts: Facts
    heard_at: float
    rank: int | None = field(init=False)
    ready: Ready | None = None
    has_ranks: bool = False
    is_checked: bool = False
    is_done: bool = False
    is_leaving: bool = False
    word: str = ""
    failure: tuple[int, float, Failed] | None = None

    def __post_init__(self) -> None:
        self.rank = self.join.machine

    @property
    def label(self) -> str:
        """Its name in messages."""
        return f"{numbered(self.rank)} ({self.join.host})"


def numbered(rank: int | None) -> str:
    """Return what a machine is called without its host; None: it has not been given a rank."""
    return "a machine" if rank is None else f"machine {rank}"


def why_not(
    join: Join, least: int, most: int, taken: Collection[int | None], *, is_full: bool
) -> Refused | None:
    """Return why a machine cannot join; None if it can.

    Args:
        join: what it has told.
        least: machines that the run needs.
        most: machines that it can have.
        taken: the ranks that machines have asked for; None is no such rank.
        is_full: the run has all of its machines.
    """
    if (join.least, join.most) != (least, most):
        asked, ours = Machines(join.most, join.least), Machines(most, least)
        return Refused(
            f"num_machines is {asked} here, but {ours} on machine 0",
            f"{numbered(join.machine)}, and machine 0",
            "pass the same --num-machines on every machine",
        )
    if join.machine is not None and join.machine in taken:
        return Refused(
            f"machine_rank {join.machine} was given to two machines",
            "the run at machine 0",
            f"give every machine its own --machine-rank, from 0 to {most - 1}",
        )
    if join.machine is not None and join.machine >= most:
        return Refused(
            f"machine_rank is {join.machine}, but the run has {most} machines",
            "the run at machine 0",
            f"give every machine its own --machine-rank, from 0 to {most - 1}",
        )
    if is_full:
        return Refused(
            f"the run has all of its {most} machines",
            "the run at machine 0",
            "raise --num-machines on every machine, or leave this one out",
        )
    return None


def refused_machine(join: Join, refused: Refused) -> Failed:
    """Return the failure of a run that cannot begin, because a machine was refused."""
    return Failed(
        machine=join.machine or 0,
        host=join.host,
        cause=f"{numbered(join.machine)} ({join.host}) was refused: {refused.what}",
        where=refused.where,
        details="",
        fix=refused.fix,
        exit_code=LAUNCH_FAILED,
    )


def loss(label: str, machine: int, host: str, reason: str, word: str) -> Failed:
    """Return the failure of a run that has lost a machine.

    Args:
        label: its name in messages.
        machine: its rank.
        host: its host name.
        reason: how it was noticed.
        word: how far its ranks were, as it said last.
    """
    go_on = "where machines may go, a range lets a run go on: --num-machines 1:2"
    if machine == 0:
        go_on = "no other machine can take the place of machine 0"
    return Failed(
        machine=machine,
        host=host,
        cause=f"{label} was lost: {reason}",
        where=f"the connection to {label}",
        details=f"its ranks last told: {word}" if word else "",
        fix=f"look at that machine, its launcher's output and the network to it; {go_on}",
        exit_code=LAUNCH_FAILED,
    )


def failure_of(error: HeadwayError, machine: int) -> Failed:
    """Return what other machines are told of an error of this machine's launcher."""
    problem = error.problems[0]
    return Failed(
        machine=machine,
        host=socket.gethostname(),
        cause=problem.what,
        where=problem.where,
        details="",
        fix=problem.fix,
        exit_code=error.exit_code,
        is_final=True,
    )


def ended(error: EOFError | OSError) -> str:
    """Return how a connection to a machine has ended."""
    if isinstance(error, (EOFError, ConnectionError)):
        return "its launcher has ended"
    return f"the connection to it broke: {error.strerror or error}"


def silent_for(seconds: float) -> str:
    """Return that a machine has been silent for so many seconds, and the time of day since when."""
    return f"nothing was heard from it for {seconds:.0f} s, since {time_of_day(seconds)}"


def unheard(message: HeartbeatLost, of: str) -> str:
    """Return that a machine has left because it heard nothing of another one, and since when."""
    return (
        f"it has heard nothing from {of} since {message.since}: the link from {of} to it is cut, "
        f"or {of} was suspended"
    )


def time_of_day(seconds_ago: float) -> str:
    """Return what the clocks here said so many seconds ago."""
    return time.strftime("%H:%M:%S", time.localtime(time.time() - seconds_ago))
