"""A repeated failure is not restarted: which failures count as the same, and when."""

from __future__ import annotations

import errno
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from headway.errors import CheckpointError, Code
from headway.ipc.records import Crash, CrashSite, Frame
from headway.launcher.diagnosis.failures import RankExit, find_failure
from headway.launcher.diagnosis.reasons import may_pass
from headway.launcher.processes.repeats import FILE, RepeatDetector

TRACEBACK = """\
Traceback (most recent call last):
  File "/work/train.py", line 7, in <module>
  File "/env/site-packages/torch/nn/functional.py", line 99, in linear
ValueError: boom
"""
SITE = CrashSite("ValueError", "", Frame("/work/train.py", 7, "<module>"), 20)


@pytest.mark.parametrize(
    ("changed", "site"),
    [
        ({}, SITE),
        ({"step": 21}, SITE._replace(step=21)),
        ({"kind": "KeyError"}, SITE._replace(kind="KeyError")),
        ({"step": 0}, None),  # before the first step, or not known
        ({"step": 0, "code": 2}, None),
        ({"step": 0, "code": 2, "fix": "prepare it"}, SITE._replace(step=0)),  # a UsageError
        ({"traceback": "ValueError: boom\n"}, None),
        ({"may_pass": True}, None),
        ({"kind": "KeyboardInterrupt", "code": -2}, None),
    ],
)
def test_only_a_failure_that_nothing_but_the_script_explains_can_be_repeated(
    changed: dict[str, Any], site: CrashSite | None
) -> None:
    crash = Crash(2.0, "ValueError", "boom", TRACEBACK, step=20)._replace(**changed)
    ended = RankExit(1, 70, 1, 2.0, was_stopping=False, crash=crash, exited_silently=False)
    found = find_failure([ended], ranks=range(2), world_size=2)
    assert found is not None
    assert (found.site and found.site._replace(message="")) == site
    killed = find_failure([ended._replace(crash=None, code=-9)], ranks=range(2), world_size=2)
    assert killed is not None
    assert killed.site is None


def caused_by(cause: BaseException, *, is_context: bool = False) -> BaseException:
    """Return an exception that was raised from `cause`, or while it was handled."""
    try:
        try:
            raise cause
        except (OSError, KeyError):
            raise ValueError("boom") from (None if is_context else cause)
    except ValueError as error:
        error.__suppress_context__ = not is_context
        return error


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Timeout(Exception):
    """A script's own class, which has the name of one of requests."""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError(os.strerror(errno.ENOSPC)), False),  # the script's own words
        (Timeout("of a match"), False),
        (RuntimeError("column 'No space left on device'"), False),
        (FileNotFoundError(2, "No such file"), False),
        (PermissionError(13, "Permission denied"), False),
        (FULL, True),
        (OSError("from a loader worker, without a number"), True),
        (ConnectionRefusedError(), True),
        (TimeoutError(), True),
        (socket.gaierror(), True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ..."), True),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "), True),
        (RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer"), True),
        (RuntimeError("[enforce fail] . unexpected pos 704 vs 598"), True),
        (RuntimeError("can't start new thread"), True),
        (CheckpointError("x", where="y", fix="z", code=Code.UNWRITABLE), True),
        (CheckpointError("x", where="y", fix="z", code=Code.MISMATCH), False),
        (caused_by(FULL), True),
        (caused_by(FULL, is_context=True), True),
        (caused_by(KeyError("a"), is_context=True), False),
    ],
    ids=repr,
)
def test_a_failure_of_memory_disks_connections_or_others_may_pass(
    error: BaseException, expected: bool
) -> None:
    assert may_pass(error) is expected
    if isinstance(error.__context__, OSError):
        error.__suppress_context__, error.__cause__ = True, None  # raise ... from None
        assert not may_pass(error)


def test_memory_and_connections_of_torch_may_pass() -> None:
    torch = pytest.importorskip("torch")
    assert may_pass(torch.OutOfMemoryError("CUDA out of memory"))
    assert may_pass(torch.distributed.DistNetworkError("broken"))


BAD_SAMPLE = "Caught ValueError in DataLoader worker process {}.\\nOriginal Traceback ... sample 7"


@pytest.mark.parametrize(
    ("messages", "are_same"),
    [
        (("boom", "boom"), True),
        (("loss is nan", "stale file handle"), False),
        (("no nfs 1", "no nfs 2"), False),
        (("<Batch at 0x7f01>", "<Batch at 0x7fEE>"), True),
        ((BAD_SAMPLE.format(0), BAD_SAMPLE.format(13)), True),
    ],
)
def test_another_message_is_another_failure_but_for_addresses_and_workers(
    messages: tuple[str, str], are_same: bool
) -> None:
    sites = []
    for rank, message in enumerate(messages):
        crash = Crash(2.0, "ValueError", message, TRACEBACK, step=20)
        ended = RankExit(rank, 70, 1, 2.0, was_stopping=False, crash=crash, exited_silently=False)
        failure = find_failure([ended], ranks=range(2), world_size=2)
        assert failure is not None
        assert message not in str(failure.site)
        sites.append(failure.site)
    assert (sites[0] == sites[1]) is are_same


LATER, OTHER = SITE._replace(step=21), SITE._replace(frame=Frame("/work/train.py", 8, "f"))
SEQUENCES: list[tuple[str, list[CrashSite | int | str | None], list[bool]]] = [
    ("twice the same", [SITE, SITE], [False, True]),
    ("one step later", [SITE, LATER, SITE], [False, False, False]),
    ("another line", [SITE, OTHER], [False, False]),
    ("a signal between them", [SITE, None, SITE], [False, False, False]),
    ("signals only", [None, None], [False, False]),
    ("the next launch", [SITE, "launch", SITE], [False, True]),
    ("a stop at the same step between them", [SITE, "launch", 20, "launch", SITE], [False, True]),
    ("a stop at a later step", [SITE, "launch", 21, "launch", SITE], [False, False]),
    ("a success", [SITE, "launch", "success", "launch", SITE], [False, False]),
    ("a signal in the next launch", [SITE, "launch", None, "launch", SITE], [False] * 3),
]


@pytest.mark.parametrize(
    ("what", "events", "expected"), SEQUENCES, ids=[row[0] for row in SEQUENCES]
)
def test_a_failure_is_repeated_if_the_one_before_it_was_the_same_without_a_new_step_between(
    what: str, events: list[CrashSite | int | str | None], expected: list[bool], tmp_path: Path
) -> None:
    folder = str(tmp_path / "project")
    launch, found = RepeatDetector(lambda: folder), []
    for event in events:
        if event == "launch":
            launch = RepeatDetector(lambda: folder)
        elif event == "success":
            launch.note_success(0, is_success=True)
        elif isinstance(event, int):
            launch.note_success(event)
        else:
            assert event is None or isinstance(event, CrashSite)
            found.append(bool(launch.check(event)))
    assert found == expected


def test_without_a_project_only_the_failures_of_one_launch_are_compared() -> None:
    launch = RepeatDetector(str)
    again = "as in the previous failure, with no new step in between"
    said = f"ValueError at /work/train.py:7 in <module> after step 20, {again}"
    assert [d.check(SITE) for d in (launch, launch, RepeatDetector(str))] == ["", said, ""]


def test_restart_anyway_calls_no_failure_repeated(tmp_path: Path) -> None:
    launch = RepeatDetector(lambda: str(tmp_path), restarts_anyway=True)
    assert [launch.check(SITE), launch.check(SITE)] == ["", ""]


@pytest.mark.parametrize("text", ["", "{", "[]", json.dumps({"kind": 3}), "\0"])
def test_a_damaged_file_is_no_failure(text: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(text)
    first, again = (RepeatDetector(lambda: str(tmp_path)).check(SITE) for _ in range(2))
    assert not first
    assert f"of an earlier launch, stored in {tmp_path / FILE}, with no new step" in again


def test_a_folder_that_cannot_be_written_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    RepeatDetector(lambda: str(tmp_path / "file")).check(SITE)
    assert "a repeated failure will not be recognized" in capsys.readouterr().err


def test_a_write_that_fails_leaves_no_file_behind(tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / FILE).mkdir(parents=True)
    RepeatDetector(lambda: str(project)).check(SITE)
    assert os.listdir(project) == [FILE]
