"""What is said on stderr: a wait of more than a second, and how ranks and sizes are named."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.commands import launch
from headway.ipc import stderr
from headway.ipc.stderr import named, ranges, size, waiting_for
from headway.launcher.processes import gpu_claims
from tests.launcher.processes.test_gpu_claims import FOUR, asking_for
from tests.waiting import wait_for_lines


@pytest.fixture
def announced(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Announce every wait at once; set when one was announced."""
    event = threading.Event()
    log = stderr.log

    def announce(text: str) -> None:
        log(text)
        event.set()

    monkeypatch.setattr(stderr, "SILENT_S", 0)
    monkeypatch.setattr(stderr, "log", announce)
    return event


def test_a_long_wait_is_announced_once(
    announced: threading.Event, capsys: pytest.CaptureFixture[str]
) -> None:
    with waiting_for("the sun"):
        assert announced.wait(30)
    assert capsys.readouterr().err == "headway: waiting for the sun\n"


def test_a_short_or_a_quiet_wait_says_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stderr, "SILENT_S", 3600)
    with waiting_for("the sun"):
        pass
    monkeypatch.setattr(stderr, "SILENT_S", 0)
    with waiting_for("the moon", is_quiet=True), waiting_for("the tide", after_s=3600):
        threading.Event().wait(0)
    assert capsys.readouterr().err == ""


def test_a_slow_look_at_the_gpus_is_announced(
    announced: threading.Event, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def detect(*_: object, **__: object) -> object:
        assert announced.wait(30)
        return FOUR

    monkeypatch.setattr(launch, "detect_machine", detect)
    monkeypatch.setattr(gpu_claims, "claim_idle", lambda _, look, __: look())
    flags = SimpleNamespace(dry_run=False, wait=None)
    asked: Any = SimpleNamespace(
        settings=asking_for("idle:1"), parsed=flags, environ={}, problems=[]
    )
    assert launch._find_idle_gpus(asked) is FOUR
    assert "the GPU usage" in capsys.readouterr().err


BLOCKS = """
import os, time
while not os.path.exists({go!r}):
    time.sleep(0.02)
raise ImportError("not in this test")
"""


@pytest.mark.processes
def test_a_slow_import_of_torch_is_announced(tmp_path: Path) -> None:
    go, torch = tmp_path / "go", tmp_path / "slow" / "torch"
    torch.mkdir(parents=True)
    (torch / "__init__.py").write_text(BLOCKS.format(go=str(go)))
    path = os.pathsep.join([str(torch.parent), *sys.path])
    command = [sys.executable, "-m", "headway", "test", "--cpu"]
    environ = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as process:
        wait_for_lines(process, "headway: waiting for the ranks to start")
        go.touch()
        process.communicate(timeout=120)
    assert process.returncode != 0


@pytest.mark.parametrize("log", [stderr.log, stderr.log_in_handler])
def test_a_line_is_not_glued_to_a_progress_bar(
    log: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tqdm = pytest.importorskip("tqdm").tqdm
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # starts no thread
    bar = tqdm(total=9, mininterval=0)
    bar.update()
    for text in ("one", "two"):
        log(text)
    bar.update()
    log("three")
    bar.close()
    log("four")
    lines = capfd.readouterr().err.split("\n")
    assert [line for line in lines if "\r" not in line] == [
        *(f"headway: {text}" for text in ("one", "two", "three", "four")),
        "",
    ]


def test_ranks_are_written_as_ranges() -> None:
    assert ranges([7, 0, 2, 3, 4]) == "0, 2-4, 7"
    assert named([3]) == "rank 3"
    assert named([0, 2, 3]) == "ranks 0, 2-3"


def test_sizes_are_in_the_unit_that_fits() -> None:
    assert [size(n) for n in (7, 1536, 3 * 2**20, 70 * 2**30)] == [
        *("7 B", "1.5 KiB", "3.0 MiB", "70.00 GiB")
    ]
