"""What trackers have in common whose package gives a run to log to."""

from __future__ import annotations

from typing import Any

from headway.trackers.tracker import GeneralTracker, on_main_process, python_numbers


class PackageRunTracker(GeneralTracker):
    """Logs to a run of a package, which has `config`, `log` and `finish` as wandb's has.

    Args:
        run_name: the package's project.
        kwargs: go to the function that begins the run.
    """

    requires_logging_directory = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs

    def begin(self) -> Any:
        """Return a new run."""
        raise NotImplementedError

    @on_main_process
    def start(self) -> None:
        self.run: Any = self.begin()

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
        """Log values, of any kind that the package knows; `kwargs` go to the run's `log`."""
        self.run.log(python_numbers(values), step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        self.run.finish()
