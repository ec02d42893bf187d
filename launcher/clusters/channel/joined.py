"""A machine that has joined a run, and how it is reported that one is lost. Pure."""

from __future__ import annotations

import time

from headway.launcher.clusters.channel.messages import Facts, Failed, Join, Ready

LAUNCH_FAILED = 4
"""The exit code of a run that has failed outside of its ranks, as that of a LaunchError."""


class Machine:
    """A machine that has joined.

    Args:
        peer: its connection.
        join: what it has told.
        address: where it is, as machine 0 sees it; empty for machine 0 itself.
        reached_at: the address of machine 0 that it has connected to.
        clock_ahead_s: of machine 0's clock.
        facts: those of machine 0, unless it tells others.
        now: on the monotonic clock.
    """

    def __init__(
        self,
        peer: int,
        join: Join,
        address: str,
        reached_at: str,
        clock_ahead_s: float,
        facts: Facts,
        now: float,
    ) -> None:
        self.peer = peer
        self.join = join
        self.address = address
        self.reached_at = reached_at
        self.clock_ahead_s = clock_ahead_s
        self.heard_at = now
        self.facts = facts
        self.rank = join.machine
        self.ready: Ready | None = None
        self.has_ranks = False  # in the current round
        self.is_checked = False
        self.is_done = False
        self.is_leaving = False
        self.word = ""  # of its ranks
        self.failure: tuple[int, float, Failed] | None = None  # doubt, when, what

    @property
    def label(self) -> str:
        """Its name in messages."""
        number = f"machine {self.rank}" if self.rank is not None else "a machine"
        return f"{number} ({self.join.host})"


def loss(label: str, machine: int, host: str, reason: str, word: str) -> Failed:
    """Return the failure of a run that has lost a machine.

    Args:
        label: its name in messages.
        machine: its rank.
        host: its host name.
        reason: how it was noticed.
        word: how far its ranks were, as it said last.
    """
    return Failed(
        machine=machine,
        host=host,
        cause=f"{label} was lost: {reason}",
        where=f"the connection to {label}",
        details=f"its ranks last told: {word}" if word else "",
        fix="look at that machine, its launcher's output and the network to it; where machines may "
        "go, a range lets a run go on: --num-machines 1:2",
        exit_code=LAUNCH_FAILED,
    )


def since(seconds: float) -> str:
    """Return that a machine has been silent for so many seconds, and the time of day since when."""
    began = time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))
    return f"nothing was heard from it for {seconds:.0f} s, since {began}"
