"""Comet; `init_kwargs={"comet_ml": {"online": False}}` works without a network."""

from __future__ import annotations

from typing import Any

from headway.trackers.notes import note_once
from headway.trackers.tracker import GeneralTracker, flat_numbers, on_main_process, python_numbers


class CometMLTracker(GeneralTracker):
    """Logs to an experiment of Comet; the API key is in Comet's configuration.

    Args:
        run_name: Comet's project.
        kwargs: go to `comet_ml.start`.
    """

    name = "comet_ml"
    requires_logging_directory = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs

    @on_main_process
    def start(self) -> None:
        import comet_ml

        self.writer: Any = comet_ml.start(project_name=self.run_name, **self.init_kwargs)

    @property
    def tracker(self) -> Any:
        """The experiment."""
        return self.writer

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
                note_once(
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
