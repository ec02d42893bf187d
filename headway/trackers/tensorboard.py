"""TensorBoard, by torch's SummaryWriter."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from headway.contract.notes import say_once
from headway.trackers.tracker import GeneralTracker, on_main_process, python_numbers

_PROBE_BYTES = 4096  # more than the head of a file of events
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
        self._has_failed = False
        self.writer: Any = self._new_writer()

    def _new_writer(self) -> Any:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError:
            from tensorboardX import SummaryWriter  # type: ignore[no-redef]
        return SummaryWriter(self.logging_dir, **self.init_kwargs)

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
        if self._has_failed:
            _require_room(self.logging_dir)
            self.writer = self._new_writer()
            self._has_failed = False
        try:
            self._add(python_numbers(values), step, kwargs)
            self.writer.flush()
        except OSError:
            self._has_failed = True  # a writer that could not write once never does again
            raise

    def _add(self, values: dict[str, Any], step: int | None, kwargs: dict[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, (int, float)):
                self.writer.add_scalar(name, value, global_step=step, **kwargs)
            elif isinstance(value, str):
                self.writer.add_text(name, value, global_step=step, **kwargs)
            elif isinstance(value, dict):
                self.writer.add_scalars(name, value, global_step=step, **kwargs)
            else:
                say_once(
                    f"tensorboard leaves out {name!r}, which is a {type(value).__name__};"
                    " use get_tracker('tensorboard').writer for it"
                )

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
        if not self._has_failed:
            self.writer.close()


def _require_room(folder: str) -> None:
    """Raise OSError if nothing can be written: a new writer's thread would print a traceback."""
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        file.write(bytes(_PROBE_BYTES))
