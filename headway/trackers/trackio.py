"""Trackio, which keeps its runs on this machine."""

from __future__ import annotations

from typing import Any

from headway.trackers.package_runs import PackageRunTracker


class TrackioTracker(PackageRunTracker):
    """Logs to a run of trackio.

    Args:
        run_name: trackio's project.
        kwargs: go to `trackio.init`.
    """

    name = "trackio"

    def begin(self) -> Any:
        import trackio

        return trackio.init(project=self.run_name, **self.init_kwargs)
