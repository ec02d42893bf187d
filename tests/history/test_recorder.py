"""The recorder: what it finds out by itself, and that nobody waits for it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from headway.contract.progress import Progress
from headway.contract.run import RECORD_VARIABLE
from headway.history import own, store
from headway.history.place import new_path, runs_folder
from headway.history.recorder import Recorder
from headway.history.surroundings import packages, variables_of
from tests.distributed.launching import environment
from tests.history.runs import START, figures

pytestmark = pytest.mark.processes  # git


def git(*words: str) -> None:
    command = ["git", "-c", "user.name=n", "-c", "user.email=a@b", *words]
    subprocess.run(command, check=True, capture_output=True)


def test_a_record_says_what_code_ran_and_how_the_run_ended() -> None:
    Path("train.py").write_text('api_key = "sk-live-0123456789"\nlr = 0.1\n')
    git("init", "-q")
    git("add", "train.py")
    git("commit", "-qm", "first")
    Path("train.py").write_text('api_key = "sk-live-9876543210"\nlr = 0.2\n')
    Path("new.py").write_text("")
    for name in ("conf/model.yaml", "given.toml", "headway.yaml", ".hydra/config.yaml", "data.csv"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("width = 8\n")
    os.mkfifo("pipe.yaml")  # to read it would wait for ever
    start = START._replace(folder=os.getcwd(), script=os.path.abspath("train.py"))
    recorder = Recorder(new_path(), lambda: start, ["--c=given.toml"], ["0123456789"])
    recorder.note(0, figures(10))
    recorder.restart("rank 0 failed; restart 1 of 2")
    recorder.exit_code, recorder.report = 3, "rank 0 failed\nAPI_TOKEN=abcdefgh123 0123456789"
    recorder.step = lambda: 12
    recorder.tails = lambda: {
        0: [f"line {n}" for n in range(500)],
        1: ["x" * 9_000] * 299 + ["0123456789"],
    }
    recorder.close()
    record = store.find(None)
    assert record.commit is not None
    assert record.commit.root == os.path.realpath(os.getcwd())
    assert "+lr = 0.2" in record.commit.diff
    assert "new.py" in record.commit.untracked
    assert not record.commit.is_whole  # a secret is masked in it
    assert record.end is not None
    assert (record.end.exit_code, record.restarts[0].line) == (3, "rank 0 failed; restart 1 of 2")
    assert record.tails[0][-1] == "line 499"
    assert len(record.tails[0]) == 200
    assert record.figures == {0: [figures(10)]}
    assert record.num_steps == 12  # also those after the last figures
    assert record.surroundings is not None
    assert {*record.surroundings.sources} == {"train.py", "new.py", "conf/model.yaml"}
    assert {*record.surroundings.inputs} == {"given.toml"}
    text = (Path(record.path) / "record.jsonl").read_text()
    assert "sk-live" not in text
    assert "abcdefgh123" not in text
    assert "0123456789" not in text


def test_a_full_disk_costs_the_record_and_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "append", full)
    recorder = Recorder(new_path(), lambda: START, [])
    for step in range(10, 100, 10):
        recorder.note(0, figures(step))
    recorder.close()
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "the record of this run is lost: No space left on device" in said


def test_a_home_folder_that_does_not_answer_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(store, "create", lambda _: answers.wait())
    monkeypatch.setattr("headway.history.recorder._CLOSE_WITHIN_S", 0.1)
    recorder = Recorder(new_path(), lambda: START, [])
    began = time.monotonic()
    recorder.note(0, figures(10))
    recorder.close()
    assert time.monotonic() - began < 5
    assert "does not answer" in capsys.readouterr().err
    answers.set()
    recorder.wait()


def test_secrets_among_variables_leave_no_trace() -> None:
    told, others = variables_of(
        {
            "HF_TOKEN": "hf_1",
            "CUDA_API_KEY": "k",
            "OMP_NUM_THREADS": "4",
            "MY_FLAG": "1",
            "PWD": "/a",
            "HEADWAY_ENV": "WANDB_API_KEY=secret A=1",
        }
    )
    assert told == {
        "OMP_NUM_THREADS": "4",
        "CUDA_API_KEY": "***",
        "HEADWAY_ENV": "'WANDB_API_KEY=***' A=1",
    }
    assert {*others} == {"MY_FLAG"}
    assert others["MY_FLAG"] != "1"


def test_the_versions_of_packages_are_read_from_their_folders(tmp_path: Path) -> None:
    for name in ("torch-2.11.0+cpu.dist-info", "My_Package-1.0.dist-info", "old-3.egg-info"):
        (tmp_path / name).mkdir()
    found = packages([str(tmp_path), "/nowhere"])
    assert found == {"my-package": "1.0", "old": "3", "torch": "2.11.0+cpu"}


def test_nothing_is_left_but_in_the_state_folder() -> None:
    before = {*Path.home().rglob("*")}
    Recorder(new_path(), lambda: START, []).close()
    created = {*Path.home().rglob("*")} - before
    state = Path(runs_folder()).parents[1]
    assert all(state in (path, *path.parents) or path in state.parents for path in created)


def test_a_single_process_records_no_secret_that_it_was_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = new_path()
    store.create(path)
    store.append(path, START)
    monkeypatch.setattr(own, "_process", own._Process())
    monkeypatch.setenv(RECORD_VARIABLE, f"{os.getpid()}:{path}")
    monkeypatch.setenv("MY_API_TOKEN", "0123456789")
    monkeypatch.setattr("sys.orig_argv", ["python", "train.py", "--key", "abcdefgh"])
    own.end(1, "no access with 0123456789 and abcdefgh", Progress())
    end = store.read_record(path).end
    assert end is not None
    assert end.report == "no access with *** and ***"


# adopts what a launch leaves behind, as PID 1 of a container does, and collects nothing
NEVER_COLLECTS = """
import os, pathlib, psutil, time
from headway.contract.forking import adopt_orphans
from headway.history import place

place.runtime_folder = lambda: "runtime"
place._COLLECTED_WITHIN_S = 0.2
adopt_orphans()
zombies = lambda: [one.status() for one in psutil.Process().children()].count("zombie")
for number in range(4):
    done = pathlib.Path(f"done-{number}")
    place.beside(lambda is_awaited: done.write_text(f"awaited: {is_awaited}"))
    while number == 0 and not zombies():
        time.sleep(0.01)
    time.sleep(0.3)
    print(done.read_text(), "zombies:", zombies())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")
def test_launches_below_a_pid_1_that_collects_no_processes_leave_one_zombie_and_not_one_each() -> (
    None
):
    command = [sys.executable, "-c", NEVER_COLLECTS]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=120, check=True
    )
    said = ["awaited: False zombies: 1", *["awaited: True zombies: 1"] * 3]
    assert done.stdout.splitlines() == said
