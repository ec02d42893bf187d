"""Guards every test: none reads this user's profile, none leaves anything behind."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import os
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest

hypothesis.settings.register_profile("untimed", deadline=None)  # machines are shared
hypothesis.settings.load_profile("untimed")

REPOSITORY = Path(__file__).resolve().parent.parent

_STEERING = {
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "PYTHONUNBUFFERED", "GLOO_SOCKET_IFNAME"),
}


def forget_steering(patch: pytest.MonkeyPatch) -> None:
    """Delete the variables that steer launches and ranks."""
    for name in list(os.environ):
        if name in _STEERING or name.startswith(
            ("HEADWAY_", "ACCELERATE_", "TORCHELASTIC_", "PET_", "SLURM", "OMPI_", "PMIX_")
        ):
            patch.delenv(name)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the long forms too")
    parser.addoption(
        "--quick", action="store_true", help="leave out tests that start processes or are slow"
    )


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if getattr(config.option, "loadgroup", False):
        _share_out(items)
    if config.getoption("--quick"):
        slow = [item for item in items if _NOT_QUICK & {mark.name for mark in item.iter_markers()}]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]
    if config.getoption("--long"):
        return
    skip = pytest.mark.skip(reason="the long form; runs with --long")
    for item in items:
        if "long" in item.keywords:
            item.add_marker(skip)


def _share_out(items: list[pytest.Item]) -> None:
    """Have each file without ranks run by one worker, and put them between the tests of ranks.

    The former compute, the latter wait: beside each other they use a machine better.
    """
    alone: dict[object, int] = {}  # where each is among its kind
    files: dict[object, int] = {}
    for item in items:
        if {"distributed", "xdist_group"}.isdisjoint(item.keywords):
            item.add_marker(pytest.mark.xdist_group(item.location[0]))
            files.setdefault(item.location[0], len(files))
        else:
            alone[item] = len(alone)

    def place(item: pytest.Item) -> float:
        if item in alone:
            return alone[item] / len(alone)
        return files[item.location[0]] / len(files)

    items.sort(key=place)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Name a test that a worker has run as pytest can be given it, without its group."""
    if hasattr(report, "node"):
        report.nodeid = report.nodeid.removesuffix(f"@{report.location[0]}")


def pytest_collection_finish() -> None:
    freeze()


_MANY_MODULES = 100
_num_frozen = 0


def freeze() -> None:
    """Let no garbage collection look through what is there now: above all, modules."""
    global _num_frozen
    gc.enable()
    gc.collect()
    gc.freeze()
    _num_frozen = len(sys.modules)


_NOT_QUICK = {"processes", "distributed", "long", "slow"}  # marks
_QUICK_PROGRAMS = [("git",), ("nvidia-smi",), ("/usr/sbin/sysctl",)]  # two inspect the machine
_may_start_processes = True


def _refuse_processes(event: str, arguments: tuple[object, ...]) -> None:
    if (
        not _may_start_processes
        and arguments[:1] not in _QUICK_PROGRAMS
        and event in ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.forkpty")
    ):
        raise AssertionError(f"{event} in a quick test: mark it with pytest.mark.processes")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Fail a test that starts a slow program and is not marked so: `make quick` has it."""
    global _may_start_processes
    _may_start_processes = bool(_NOT_QUICK & {mark.name for mark in item.iter_markers()})
    try:
        return (yield)
    finally:
        _may_start_processes = True


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown() -> None:
    """Allow processes again: a fixture of the whole session may end after a quick test."""
    global _may_start_processes
    _may_start_processes = True


def pytest_configure(config: pytest.Config) -> None:
    """Guard all tests, and give them a temporary folder in memory.

    They make and remove some 20,000 folders, which takes milliseconds each on a disk.
    """
    gc.disable()  # until the tests are collected
    vars(gc)["unfreeze"] = bool  # commands do, and each collection would look through all imports
    if config.getoption("--long"):
        os.environ["LONG_TESTS"] = "1"  # see tests/waiting.py
    sys.addaudithook(_refuse_processes)
    if importlib.util.find_spec("torch") is None:
        from headway.commands import main

        vars(main)["_PACKAGES"] = ()  # the plain error leaves out what comes to need torch
    if "TMPDIR" not in os.environ and _has_room(_SHARED_MEMORY):
        os.environ["TMPDIR"] = _SHARED_MEMORY
        tempfile.tempdir = None  # to be looked up anew
    if not hasattr(config, "workerinput") and hasattr(os, "getuid"):
        remove_left_folders(Path(tempfile.gettempdir()))


_OWN_FOLDER = "hw-test-"
"""The beginning of a test's temporary folder; the process's id follows, and random characters.

Short, for the sockets in it.
"""


def remove_left_folders(folder: Path) -> None:
    """Remove this user's temporary folders of tests whose process was killed."""
    for left in folder.glob(f"{_OWN_FOLDER}*-*"):
        pid = left.name.removeprefix(_OWN_FOLDER).partition("-")[0]
        with suppress(OSError):  # others remove it, too
            found = left.lstat()
            is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
            if is_own and pid.isdecimal() and not psutil.pid_exists(int(pid)):
                shutil.rmtree(left, ignore_errors=True)


_SHARED_MEMORY = "/dev/shm"
_ROOM_BYTES = 4 * 2**30


def _has_room(folder: str) -> bool:
    """Return whether tests can keep their files there, and execute them."""
    try:
        found = os.statvfs(folder)
    except (OSError, AttributeError):
        return False
    is_usable = os.access(folder, os.W_OK) and not found.f_flag & os.ST_NOEXEC
    return is_usable and found.f_bavail * found.f_frsize >= _ROOM_BYTES


@pytest.fixture(scope="module", autouse=True)
def imports_are_no_garbage() -> None:
    """Let no garbage collection of a test look through what tests have imported."""
    if len(sys.modules) > _num_frozen + _MANY_MODULES:
        freeze()


@pytest.fixture(scope="session", autouse=True)
def no_records_of_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fail if a test has recorded a run among those of the person who runs the tests."""
    from headway.history.store import FILE, runs_folder

    folder, base = Path(runs_folder()), str(tmp_path_factory.getbasetemp())
    before = {*folder.glob(f"*/{FILE}")}
    yield
    after = {*folder.glob(f"*/{FILE}")} - before
    assert not [path for path in after if base in path.read_text()], "records of tests"


@pytest.fixture(scope="session", autouse=True)
def compile_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep torch's compile cache, which the first optimizer step makes, out of the tests' way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


@pytest.fixture(scope="session", autouse=True)
def own_signals() -> Iterator[None]:
    """Let what the tests start be stopped, also where nohup or `&` has the tests ignore signals."""
    numbers = [getattr(signal, name) for name in _STOPS]
    ignored = [number for number in numbers if signal.getsignal(number) == signal.SIG_IGN]
    for number in ignored:
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, usual)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture(scope="session")
def warm_pythons(compile_cache: None, own_signals: None) -> Iterator[None]:
    """Have a process with torch in memory, from which tests start theirs."""
    from tests.distributed.launching import warm_python

    with pytest.MonkeyPatch.context() as patch:
        forget_steering(patch)  # as each test does
        with warm_python():
            _KEPT.update(_direct_children() or ())
            yield


@cache
def _asking() -> Callable[..., Any]:
    from headway.machine import source, torch_query

    return cache(partial(torch_query.query_torch, source.Source("/")))


@pytest.fixture
def torch_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask torch for its devices, which takes another Python that imports it, once for all tests."""
    ask = _asking()
    for place in ("machine.torch_query", "commands.doctor"):
        monkeypatch.setattr(f"headway.{place}.query_torch", lambda _, *words: ask(*words))


@pytest.fixture(autouse=True)
def own_surroundings(
    nothing_is_left_behind: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Run in an empty folder, without profiles and variables of the person who runs the tests."""
    forget_steering(monkeypatch)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / ".config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(home / ".local" / "state"))  # SLURM has its own HOME
    work = home / "work"
    work.mkdir()
    monkeypatch.chdir(work)


@pytest.fixture(autouse=True)
def own_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give the test and all it starts a temporary folder, and look into it afterwards.

    Not below `tmp_path`: with the name of a test in it, sockets in it would have too long a path.
    """
    with tempfile.TemporaryDirectory(prefix=f"{_OWN_FOLDER}{os.getpid()}-") as name:
        with monkeypatch.context() as patch:
            patch.setenv("TMPDIR", name)
            patch.setattr(tempfile, "tempdir", name)
            yield Path(name)
        left = [entry for entry in os.listdir(name) if not entry.startswith("pymp-")]
    assert not left, f"left behind in the temporary folder: {left}"


@pytest.fixture(autouse=True)
def own_state() -> Iterator[None]:
    """Forget the state that all Accelerators of this process share, after each test."""
    yield
    if "headway.state" in sys.modules:
        state = sys.modules["headway.state"]
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


@pytest.fixture
def ordinary_user(own_surroundings: None) -> Iterator[None]:
    """Be somebody whom permissions bind: root gives up what lets it pass them, for the test.

    Nobody else's user id would do: this checkout may be where only its owner may read.
    """
    if not hasattr(os, "getuid") or os.getuid() != 0:
        yield
        return
    if sys.platform != "linux":
        pytest.skip("root passes all permissions")
    with without_capabilities():
        if not os.access(REPOSITORY / "headway" / "errors.py", os.R_OK, effective_ids=True):
            pytest.skip("this checkout belongs to another user, and only root may read it")
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Skip a test that comes to need torch, as torchrun's own parser does, where there is none."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name == "torch" and importlib.util.find_spec("torch") is None:
            pytest.skip("torch is not installed")
        raise


_HAS_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        item.stash[_HAS_FAILED] = True
    return report


@contextmanager
def without_capabilities() -> Iterator[None]:
    """Take from this thread what lets root pass permissions: its effective capabilities.

    Source: capset(2), version 3 of the header and of the two sets of three masks.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    header = struct.pack("Ii", 0x20080522, 0)
    before = ctypes.create_string_buffer(24)

    def call(function: str, sets: object) -> None:
        if getattr(libc, function)(header, sets):
            raise OSError(ctypes.get_errno(), function)

    call("capget", before)
    masks = struct.unpack("6I", before.raw)
    none_effective = [0 if index % 3 == 0 else mask for index, mask in enumerate(masks)]
    call("capset", struct.pack("6I", *none_effective))
    try:
        yield
    finally:
        call("capset", before.raw)


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaks a variable, a process, a thread, a process group or a file.

    What a failed test has left running is ended, so that the next one does not fail with it.
    """
    before = _traces()
    yield
    has_failed = _HAS_FAILED in request.node.stash
    _await_end(before["processes"], before["threads"], within_s=1 if has_failed else 10)
    after = _traces()
    left = after["processes"] - before["processes"]
    if left or has_failed:
        _end_what_was_left([int(title.split()[0]) for title in left])
    for kind, traces in after.items():
        assert traces <= before[kind], f"left behind: {kind} {traces - before[kind]}"
    torch_distributed = sys.modules.get("torch.distributed")
    if torch_distributed is not None:
        assert not torch_distributed.is_initialized(), "left behind: a process group"


_STOPS = [name for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT") if hasattr(signal, name)]


def _await_end(processes: Collection[str], threads: Collection[str], within_s: float) -> None:
    """Let what has begun since, and is about to end, end: above all what writes a run's record."""
    known = {title.split()[0] for title in processes}
    psutil.wait_procs([child for child in _children() if str(child.pid) not in known], within_s)
    for thread in threading.enumerate():
        if thread.name not in threads:
            thread.join(within_s)


def _traces() -> dict[str, set[str]]:
    return {
        "variables": {f"{name}={value}" for name, value in os.environ.items()}
        - {f"PYTEST_CURRENT_TEST={os.environ.get('PYTEST_CURRENT_TEST')}"}
        - {"TORCH_FR_BUFFER_SIZE=2000"},  # of a rank, for as long as its process lives
        "processes": {f"{child.pid} {_title(child)}" for child in _children()},
        "signal handlers": {f"{name} {signal.getsignal(getattr(signal, name))}" for name in _STOPS},
        "threads": {thread.name for thread in threading.enumerate()},
        "files in the repository": {
            entry.name
            for entry in os.scandir(REPOSITORY)
            if not entry.name.startswith(".")  # a linter's, meanwhile
        },
    }


def _end_what_was_left(pids: Collection[int]) -> None:
    """End these processes, and close the pipes to all that have ended."""
    for child in _children():
        if child.pid in pids:
            child.kill()
    for started in [obj for obj in gc.get_objects() if issubclass(type(obj), subprocess.Popen)]:
        if started.pid in pids:
            started.wait()
        if started.pid is None or started.poll() is None:  # a quick test may not start it
            continue
        for stream in (started.stdin, started.stdout, started.stderr):
            if stream is not None:
                with suppress(OSError):  # what is buffered for a process that is gone
                    stream.close()


def _children() -> list[psutil.Process]:
    if _has_none():
        return []
    children = psutil.Process().children(recursive=True)
    _, alive = psutil.wait_procs(children, timeout=0)
    # Python's own helpers, started once and kept for all tests
    ours = [child for child in alive if child.pid not in _KEPT]
    return [child for child in ours if "multiprocessing" not in _title(child)]


_KEPT: set[int] = set()  # processes that are started once, for all tests


def _has_none() -> bool:
    """Return whether this process surely has no child but those that are kept for all tests.

    psutil reads all processes of the system.
    """
    found = _direct_children()
    if found is not None:
        return _KEPT.issuperset(found)
    if not hasattr(os, "waitid"):
        return False
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return False


def _direct_children() -> list[int] | None:
    """Return the children of this process, where the system tells. Source: proc_tid_children(5)."""
    try:
        lists = [path.read_text() for path in Path("/proc/self/task").glob("*/children")]
    except OSError:  # a thread has ended
        return None
    return [int(pid) for text in lists for pid in text.split()] if lists else None


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
