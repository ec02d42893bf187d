"""The adapters of other packages, with their offline back ends: one real training for all."""

from __future__ import annotations

import json
import sqlite3
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from headway.trackers.choice import get_available_trackers
from tests.distributed.launching import environment, execute

pytestmark = pytest.mark.processes
SCRIPT = Path(__file__).with_name("all_trackers.py")


class Training(NamedTuple):
    folder: Path
    seen: dict[str, Any]
    err: str


@pytest.fixture(scope="module")
def training() -> Iterator[Training]:
    if {"tensorboard", "wandb", "mlflow", "trackio"}.isdisjoint(get_available_trackers()):
        pytest.skip("no tracker of another package is installed")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        variables = {
            **dict.fromkeys(("HOME", "TMPDIR", "WANDB_DIR"), name),
            "WANDB_MODE": "offline",
            "WANDB_SILENT": "true",
            "CUDA_VISIBLE_DEVICES": "",
            "TRACKIO_DIR": str(folder / "trackio"),
            "MLFLOW_TRACKING_URI": f"file://{folder / 'mlflow'}",
            "MLFLOW_ALLOW_FILE_STORE": "true",
        }
        command = [sys.executable, str(SCRIPT), name]
        ended = execute(command, environment(**variables), timeout_s=170, cwd=folder, code=0)
        (line,) = [line for line in ended.stdout.splitlines() if line.startswith("SEEN ")]
        yield Training(folder, json.loads(line.removeprefix("SEEN ")), ended.stderr)


def needs(name: str) -> None:
    """Skip a test where a tracker is not installed; it is not imported: wandb leaves files."""
    if name not in get_available_trackers():
        pytest.skip(f"{name} is not installed")


def test_tensorboard(training: Training) -> None:
    needs("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = training.folder / "project"
    events: Any = EventAccumulator(str(next(folder.glob("events.out.*"))))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("loss")]
    assert found == [(3, 0.5), (4, 0.5)]
    assert [event.step for event in events.Scalars("unnumbered")] == [6]
    assert {"loss", "accuracy"} <= set(events.Tags()["scalars"])
    assert events.Tags()["images"] == ["images"]
    assert events.Tags()["tensors"] == ["note/text_summary"]
    assert (folder / "train_lr").is_dir(), "a mapping is a chart of its own"
    (parameters,) = folder.rglob("hparams.yml")
    assert "layers: '[1, 2]'" in parameters.read_text()
    assert training.err.count("tensorboard skips 'list'") == 1


def test_wandb(training: Training) -> None:
    needs("wandb")
    seen = training.seen["wandb"]
    assert seen["config"]["lr"] == 0.001
    assert seen["config"]["nested"] == {"a": 1}
    assert seen["summary"]["loss"] == 0.5
    assert seen["summary"]["train"]["lr"] == 1.5
    assert list(training.folder.glob("wandb/offline-run-*/*.wandb"))


def test_mlflow(training: Training) -> None:
    needs("mlflow")
    seen = training.seen["mlflow"]
    assert seen["params"]["layers"] == "[1, 2]"
    assert seen["metrics"] == {"loss": 0.5, "accuracy": 0.25, "train/lr": 1.5}
    assert (seen["steps"], seen["status"]) == ([3, 4], "FINISHED")
    assert training.err.count("mlflow skips the parameter 'long'") == 1
    assert training.err.count("mlflow skips 'note'") == 1


def test_trackio(training: Training) -> None:
    needs("trackio")
    with sqlite3.connect(training.folder / "trackio" / "project.db") as database:
        rows = database.execute("select step, metrics from metrics order by step").fetchall()
        (config,) = database.execute("select config from configs").fetchone()
    database.close()
    assert [step for step, _ in rows] == [3, 4, 5]
    assert json.loads(rows[0][1])["loss"] == 0.5
    assert json.loads(config)["lr"] == 0.001
