"""MLflow; MLFLOW_TRACKING_URI says where it keeps its runs."""

from __future__ import annotations

import json
import os
from typing import Any

from headway.contract.notes import say_once
from headway.contract.run import YES
from headway.trackers.tracker import GeneralTracker, flat_numbers, on_main_process, python_numbers


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
        import mlflow

        self.active_run: Any = mlflow.start_run(
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
        import mlflow

        if self.experiment_name is None:
            return None
        found = mlflow.get_experiment_by_name(self.experiment_name)
        if found is not None:
            return str(found.experiment_id)
        folder = None if self.logging_dir is None else os.fspath(self.logging_dir)
        return str(mlflow.create_experiment(self.experiment_name, folder, self.tags))

    @property
    def tracker(self) -> Any:
        """The active run."""
        return self.active_run

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Log parameters as texts; one that is too long for MLflow is left out, which is noted."""
        import mlflow
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
            mlflow.log_params(dict(pairs[begin : begin + most]))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers; others are left out, which is noted. Nested values get names with a slash.

        Args:
            values: numbers by name.
            step: the training step; MLflow takes 0 where there is none.
            kwargs: go to `mlflow.log_metrics`.
        """
        import mlflow

        metrics = {}
        for name, value in flat_numbers(values).items():
            if isinstance(value, (int, float)):
                metrics[name] = value
            else:
                say_once(
                    f"mlflow leaves out {name!r}, which is a {type(value).__name__}:"
                    " its metrics are numbers"
                )
        mlflow.log_metrics(metrics, step=step, **kwargs)

    @on_main_process
    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Store a figure of matplotlib or plotly; `save_kwargs` go to `mlflow.log_figure`."""
        import mlflow

        mlflow.log_figure(figure, artifact_file, **save_kwargs)

    @on_main_process
    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Store the files in a folder, below `artifact_path` of the run."""
        import mlflow

        mlflow.log_artifacts(local_dir, artifact_path)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Store a file, below `artifact_path` of the run."""
        import mlflow

        mlflow.log_artifact(local_path, artifact_path)

    @on_main_process
    def finish(self) -> None:
        import mlflow

        mlflow.end_run()

    @on_main_process
    def finish_after_error(self) -> None:
        import mlflow

        mlflow.end_run("FAILED")
