"""Trackers of other packages: TensorBoard, Weights & Biases, Comet, Trackio and MLflow.

WANDB_MODE=offline, and `init_kwargs={"comet_ml": {"online": False}}`, work without a network;
MLFLOW_TRACKING_URI says where MLflow keeps its runs.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from headway.contract.notes import say_once
from headway.contract.run import YES
from headway.trackers.tracker import GeneralTracker, flat_numbers, on_main_process, python_numbers

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
                _note_left_out(self, name, value, "; use get_tracker('tensorboard').writer for it")

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


def _note_left_out(tracker: GeneralTracker, name: str, value: object, why: str) -> None:
    kind = type(value).__name__
    say_once(f"{tracker.name} leaves out {name!r}, which is a {kind}{why}")


def _require_room(folder: str) -> None:
    """Raise OSError if nothing can be written: a new writer's thread would print a traceback."""
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        file.write(bytes(_PROBE_BYTES))


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
                hint = "; use get_tracker('comet_ml', unwrap=True) for it"
                _note_left_out(self, name, value, hint)

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


class MLflowTracker(GeneralTracker):
    """Logs to a run of MLflow.

    The variables MLFLOW_EXPERIMENT_NAME, MLFLOW_RUN_ID, MLFLOW_TAGS (a JSON object) and
    MLFLOW_NESTED_RUN override the arguments of those names.

    Args:
        experiment_name: the project; the experiment is created where there is none.
        logging_dir: where a new experiment keeps its artifacts, if not where MLflow would.
        run_id: go on with this run.
        tags: of the run and of a new experiment; a mapping, or a JSON object as text.
        nested_run: the run may begin inside another one.
        run_name: the name of a new run.
        description: of the run.
    """

    name = "mlflow"
    requires_logging_directory = False

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        tags: dict[str, Any] | str | None = None,
        nested_run: bool = False,
        run_name: str | None = None,
        description: str | None = None,
    ) -> None:
        super().__init__()
        variables = os.environ
        tags = variables.get("MLFLOW_TAGS", tags)
        nested = variables.get("MLFLOW_NESTED_RUN")
        self.experiment_name = variables.get("MLFLOW_EXPERIMENT_NAME", experiment_name)
        self.logging_dir = logging_dir
        self.run_id = variables.get("MLFLOW_RUN_ID", run_id)
        self.tags = json.loads(tags) if isinstance(tags, str) else tags
        self.nested_run = nested_run if nested is None else nested.lower() in YES
        self.run_name = run_name
        self.description = description

    @classmethod
    def going_on(cls, run_id: str) -> dict[str, Any]:
        return {"run_id": run_id}

    @on_main_process
    def start(self) -> None:
        self.active_run: Any = _mlflow().start_run(
            run_id=self.run_id,
            experiment_id=self._find_experiment(),
            run_name=self.run_name,
            nested=self.nested_run,
            tags=self.tags,
            description=self.description,
        )
        self.run_id = self.active_run.info.run_id

    def _find_experiment(self) -> str | None:
        """Return the id of the experiment, which is created where there is none."""
        if self.experiment_name is None:
            return None
        found = _mlflow().get_experiment_by_name(self.experiment_name)
        if found is not None:
            return str(found.experiment_id)
        folder = None if self.logging_dir is None else os.fspath(self.logging_dir)
        return str(_mlflow().create_experiment(self.experiment_name, folder, self.tags))

    @property
    def tracker(self) -> Any:
        """The active run."""
        return self.active_run

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Log parameters as texts; one that is too long for MLflow is left out, which is noted."""
        from mlflow.utils import validation

        longest, most = validation.MAX_PARAM_VAL_LENGTH, validation.MAX_PARAMS_TAGS_PER_BATCH
        parameters = {}
        for name, value in python_numbers(values).items():
            if len(str(value)) <= longest:
                parameters[name] = value
            else:
                say_once(
                    f"mlflow leaves out the parameter {name!r}: its text has more than {longest}"
                    " characters"
                )
        pairs = list(parameters.items())
        for begin in range(0, len(pairs), most):
            _mlflow().log_params(dict(pairs[begin : begin + most]))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers; others are left out, which is noted. Nested values get names with a slash.

        Args:
            values: numbers by name.
            step: the training step; MLflow takes 0 where there is none.
            kwargs: go to `mlflow.log_metrics`.
        """
        metrics = {}
        for name, value in flat_numbers(values).items():
            if isinstance(value, (int, float)):
                metrics[name] = value
            else:
                _note_left_out(self, name, value, ": its metrics are numbers")
        _mlflow().log_metrics(metrics, step=step, **kwargs)

    @on_main_process
    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Store a figure of matplotlib or plotly; `save_kwargs` go to `mlflow.log_figure`."""
        _mlflow().log_figure(figure, artifact_file, **save_kwargs)

    @on_main_process
    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Store the files in a folder, below `artifact_path` of the run."""
        _mlflow().log_artifacts(local_dir, artifact_path)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Store a file, below `artifact_path` of the run."""
        _mlflow().log_artifact(local_path, artifact_path)

    @on_main_process
    def finish(self) -> None:
        _mlflow().end_run()

    @on_main_process
    def finish_after_error(self) -> None:
        _mlflow().end_run("FAILED")


def _mlflow() -> Any:
    import mlflow

    return mlflow
