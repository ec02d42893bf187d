"""The file in which a process without a launcher leaves its figures."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headway.contract import figures_file
from headway.contract.figures_file import list_alone
from tests.distributed.launching import environment
from tests.waiting import wait_for_lines, wait_until

TRAINS = """
import os, signal, sys
from headway.contract import figures_file
from headway.contract.records import Figures
from headway.contract.progress import process_progress
figures_file.runtime_folder = lambda: sys.argv[1]
figures_file.leave_figures(process_progress())
figures_file.leave_figures(process_progress())  # a second Accelerator
(tell,) = process_progress().listeners
tell(Figures(1e9, 7, 1, 0.5, 0.1, 0.1, 0.1, 0.1, 0.0, 8, 100, None, 0, None))
if os.fork() == 0:  # as a worker of a loader, which outlives it
    print("ready", file=sys.stderr, flush=True)
    signal.pause()
print("ready", file=sys.stderr, flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    path = tmp_path / "running"
    monkeypatch.setattr(figures_file, "runtime_folder", lambda: str(path))
    return path


def begin(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINS, str(folder)],
        env=environment(),
        text=True,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    wait_for_lines(process, "ready", "ready")
    return process


@pytest.mark.processes
@pytest.mark.parametrize("is_killed", [False, True])
def test_a_process_is_found_while_it_trains_and_nothing_is_left_of_it(
    folder: Path, is_killed: bool
) -> None:
    process = begin(folder)
    try:
        (found,) = list_alone()
        assert (found.pid, found.program) == (process.pid, "-c")
        assert found.figures is not None
        assert found.figures.step == 7
        assert [oct(one.stat().st_mode & 0o777) for one in (folder, *folder.iterdir())] == [
            "0o700",
            "0o600",
        ]
        if is_killed:
            process.kill()
        else:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        process.wait()
        assert list_alone() == []
        wait_until(lambda: [*folder.iterdir()] == [])
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize("text", ["", "{}", "[" * 4000, '["Alone", "1"]', "\0" * 5000])
def test_a_file_of_another_version_or_cut_off_is_passed_over(
    folder: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise BlockingIOError

    folder.mkdir(mode=0o700)
    (folder / "steps-1").write_text(text)
    monkeypatch.setattr("fcntl.lockf", refuse)
    assert list_alone() == []


def test_a_folder_that_others_may_enter_is_not_used(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    (folder / "steps-1").write_text('["Alone", 1, "train.py", 1.0, null]')
    assert list_alone() == []
    with pytest.raises(PermissionError):
        figures_file.FiguresFile("train.py")


def test_a_descriptor_that_the_script_has_closed_and_used_anew_is_left_alone(
    folder: Path, tmp_path: Path
) -> None:
    left = figures_file.FiguresFile("train.py")
    (path,) = folder.iterdir()
    fd = next(
        int(one)
        for one in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{one}") and os.path.samefile(f"/proc/self/fd/{one}", path)
    )
    mine = os.open(tmp_path / "mine", os.O_RDWR | os.O_CREAT)
    os.dup2(mine, fd)
    left.tell(None)  # type: ignore[arg-type]
    assert os.fstat(mine).st_size == 0
    left.remove()
    assert not path.exists()
    os.close(fd)
    os.close(mine)
