"""Weights & Biases; WANDB_MODE=offline works without a network."""

from __future__ import annotations

from typing import Any

from headway.trackers.tracker import GeneralTracker, on_main_process, python_numbers


class WandBTracker(GeneralTracker):
    """Logs to a run of wandb.

    Args:
        run_name: wandb's project.
        kwargs: go to `wandb.init`.
    """

    name = "wandb"
    requires_logging_directory = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs

    @on_main_process
    def start(self) -> None:
        import wandb

        self.run: Any = wandb.init(project=self.run_name, **self.init_kwargs)

    @property
    def tracker(self) -> Any:
        """The run."""
        return self.run

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Update the run's config."""
        self.run.config.update(python_numbers(values), allow_val_change=True)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values, of any kind that wandb knows; `kwargs` go to `run.log`."""
        self.run.log(python_numbers(values), step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log lists of images (arrays of shape [h, w, 3], or PIL's); `kwargs` go to `run.log`."""
        from wandb import Image

        for name, images in values.items():
            self.log({name: [Image(image) for image in images]}, step=step, **kwargs)

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log a table of `columns` and rows (`data`), or of a data frame."""
        from wandb import Table

        names: Any = columns
        table = Table(columns=names, data=data, dataframe=dataframe)
        self.log({table_name: table}, step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        self.run.finish()

    @on_main_process
    def finish_after_error(self) -> None:
        self.run.finish(exit_code=1)
