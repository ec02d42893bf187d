"""Trackio, which keeps its runs on this machine."""

from __future__ import annotations

from typing import Any

from headway.trackers.tracker import GeneralTracker, on_main_process, python_numbers


class TrackioTracker(GeneralTracker):
    """Logs to a run of trackio.

    Args:
        run_name: trackio's project.
        kwargs: go to `trackio.init`.
    """

    name = "trackio"
    requires_logging_directory = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs

    @on_main_process
    def start(self) -> None:
        import trackio

        self.run: Any = trackio.init(project=self.run_name, **self.init_kwargs)

    @property
    def tracker(self) -> Any:
        """The run."""
        return self.run

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Update the run's config."""
        self.run.config.update(python_numbers(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values, of any kind that trackio knows; `kwargs` go to `run.log`."""
        self.run.log(python_numbers(values), step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        self.run.finish()
