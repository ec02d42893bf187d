"""Adapters for TensorBoard, Weights & Biases, Trackio and MLflow.

With WANDB_MODE=offline, wandb needs no network. MLFLOW_TRACKING_URI sets where MLflow stores runs.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from headway.ipc.stderr import log_once
from headway.trackers.tracker import GeneralTracker, flat_numbers, on_main_process, python_numbers

_HPARAMS = (bool, int, float, str)  # types of hyperparameters in TensorBoard


class TensorBoardTracker(GeneralTracker):
    """Writes events to `<logging_dir>/<run_name>`.

    Args:
        run_name: the project name.
        logging_dir: the parent folder of all projects.
        kwargs: passed to `SummaryWriter`.
    """

    name = "tensorboard"
    packages = ("tensorboard", "tensorboardX")
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
        """Store hyperparameters in TensorBoard, and in hparams.yml in a separate folder.

        Values other than None, bools, numbers and strings are converted to strings.
        """
        import yaml

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
        """Log numbers as scalars, strings as text, and each mapping of numbers as a chart.

        Args:
            values: numbers, strings, or mappings of numbers, by name.
            step: the training step.
            kwargs: passed to `add_scalar`, `add_text` or `add_scalars`.
        """
        for name, value in python_numbers(values).items():
            if isinstance(value, (int, float)):
                self.writer.add_scalar(name, value, global_step=step, **kwargs)
            elif isinstance(value, str):
                self.writer.add_text(name, value, global_step=step, **kwargs)
            elif isinstance(value, dict):
                self.writer.add_scalars(name, value, global_step=step, **kwargs)
            else:
                hint = "; to log it, use get_tracker('tensorboard').writer"
                _note_skipped(self, name, value, hint)
        self.writer.flush()

    @on_main_process
    def finish(self) -> None:
        self.writer.close()


def _note_skipped(tracker: GeneralTracker, name: str, value: object, why: str) -> None:
    log_once(f"{tracker.name} skips {name!r}, which is a {type(value).__name__}{why}")


class PackageRunTracker(GeneralTracker):
    """Base class for packages whose runs have `config`, `log` and `finish`, as in wandb.

    Args:
        run_name: the name of the project in the package.
        kwargs: passed to the function that starts the run.
    """

    requires_logging_directory = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs

    def begin(self) -> Any:
        """Start and return a run."""
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
        """Log values of any type that the package supports; `kwargs` are passed to `run.log`."""
        self.run.log(python_numbers(values), step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        self.run.finish()


class WandBTracker(PackageRunTracker):
    """Logs to a wandb run.

    Args:
        run_name: the wandb project.
        kwargs: passed to `wandb.init`.
    """

    name = "wandb"
    packages = ("wandb",)

    @classmethod
    def resume_kwargs(cls, run_id: str) -> dict[str, Any]:
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
    def finish_after_error(self) -> None:
        self.run.finish(exit_code=1)


class TrackioTracker(PackageRunTracker):
    """Logs to a trackio run.

    Args:
        run_name: the trackio project.
        kwargs: passed to `trackio.init`.
    """

    name = "trackio"
    packages = ("trackio",)

    def begin(self) -> Any:
        import trackio

        return trackio.init(project=self.run_name, **self.init_kwargs)


class MLflowTracker(PackageRunTracker):
    """Logs to an MLflow run.

    Args:
        run_name: the MLflow experiment, which is created if it does not exist.
        kwargs: passed to `mlflow.start_run`, such as `run_name`, `run_id`, `tags`, `description`.
    """

    name = "mlflow"
    packages = ("mlflow",)

    @classmethod
    def resume_kwargs(cls, run_id: str) -> dict[str, Any]:
        return {"run_id": run_id}

    def begin(self) -> Any:
        import mlflow

        self._mlflow: Any = mlflow
        found = mlflow.get_experiment_by_name(self.run_name)
        experiment = found.experiment_id if found else mlflow.create_experiment(self.run_name)
        run = mlflow.start_run(experiment_id=experiment, **self.init_kwargs)
        self.run_id = str(run.info.run_id)
        return run

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Log parameters as strings; values that are too long are skipped, and a note is logged."""
        from mlflow.utils import validation

        longest, most = validation.MAX_PARAM_VAL_LENGTH, validation.MAX_PARAMS_TAGS_PER_BATCH
        parameters = {}
        for name, value in python_numbers(values).items():
            if len(str(value)) <= longest:
                parameters[name] = value
            else:
                log_once(
                    f"mlflow skips the parameter {name!r}: its value has more than {longest}"
                    " characters"
                )
        pairs = list(parameters.items())
        for begin in range(0, len(pairs), most):
            self._mlflow.log_params(dict(pairs[begin : begin + most]))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers; other values are skipped. Names of nested values are joined with "/".

        Args:
            values: numbers by name.
            step: the training step; MLflow uses 0 for None.
            kwargs: passed to `mlflow.log_metrics`.
        """
        metrics = {}
        for name, value in flat_numbers(values).items():
            if isinstance(value, (int, float)):
                metrics[name] = value
            else:
                _note_skipped(self, name, value, "; only numbers are supported")
        self._mlflow.log_metrics(metrics, step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        self._mlflow.end_run()

    @on_main_process
    def finish_after_error(self) -> None:
        self._mlflow.end_run("FAILED")
