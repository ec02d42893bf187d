"""The recorder: what it finds out by itself, and that nobody waits for it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from headway.errors import LaunchError
from headway.history import process_record, store
from headway.history.attempts import Attempts
from headway.history.record import Recorder, find, read_all, read_record
from headway.history.store import begin, new_path, packages, read_commit, runs_folder, variables_of
from headway.ipc.progress import Progress
from headway.ipc.run_contract import RECORD_VARIABLE
from headway.launcher import run
from headway.launcher.plan.program import Program
from tests.history.runs import START, stats
from tests.waiting import wait_until

pytestmark = pytest.mark.processes  # git


def git(*words: str) -> str:
    command = ["git", "-c", "user.name=n", "-c", "user.email=a@b", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_a_record_says_what_code_ran_and_how_the_run_ended() -> None:
    Path("train.py").write_text('api_key = "sk-live-0123456789"\nlr = 0.1\n')
    git("init", "-q")
    git("config", "diff.noprefix", "true")
    git("add", "train.py")
    git("commit", "-qm", "first")
    Path("train.py").write_text('api_key = "sk-live-9876543210"\nlr = 0.2\n')
    start = START._replace(folder=os.getcwd(), script=os.path.abspath("train.py"))
    recorder = Recorder(new_path(), lambda: start, ["0123456789"])
    recorder.note(0, stats(10))
    recorder.exit_code, recorder.report = 3, "rank 0 failed\nAPI_TOKEN=abcdefgh123 0123456789"
    recorder.note(0, stats(10).empty_at(12, 0.1))
    recorder.attempts = lambda: [Attempts(0.0).rows[0]._replace(cause="exit code 3: 0123456789")]
    recorder.tails = lambda: {
        0: [f"line {n}" for n in range(500)],
        1: ["x" * 9_000] * 299 + ["0123456789"],
    }
    recorder.close()
    record = find(None)
    assert record.commit is not None
    assert record.commit.root == os.path.realpath(os.getcwd())
    assert "diff --git a/train.py b/train.py" in (record.commit.diff or "")
    assert "+lr = 0.2" in (record.commit.diff or "")
    assert record.end is not None
    assert record.end.exit_code == 3
    assert record.tails[0][-1] == "line 499"
    assert len(record.tails[0]) == 200
    assert record.stats[0] == (stats(10)._replace(step=12),)
    assert record.num_steps == 12  # also those after the last stats
    assert "torch" in record.packages
    text = (Path(record.path) / "run.json").read_text()
    for secret in ("sk-live", "abcdefgh123", "0123456789"):
        assert secret not in text


BEFORE_RANKS = [
    (LaunchError("no server", where="here", fix="again", code=None), 4, "no server"),
    (OSError(errno.EMFILE, "Too many open files"), 4, "the ranks cannot be started: Too many"),
    (RuntimeError("can't start new thread"), 4, "the ranks cannot be started: can't start"),
    (KeyboardInterrupt(), 130, "KeyboardInterrupt"),
    (SystemExit(143), 143, "stopped before the ranks"),
]


@pytest.mark.parametrize(("error", "code", "report"), BEFORE_RANKS)
def test_a_launch_that_ends_before_its_ranks_have_begun_has_its_end_on_record(
    error: BaseException, code: int, report: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 0.0)  # the clock is set back
    plan: Any = SimpleNamespace(environment={}, program=Program("train.py", ()))
    kind = LaunchError if code == 4 else type(error)
    with pytest.raises(kind), run._record_run(plan, {**os.environ}, lambda: START):
        raise error
    end = find(None).end
    assert end is not None
    assert (end.exit_code, end.report[: len(report)]) == (code, report)
    assert end.time > 1e9


def test_what_a_running_launch_keeps_is_on_record_before_it_ends() -> None:
    recorder = Recorder(new_path(), lambda: START)
    recorder.keep("logs", "logs")
    wait_until(lambda: read_all()[0] and find(None).kept)
    assert find(None).kept == (("logs", os.path.abspath("logs")),)
    recorder.close()


def test_a_full_disk_costs_the_record_and_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "write", full)
    recorder = Recorder(new_path(), lambda: START)
    recorder.note(0, stats(10))
    recorder.close()
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "cannot record this run: No space left on device" in said


def test_a_home_folder_that_does_not_answer_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(store, "write", lambda *_: answers.wait())
    monkeypatch.setattr("headway.history.record._CLOSE_WITHIN_S", 0.1)
    recorder = Recorder(new_path(), lambda: START)
    began = time.monotonic()
    recorder.close()
    assert time.monotonic() - began < 60
    assert "does not respond" in capsys.readouterr().err
    answers.set()
    for thread in threading.enumerate():
        if thread.name == "headway-record":
            thread.join()


def test_secrets_among_variables_leave_no_trace() -> None:
    variables = {
        "HF_TOKEN": "hf_1",
        "CUDA_API_KEY": "k",
        "OMP_NUM_THREADS": "4",
        "MY_FLAG": "1",
        "SLURM_JOB_ID": "7",
        "HEADWAY_ENV": "WANDB_API_KEY=secret A=1",
    }
    assert variables_of(variables) == {
        "OMP_NUM_THREADS": "4",
        "CUDA_API_KEY": "***",
        "HEADWAY_ENV": "'WANDB_API_KEY=***' A=1",
    }


def test_the_versions_of_packages_are_read_from_their_folders(tmp_path: Path) -> None:
    for name in ("torch-2.11.0+cpu.dist-info", "My_Package-1.0.dist-info", "old-3.egg-info"):
        (tmp_path / name).mkdir()
    found = packages([str(tmp_path), "/nowhere"])
    assert found == {"my-package": "1.0", "old": "3", "torch": "2.11.0+cpu"}


@pytest.mark.parametrize("git", ["sleep 60", "false", None])
def test_git_that_is_slow_fails_or_is_missing_costs_the_commit_alone(
    git: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / ".git").mkdir()
    if git is not None:
        (tmp_path / "git").write_text(f"#!/bin/sh\nexec {git}\n")
        (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin" if git else str(tmp_path))
    children = psutil.Process().children()
    began = time.monotonic()
    assert read_commit(str(tmp_path), within_s=0.2) is None
    assert time.monotonic() - began < 30
    assert psutil.Process().children() == children  # no zombie is left


@pytest.mark.parametrize("state", ["branch", "packed", "detached", "worktree"])
def test_the_commit_is_that_of_git_however_it_is_kept(state: str, tmp_path: Path) -> None:
    git("init", "-q")
    assert read_commit(os.getcwd()) is None
    for message in ("one", "two"):
        git("commit", "-q", "--allow-empty", "-m", message)
    folder = Path.cwd()
    if state == "packed":
        git("pack-refs", "--all")
    elif state == "detached":
        git("checkout", "-q", "--detach", "HEAD~")
    elif state == "worktree":
        folder = tmp_path / "tree"
        git("worktree", "add", "-q", str(folder), "HEAD~")
    found = read_commit(str(folder))
    assert found is not None
    assert found.commit == git("-C", str(folder), "rev-parse", "HEAD").strip()


def test_nothing_is_left_but_in_the_state_folder() -> None:
    before = {*Path.home().rglob("*")}
    begin(new_path(), START, 1.0)
    created = {*Path.home().rglob("*")} - before
    state = Path(runs_folder()).parents[1]
    assert all(state in (path, *path.parents) or path in state.parents for path in created)


def test_a_single_process_records_its_end_without_a_secret_that_it_was_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = new_path()
    begin(path, START, 1.0)
    monkeypatch.setattr(process_record, "_process", process_record._Process())
    monkeypatch.setenv(RECORD_VARIABLE, f"{os.getpid()}:{path}")
    monkeypatch.setenv("MY_API_TOKEN", "0123456789")
    monkeypatch.setattr("sys.orig_argv", ["python", "train.py", "--key", "abcdefgh"])
    progress = Progress()
    process_record.start(progress)
    progress.listeners[0](stats(10))
    process_record.record_exit(1, "no access with 0123456789 and abcdefgh", progress)
    record = read_record(path)
    assert record.end is not None
    assert record.end.report == "no access with *** and ***"
    assert record.stats[0] == (stats(10),)
    (attempt,) = record.attempts
    assert (attempt.began_at, attempt.last) == (START.began_at, 10)


SCRIPT = """
import sys
from headway.ipc.progress import Progress
from headway.history import process_record
process_record.start(Progress())
if "trained" in sys.argv: process_record.mark_ended()
if "raises" in sys.argv: raise ValueError("bad data")
sys.exit(3)
"""


@pytest.mark.parametrize(
    ("word", "code"), [("trained", 0), ("raises", 1), ("other", None)], ids=lambda one: str(one)
)
def test_how_python_exits_is_recorded_as_far_as_it_is_known(word: str, code: int | None) -> None:
    path = new_path()
    begin(path, START, 1.0)
    script = f'{RECORD_VARIABLE}="$$:{path}" exec "$0" -c "$1" {word}'
    subprocess.run(["sh", "-c", script, sys.executable, SCRIPT], capture_output=True)
    end = read_record(path).end
    assert end is not None
    assert end.exit_code == code
    assert ("ValueError: bad data" in end.report) == (word == "raises")
