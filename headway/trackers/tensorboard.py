"""TensorBoard, by torch's SummaryWriter."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import yaml

from headway.trackers.notes import note_once
from headway.trackers.tracker import GeneralTracker, on_main_process, python_numbers

_HPARAMS = (bool, int, float, str)  # what TensorBoard takes as a hyperparameter


class TensorBoardTracker(GeneralTracker):
    """Writes events to `<logging_dir>/<run_name>`.

    Args:
        run_name: the project.
        logging_dir: the folder of all projects.
        kwargs: go to `SummaryWriter`.
    """

    name = "tensorboard"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.logging_dir = os.path.join(logging_dir, run_name)
        self.init_kwargs = kwargs

    @on_main_process
    def start(self) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError:
            from tensorboardX import SummaryWriter  # type: ignore[no-redef]
        self.writer: Any = SummaryWriter(self.logging_dir, **self.init_kwargs)

    @property
    def tracker(self) -> Any:
        """The SummaryWriter."""
        return self.writer

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store hyperparameters for TensorBoard, and in a file hparams.yml in a folder of its own.

        A value that is not a bool, a number or a text is stored as its text.
        """
        plain = {
            name: value if value is None or isinstance(value, _HPARAMS) else str(value)
            for name, value in python_numbers(values).items()
        }
        self.writer.add_hparams(plain, metric_dict={})
        self.writer.flush()
        folder = Path(self.logging_dir) / str(time.time())
        folder.mkdir(parents=True)
        (folder / "hparams.yml").write_text(yaml.safe_dump(plain))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Add numbers as scalars, texts as texts, and mappings of numbers as one chart each.

        Args:
            values: numbers, texts, or mappings of numbers, by name.
            step: the training step.
            kwargs: go to `add_scalar`, `add_text` or `add_scalars`.
        """
        for name, value in python_numbers(values).items():
            if isinstance(value, (int, float)):
                self.writer.add_scalar(name, value, global_step=step, **kwargs)
            elif isinstance(value, str):
                self.writer.add_text(name, value, global_step=step, **kwargs)
            elif isinstance(value, dict):
                self.writer.add_scalars(name, value, global_step=step, **kwargs)
            else:
                note_once(
                    f"tensorboard leaves out {name!r}, which is a {type(value).__name__};"
                    " use get_tracker('tensorboard').writer for it"
                )
        self.writer.flush()

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Add batches of images.

        Args:
            values: by name, tensors or arrays of shape [n, 3, h, w], or as `dataformats` says.
            step: the training step.
            kwargs: go to `add_images`.
        """
        for name, images in values.items():
            self.writer.add_images(name, images, global_step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        self.writer.close()
