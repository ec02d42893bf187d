"""Trackers whose service can do it go on in the run of the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from headway import Accelerator
from headway.trackers import choice
from headway.tracking import GeneralTracker, register_tracker_class


class Diary(GeneralTracker):
    """Counts its runs, and can go on in any of them."""

    name, requires_logging_directory, tracker = "diary", False, None
    begun = 0

    def __init__(self, project_name: str, run_id: str | None = None) -> None:
        super().__init__()
        self.run_id = run_id

    @classmethod
    def going_on(cls, run_id: str) -> dict[str, Any]:
        return {"run_id": run_id}

    def start(self) -> None:
        if self.run_id is None:
            Diary.begun += 1
            self.run_id = f"run {Diary.begun}"


@pytest.fixture(autouse=True)
def diary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_registered", {})
    register_tracker_class(Diary)


def accelerator() -> Accelerator:
    return Accelerator(cpu=True, log_with="diary", project_dir="runs")


def test_a_tracker_goes_on_in_the_run_of_the_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    first = accelerator()
    first.resume()
    first.init_trackers("project")
    begun = first.get_tracker("diary").run_id
    first.checkpoint()
    first.end_training()
    second = accelerator()
    second.resume()
    second.init_trackers("project")
    assert second.get_tracker("diary").run_id == begun
    second.end_training()
    assert "another run" not in capsys.readouterr().err
    late = accelerator()
    late.init_trackers("project")
    late.resume()
    assert "call accelerator.resume() before init_trackers()" in capsys.readouterr().err
    late.end_training()


def test_mlflow_goes_on_in_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    ids = []
    for _ in range(2):
        run = Accelerator(cpu=True, log_with="mlflow", project_dir="runs")
        run.resume()
        run.init_trackers("project")
        ids.append(run.get_tracker("mlflow", unwrap=True).info.run_id)
        run.checkpoint()
        run.end_training()
    assert ids[0] == ids[1]
