"""How long ranks may take to stop before they are killed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from headway.settings.table import Settings

_VICTIM_S = 5
_SAVING_S = 600
_JOB_END = "SLURM_JOB_END_TIME"  # seconds since the epoch, where SLURM says so
_SPARE_S = 5  # for the report, before the scheduler kills the launcher too


class Grace(NamedTuple):
    """How long ranks may take to stop, in seconds.

    Args:
        usual_s: after a stop signal.
        victim_s: after another rank has failed.
        to_save_s: after a stop signal, where ranks have told that they will save.
        job_ends_at: when the scheduler kills all of the job, since the epoch.
    """

    usual_s: float
    victim_s: float
    to_save_s: float
    job_ends_at: float = float("inf")

    def saving_s(self, now: float) -> float:
        """Return how long a save may take that begins `now`, seconds since the epoch."""
        return min(self.to_save_s, max(self.job_ends_at - now - _SPARE_S, self.usual_s))


def grace_of(settings: Settings, environ: Mapping[str, str]) -> Grace:
    """Return what a launch with these settings grants; one that the user has set holds for all."""
    usual = settings.grace_period_s
    ends = environ.get(_JOB_END, "")
    ends_at = float(ends) if ends.isascii() and ends.isdecimal() else float("inf")
    if settings.are_user_set("grace_period_s"):
        return Grace(usual, usual, usual, ends_at)
    return Grace(usual, min(usual, _VICTIM_S), max(usual, _SAVING_S), ends_at)
