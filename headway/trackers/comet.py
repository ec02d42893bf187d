"""Comet; `init_kwargs={"comet_ml": {"online": False}}` works without a network."""

from __future__ import annotations

from typing import Any

from headway.contract.notes import say_once
from headway.trackers.package_runs import PackageRunTracker
from headway.trackers.tracker import flat_numbers, on_main_process, python_numbers


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
