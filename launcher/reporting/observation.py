"""Whether ranks that were watched for some seconds hang, or are only slow. Pure.

At any moment some rank is behind the others. It is named only if all have stood still for much
longer than they did before between two collectives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum, auto
from itertools import pairwise
from typing import NamedTuple

from headway.contract.records import shown
from headway.launcher.reporting.hang import (
    RankStatus,
    describe_stacks,
    explain,
    explain_places,
    find_divergences,
)
from headway.launcher.reporting.rank_names import named

_LEAST_S = 5.0  # of standing still, before a rank is named
_LONGER_THAN_BEFORE = 3  # times the longest time between two collectives
_WITHOUT_HISTORY_S = 30.0  # instead, until there were two collectives


class Verdict(Enum):
    """What was seen."""

    MOVING = auto()
    STILL = auto()
    TOO_EARLY = auto()  # to tell
    ALIKE = auto()  # no rank waits for another


class Observation(NamedTuple):
    """What ranks did while they were watched."""

    statuses: tuple[RankStatus, ...]  # at the end
    has_moved: bool  # a sequence number, a heartbeat, an import or a line of output
    still_s: float  # how long ago the last movement was, as far as it is known

    @property
    def verdict(self) -> Verdict:
        if not any(one.ranks for one in find_divergences(self.statuses)):
            return Verdict.ALIKE
        if self.has_moved:
            return Verdict.MOVING
        return Verdict.STILL if self.still_s >= self.suspicious_s else Verdict.TOO_EARLY

    @property
    def suspicious_s(self) -> float:
        """How long ranks may stand still before one is named."""
        longest = max((gap for one in self.statuses for gap in _gaps(one)), default=None)
        if longest is None:
            return _WITHOUT_HISTORY_S
        return max(_LEAST_S, _LONGER_THAN_BEFORE * longest)

    def describe(self) -> str:
        """Return all that is known, for a person: what was seen, the places, and the stacks."""
        if not self.statuses:
            return "no rank has started yet"
        ranks = named([one.rank for one in self.statuses])
        verdict, still = self.verdict, f"no progress for {self.still_s:.0f} s"
        if verdict is Verdict.STILL:
            return self._lines(f"{ranks}: {still}", explain(self.statuses))
        headings = {
            Verdict.MOVING: "slow, still moving",
            Verdict.TOO_EARLY: f"{still}, which is too short to tell a hang from a slow step; "
            f"ask again after {self.suspicious_s:.0f} s",
            Verdict.ALIKE: "no rank is behind another",
        }
        return self._lines(f"{ranks}: {headings[verdict]}", explain_places(self.statuses))

    def _lines(self, heading: str, lines: Sequence[str]) -> str:
        body = [f"  {shown(line)}" for line in lines]
        return "\n".join([heading, *body, describe_stacks(self.statuses)])


def newest_entry(statuses: Sequence[RankStatus]) -> float:
    """Return when a rank last entered a collective, in seconds since the epoch; 0 for never."""
    return max((time for one in statuses for time in _entries(one)), default=0.0)


def _entries(status: RankStatus) -> list[float]:
    groups = status.groups or ()
    return sorted(one.entered_at for group in groups for one in group.collectives)


def _gaps(status: RankStatus) -> Iterator[float]:
    for earlier, later in pairwise(_entries(status)):
        yield later - earlier
