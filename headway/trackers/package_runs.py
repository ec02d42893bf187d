"""Trackers whose packages give a run to log to: Weights & Biases, Comet and Trackio.

WANDB_MODE=offline, and `init_kwargs={"comet_ml": {"online": False}}`, work without a network.
"""

from __future__ import annotations

from typing import Any

from headway.contract.notes import say_once
from headway.trackers.tracker import GeneralTracker, flat_numbers, on_main_process, python_numbers


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


class CometMLTracker(PackageRunTracker):
    """Logs to an experiment of Comet; the API key is in Comet's configuration.

    Args:
        run_name: Comet's project.
        kwargs: go to `comet_ml.start`.
    """

    name = "comet_ml"

    def begin(self) -> Any:
        import comet_ml

        return comet_ml.start(project_name=self.run_name, **self.init_kwargs)

    @property
    def writer(self) -> Any:
        """The experiment."""
        return self.run

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Log hyperparameters."""
        self.writer.log_parameters(python_numbers(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as metrics and texts as others; nested values get names with a slash.

        Args:
            values: numbers and texts by name.
            step: the training step.
            kwargs: go to `log_metric` or `log_other`.
        """
        if step is not None:
            self.writer.set_step(step)
        for name, value in flat_numbers(values).items():
            if isinstance(value, (int, float)):
                self.writer.log_metric(name, value, step=step, **kwargs)
            elif isinstance(value, str):
                self.writer.log_other(name, value, **kwargs)
            else:
                say_once(
                    f"comet_ml leaves out {name!r}, which is a {type(value).__name__};"
                    " use get_tracker('comet_ml', unwrap=True) for it"
                )

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log lists of images (arrays of shape [h, w, 3], or PIL's); `kwargs` go to `log_image`."""
        for name, images in values.items():
            for index, image in enumerate(images):
                self.writer.log_image(image, name=f"{name}/{index}", step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        self.writer.end()


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
