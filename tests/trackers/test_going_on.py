"""Trackers whose service can do it go on in the run of the checkpoint."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from headway import Accelerator
from headway.trackers import choice
from headway.trackers.jsonl import JsonlTracker
from headway.trackers.run_file import read_metrics
from headway.tracking import GeneralTracker
from tests.distributed.launching import environment, run


class Diary(GeneralTracker):
    """Counts its runs, and can go on in any of them."""

    name, requires_logging_directory, tracker = "diary", False, None
    begun = 0

    def __init__(self, project_name: str, run_id: str | None = None) -> None:
        super().__init__()
        self.run_id, self.steps = run_id, list[Any]()

    def log(self, values: Any, step: int | None = None, **_: Any) -> None:
        self.steps.append(step)

    @classmethod
    def resume_kwargs(cls, run_id: str) -> dict[str, Any]:
        return {"run_id": run_id}

    def start(self) -> None:
        if self.run_id is None:
            Diary.begun += 1
            self.run_id = f"run {Diary.begun}"


@pytest.fixture(autouse=True)
def diary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(choice.LOGGER_TYPE_TO_CLASS, "diary", Diary)


def accelerator() -> Accelerator:
    return Accelerator(cpu=True, log_with="diary", project_dir="runs")


def test_a_tracker_goes_on_in_the_run_of_the_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    first = accelerator()
    first.resume()
    first.init_trackers("project")
    begun = first.get_tracker("diary").run_id
    first.log({"loss": 2.0}, step=3)
    first.checkpoint()
    first.end_training()
    second = accelerator()
    second.resume()
    second.init_trackers("project")
    assert second.get_tracker("diary").run_id == begun
    second.log({"loss": 1.0})
    assert second.get_tracker("diary").steps == [4]
    second.end_training()
    assert "another run" not in capsys.readouterr().err
    late = accelerator()
    late.init_trackers("project")
    late.resume()
    assert "call accelerator.resume() before init_trackers()" in capsys.readouterr().err
    late.end_training()


def jsonl_run(steps: range, *, has_saved: bool = True) -> Path:
    """Train these steps, and return the file of the run."""
    run = Accelerator(cpu=True, log_with="jsonl", project_dir="runs")
    run.resume()
    run.init_trackers("project", config={"steps": len(steps)})
    for step in steps:
        if has_saved and step == steps[-1]:
            run.checkpoint()
        run.log({"loss": 100 - step + len(steps)}, step=step)
    path: Path = run.get_tracker("jsonl").path
    run.end_training()
    return path


def test_jsonl_goes_on_in_its_file_and_what_is_done_again_counts_once() -> None:
    path = jsonl_run(range(4))
    with path.open("a") as file:
        file.write('{"step": 4, "val')  # as a process leaves it that is killed
    assert jsonl_run(range(3, 8)) == path
    assert len(list(path.parent.iterdir())) == 1
    loss = read_metrics(path)["loss"]
    assert loss.steps == list(range(8))
    assert loss.values == [
        *(104 - step for step in range(3)),
        *(105 - step for step in range(3, 8)),
    ]


def test_jsonl_begins_a_run_where_that_of_the_checkpoint_is_gone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = jsonl_run(range(2))
    path.unlink()
    path.symlink_to("elsewhere")
    other = jsonl_run(range(2), has_saved=False)
    assert other.parent == path.parent
    assert other != path
    assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize("run_id", ["../outside", "", "..", "a/b", "/etc/hostname", "a\0b"])
def test_jsonl_goes_on_in_no_file_of_another_folder(run_id: str, tmp_path: Path) -> None:
    (tmp_path / "outside.jsonl").write_bytes(jsonl_run(range(1)).read_bytes())
    tracker = JsonlTracker("project", tmp_path, run_id=run_id)
    tracker.start()
    assert tracker.path.parent == tmp_path / "project"
    tracker.finish()
    assert read_metrics(tracker.path) == {}


TWICE = """
import sys
from headway import Accelerator
name = sys.argv[1]
for _ in range(2):
    run = Accelerator(cpu=True, log_with=name, project_dir="runs")
    run.resume()
    run.init_trackers("project")
    tracker = run.get_tracker(name, unwrap=True)
    print(tracker.id if name == "wandb" else tracker.info.run_id)
    run.checkpoint()
    run.end_training()
"""


@pytest.mark.processes
@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_service_goes_on_in_its_run_without_a_network(name: str, tmp_path: Path) -> None:
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    variables = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "MLFLOW_ALLOW_FILE_STORE": "true"}
    environ = environment(**variables, MLFLOW_TRACKING_URI=(tmp_path / "mlruns").as_uri())
    done = run([sys.executable, "-c", TWICE, name], environ)  # wandb leaves a process of its own
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.split()
    assert first == second
