"""Weights & Biases; WANDB_MODE=offline works without a network."""

from __future__ import annotations

from typing import Any

from headway.trackers.package_runs import PackageRunTracker
from headway.trackers.tracker import on_main_process, python_numbers


class WandBTracker(PackageRunTracker):
    """Logs to a run of wandb.

    Args:
        run_name: wandb's project.
        kwargs: go to `wandb.init`.
    """

    name = "wandb"

    @classmethod
    def going_on(cls, run_id: str) -> dict[str, Any]:
        return {"id": run_id, "resume": "allow"}

    def begin(self) -> Any:
        import wandb

        run = wandb.init(project=self.run_name, **self.init_kwargs)
        self.run_id = str(run.id)
        return run

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Update the run's config."""
        self.run.config.update(python_numbers(values), allow_val_change=True)

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
    def finish_after_error(self) -> None:
        self.run.finish(exit_code=1)
