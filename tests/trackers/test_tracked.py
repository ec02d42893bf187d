"""The Accelerator's methods for trackers, in one process."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from headway import Accelerator
from headway.errors import UsageError
from headway.trackers import choice
from headway.trackers.choice import LoggerType, register_tracker_class
from headway.trackers.run_file import read_metrics
from headway.trackers.tracker import NoTracker
from headway.tracking import GeneralTracker, on_main_process
from tests.distributed.launching import environment, run, script
from tests.trackers.full_disk import no_file_above


class Recorder(GeneralTracker):
    """Keeps what it was told; `broken` is what its log raises."""

    name = "recorder"
    requires_logging_directory = False

    def __init__(self, project: str = "") -> None:
        super().__init__()
        self.told: list[Any] = [project] if project else []
        self.broken: Exception | None = None

    @property
    def tracker(self) -> list[Any]:
        return self.told

    def start(self) -> None:
        self.told.append("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.told.append(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        if self.broken is not None:
            raise self.broken
        self.told.append((values, step, kwargs))

    def finish(self) -> None:
        self.told.append("finish")


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def test_a_tracker_of_the_script_is_told_all(recorder: Recorder) -> None:
    accelerator = Accelerator(cpu=True, log_with=recorder)
    accelerator.init_trackers("project", {"lr": 1})
    accelerator.log({"loss": 1}, step=3, log_kwargs={"recorder": {"tag": "a"}, "wandb": {}})
    assert accelerator.trackers == [recorder]
    assert accelerator.get_tracker("recorder") is recorder
    assert accelerator.get_tracker("recorder", unwrap=True) is recorder.told
    accelerator.end_training()
    accelerator.end_training()
    logged = ({"loss": 1}, 3, {"tag": "a"})
    assert recorder.told == ["start", {"lr": 1}, logged, "finish"]


def test_a_second_run_ends_the_first(recorder: Recorder) -> None:
    accelerator = Accelerator(cpu=True, log_with=[recorder, recorder])
    accelerator.init_trackers("first")
    accelerator.init_trackers("second")
    accelerator.end_training()
    assert recorder.told == ["start", "finish"] * 2


def test_a_registered_class_has_a_name(tmp_path: Path) -> None:
    register_tracker_class(Recorder)
    accelerator = Accelerator(cpu=True, log_with=["recorder", "jsonl"], project_dir=tmp_path)
    accelerator.init_trackers("project", init_kwargs={"recorder": {}})
    assert accelerator.get_tracker("recorder", unwrap=True) == ["project", "start"]
    assert "recorder" in accelerator.log_with
    accelerator.end_training()
    for refused in (Recorder(), int, GeneralTracker):
        with pytest.raises(UsageError):
            register_tracker_class(refused)  # type: ignore[arg-type]
    del choice.LOGGER_TYPE_TO_CLASS["recorder"]


@pytest.mark.parametrize("log_with", ["jsonl", LoggerType.JSONL, ["jsonl", LoggerType.JSONL]])
def test_the_builtin_tracker_by_any_of_its_names(log_with: Any, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with=log_with, project_dir=tmp_path)
    assert accelerator.logging_dir == accelerator.project_dir == tmp_path
    accelerator.init_trackers("project", {"lr": 1})
    accelerator.log({"loss": 1}, step=0)
    accelerator.end_training()
    (path,) = tmp_path.glob("project/*.jsonl")
    assert read_metrics(path) == {"loss": ([0], [1])}
    assert json.loads(path.read_text().splitlines()[0])["config"] == {"lr": 1}


def test_without_a_folder_the_builtin_tracker_writes_into_runs() -> None:
    accelerator = Accelerator(cpu=True, log_with="jsonl")
    accelerator.init_trackers("project")
    accelerator.end_training()
    assert len(list(Path("runs/project").iterdir())) == 1


def test_all_means_all_that_are_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(choice, "_is_installed", lambda package: package == "wandb")
    recorder = Recorder()
    accelerator = Accelerator(cpu=True, log_with=["all", recorder], project_dir=tmp_path)
    assert accelerator.log_with == ["jsonl", "wandb", recorder]


@pytest.mark.parametrize(
    ("log_with", "is_installed", "fix"),
    [
        ("wnadb", True, "did you mean 'wandb'"),
        ("aim", True, "log_with='jsonl'"),
        (LoggerType.SWANLAB, True, "log_with='jsonl'"),
        (["jsonl", "x"], True, "use one of"),
        ("wandb", False, "pip install wandb"),
        ("tensorboard", True, "project_dir"),  # where its files go
    ],
)
def test_a_tracker_that_cannot_be_used_is_refused_with_the_fix(
    log_with: Any, is_installed: bool, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "_is_installed", lambda package: is_installed)
    with pytest.raises(UsageError) as refused:
        Accelerator(cpu=True, log_with=log_with)
    assert fix in refused.value.problems[0].fix


def test_a_folder_of_the_packages_name_is_not_the_package() -> None:
    Path("some_runs").mkdir()
    sys.path.insert(0, "")
    try:
        assert not choice._is_installed("some_runs")
    finally:
        sys.path.remove("")


def test_keywords_for_no_tracker_are_refused(recorder: Recorder) -> None:
    accelerator = Accelerator(cpu=True, log_with=recorder)
    with pytest.raises(UsageError):
        accelerator.init_trackers("project", init_kwargs={"wnadb": {}})
    accelerator.init_trackers("project", init_kwargs={"wandb": {"tags": ["a"]}})
    with pytest.raises(UsageError):
        accelerator.log({}, log_kwargs={"recordr": {}})
    accelerator.end_training()


def test_a_tracker_without_what_every_tracker_has_is_refused() -> None:
    class Half(GeneralTracker):
        name = "half"

    with pytest.raises(UsageError, match="requires_logging_directory, tracker"):
        Half()


def test_an_accelerator_without_trackers_takes_all_calls() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.init_trackers("project", {"lr": 1})
    accelerator.log({"loss": 1})
    nothing = accelerator.get_tracker("tensorboard")
    assert isinstance(nothing, NoTracker)
    assert not nothing
    nothing.log({"loss": 1})
    nothing.writer.add_images("a", [], 0)
    accelerator.get_tracker("wandb", unwrap=True).config["a"] = 1
    accelerator.end_training()


def test_a_tracker_that_was_not_started_is_refused(recorder: Recorder) -> None:
    accelerator = Accelerator(cpu=True, log_with=recorder)
    with pytest.raises(UsageError) as refused:
        accelerator.get_tracker("recorder")
    assert "init_trackers" in refused.value.problems[0].fix
    accelerator.init_trackers("project")
    with pytest.raises(UsageError):
        accelerator.get_tracker("wandb")
    accelerator.end_training()


def test_what_is_logged_outside_a_run_is_told_once(
    recorder: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    accelerator = Accelerator(cpu=True, log_with=recorder)
    accelerator.log({"loss": 1})
    accelerator.log({"loss": 1})
    assert capsys.readouterr().err.count("headway:") == 1
    assert recorder.told == []


def test_a_tracker_that_fails_later_does_not_end_the_training(
    recorder: Recorder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("headway.trackers.tracker_group.time.monotonic", lambda: now[0])
    other = Recorder()
    accelerator = Accelerator(cpu=True, log_with=[recorder, other])
    accelerator.init_trackers("project")
    accelerator.log({"loss": 0})
    recorder.broken = OSError("no space")
    accelerator.log({"loss": 1})
    accelerator.log({"loss": 2})
    recorder.broken = None
    accelerator.log({"loss": 3})
    assert [told[0]["loss"] for told in recorder.told[1:]] == [0, 3]
    assert len(other.told) == 5
    said = capsys.readouterr().err
    assert said.count("OSError: no space") == 1
    accelerator.end_training()
    assert "missed 2 log() calls" in capsys.readouterr().err
    assert recorder.told[-1] == other.told[-1] == "finish"


def test_a_tracker_that_is_slow_to_fail_rests(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, tried = [0.0], []
    monkeypatch.setattr("headway.trackers.tracker_group.time.monotonic", lambda: now[0])

    def fail_after_two_seconds(values: dict[str, Any], step: int | None = None) -> None:
        tried.append(now[0])
        now[0] += 2
        if step:
            raise OSError("no answer")

    monkeypatch.setattr(recorder, "log", fail_after_two_seconds)
    accelerator = Accelerator(cpu=True, log_with=recorder)
    accelerator.init_trackers("project")
    for step in range(100):
        accelerator.log({}, step=step)
        now[0] += 1
    pauses = [after - before for before, after in pairwise(tried)]
    assert set(pauses[1:]) == {22.0}, "a call of 2 s is followed by a rest of 20 s"
    accelerator.end_training()


def test_a_wrong_argument_of_a_later_call_is_the_scripts(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=tmp_path)
    accelerator.init_trackers("x")
    accelerator.log({"loss": 1}, step=1)
    with pytest.raises(UsageError, match="step is 'x', not of type float"):
        accelerator.log({"loss": 1}, step="x")  # type: ignore[arg-type]


def test_an_error_of_the_first_call_is_the_scripts(recorder: Recorder) -> None:
    accelerator = Accelerator(cpu=True, log_with=recorder)
    accelerator.init_trackers("project")
    recorder.broken = TypeError("unexpected keyword")
    with pytest.raises(TypeError):
        accelerator.log({})
    accelerator.end_training()


def test_a_tracker_that_cannot_finish_keeps_no_other_from_it(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise OSError("gone")

    broken = Recorder()
    monkeypatch.setattr(broken, "finish", fail)
    accelerator = Accelerator(cpu=True, log_with=[broken, recorder])
    accelerator.init_trackers("project")
    accelerator.end_training()
    assert recorder.told[-1] == "finish"
    assert "gone" in capsys.readouterr().err


def test_on_main_process_looks_at_the_trackers_own_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tracker(Recorder):
        @on_main_process
        def start(self) -> None:
            super().start()

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    on_one, on_all = Tracker(), Tracker()
    on_all.main_process_only = False
    on_one.start()
    on_all.start()
    assert (on_one.told, on_all.told) == ([], ["start"])


ENDS = """
import sys
from headway import Accelerator
from headway.tracking import GeneralTracker

class Printer(GeneralTracker):
    name, requires_logging_directory, tracker = "printer", False, None
    def finish(self): print("finished")
    def finish_after_error(self): print("finished after an error")

accelerator = Accelerator(cpu=True, log_with=Printer())
accelerator.init_trackers("project")
if sys.argv[1:]:
    raise RuntimeError(sys.argv[1])
"""


@pytest.mark.processes
@pytest.mark.usefixtures("warm_pythons")
@pytest.mark.parametrize(
    ("words", "said"), [([], "finished\n"), (["x"], "finished after an error\n")]
)
def test_trackers_are_finished_when_the_script_ends(words: list[str], said: str) -> None:
    ended = run([sys.executable, script(ENDS), *words], environment(), timeout_s=120)
    assert ended.stdout == said, ended.stderr


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_is_told_and_the_training_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setattr("headway.trackers.tracker_group._PATIENCE", 0)  # it is tried again at once
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
    accelerator.init_trackers("project")
    accelerator.log({"loss": 0.0}, step=0)
    with no_file_above(10):
        accelerator.log({"loss": 1.0}, step=1)
    accelerator.log({"loss": 2.0}, step=2)  # a writer that has failed does not write again
    accelerator.end_training()
    told = capsys.readouterr().err
    assert "'tensorboard' failed: OSError" in told
    assert "missed 2 log() calls" in told
    events: Any = EventAccumulator(str(tmp_path / "project"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [0]
