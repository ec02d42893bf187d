"""What tests/conftest.py promises to every test."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tests.another_user import NOBODY, fork_as, needs_root
from tests.conftest import remove_left_folders
from tests.distributed import launching


@pytest.fixture
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file below a folder that only this user may enter."""
    folder = tmp_path_factory.mktemp("checkout")
    folder.chmod(0o700)
    (folder / "module.py").write_text("")
    return folder / "module.py"


def test_an_ordinary_user_reads_a_checkout_that_only_its_owner_may_enter(
    checkout: Path, ordinary_user: None
) -> None:
    assert checkout.read_text() == ""


def test_permissions_bind_an_ordinary_user(ordinary_user: None) -> None:
    Path("closed").mkdir(mode=0o000)
    with pytest.raises(PermissionError):
        os.listdir("closed")
    Path("read_only").touch(mode=0o400)
    with pytest.raises(PermissionError):
        Path("read_only").write_text("x")
    Path("closed").chmod(0o700)


def test_root_may_do_everything_again_after_the_test() -> None:
    if not hasattr(os, "getuid") or os.getuid() != 0:
        pytest.skip("only root passes permissions")
    Path("closed").mkdir(mode=0o000)
    assert os.listdir("closed") == []


@pytest.mark.processes
def test_of_killed_test_runs_alone_the_temporary_folders_are_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", "pass"])
    ended.wait()
    folder = tmp_path / "shared"
    names = [
        f"hw-test-{ended.pid}-ab_12",
        f"hw-test-{os.getpid()}-ab_12",
        f"hw-test-x{ended.pid}-ab_12",
        f"other-{ended.pid}-ab_12",
    ]
    others = names[1:]
    for name in names:
        (folder / name / "inner").mkdir(parents=True)
    (folder / f"hw-test-{ended.pid}-link").symlink_to(folder / others[0])
    remove_left_folders(folder)
    assert {path.name for path in folder.iterdir()} == {*others, f"hw-test-{ended.pid}-link"}
    assert (folder / others[0] / "inner").is_dir()


@needs_root
def test_the_temporary_folder_of_another_user_stays(tmp_path: Path) -> None:
    theirs = tmp_path / f"hw-test-{2**30}-ab_12"
    theirs.mkdir()
    os.chown(theirs, NOBODY, NOBODY)
    remove_left_folders(tmp_path)
    assert theirs.is_dir()


@needs_root
@pytest.mark.processes
def test_another_user_imports_what_lies_below_a_folder_that_only_root_may_enter(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkout.parent / "open").mkdir()
    checkout.rename(checkout.parent / "open" / "found_late.py")
    monkeypatch.syspath_prepend(checkout.parent / "open")

    def imports() -> bool:
        import_module("found_late")
        return os.getuid() == NOBODY and not os.path.exists(checkout.parent / "open")

    assert os.waitpid(fork_as(NOBODY, imports), 0)[1] == 0


FAILING = """
import pytest, subprocess, sys

pytestmark = pytest.mark.processes

class WarmPopen(subprocess.Popen):
    pass

def test_that_fails_beside_its_processes():
    process = WarmPopen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    other = subprocess.Popen([sys.executable, "-c", "1"], stdout=subprocess.PIPE)
    assert False, "on purpose"

def test_that_fails_beside_a_pipe():
    process = subprocess.Popen([sys.executable, "-c", "1"], stdout=subprocess.PIPE)
    process.wait()
    assert False, "on purpose"

def test_that_is_innocent():
    import gc
    sys.last_value = sys.last_traceback = None
    gc.collect()

def test_that_is_innocent_too():
    pass
"""


@pytest.mark.processes
def test_a_test_that_fails_leaves_no_process_to_fail_the_next_one() -> None:
    Path("test_failing.py").write_text(FAILING)
    options = ["-q", "-p", "tests.conftest", "-W", "error", "-p", "no:cacheprovider"]
    options += ["-p", "no:randomly", "--basetemp", "base", "-o", "markers=processes"]
    command = [sys.executable, "-m", "pytest", *options, "--rootdir", ".", "test_failing.py"]
    done = launching.execute(command)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    assert [line.split(" - ")[0] for line in lines] == [
        "FAILED test_failing.py::test_that_fails_beside_its_processes",
        "FAILED test_failing.py::test_that_fails_beside_a_pipe",
        "ERROR test_failing.py::test_that_fails_beside_its_processes",
    ], done.stdout
