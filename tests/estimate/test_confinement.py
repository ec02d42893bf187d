"""A script that is estimated changes nothing: no file, no folder, no program, no network."""

from __future__ import annotations

import os
import sqlite3
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import pytest

from headway.estimate.child import landlock
from tests.estimate.following import Server

pytestmark = pytest.mark.processes

TRAINING = """
import torch
net = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(2):
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


def written(text: str) -> Path:
    script = Path("script.py")
    script.write_text(text + TRAINING)
    return script


def listing(folder: Path) -> dict[str, str]:
    """Return the text of every file below a folder."""
    return {str(one): one.read_text() for one in folder.rglob("*") if one.is_file()}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    (folder / "old").mkdir(parents=True)
    (folder / "old" / "model.txt").write_text("weights")
    return folder


def test_a_script_that_begins_by_removing_its_results_leaves_them(
    server: Server, results: Path
) -> None:
    outcome = server.follow(
        written(
            "import os, shutil, sys\n"
            "shutil.rmtree(sys.argv[1])\n"
            "os.makedirs(sys.argv[1] + '/new')\n"
            "open(sys.argv[1] + '/new/log.txt', 'w').write('new')\n"
            "assert open(sys.argv[1] + '/new/log.txt').read() == 'new'\n"
        ),
        str(results),
    )
    assert outcome.steps == 2, outcome
    assert listing(results) == {str(results / "old" / "model.txt"): "weights"}
    assert any("script.py, line 2" in note for note in outcome.notes), outcome.notes


CHANGES = (
    "os.open(os.path.basename(path), os.O_WRONLY | os.O_TRUNC,"
    " dir_fd=os.open(os.path.dirname(path), os.O_RDONLY))",
    "open(path, 'w').write('changed')",
    "open(path, 'a').write('changed')",
    "pathlib.Path(path).write_text('changed')",
    "os.remove(path)",
    "pathlib.Path(path).unlink()",
    "os.rename(path, path + '.bak')",
    "os.replace(path, path + '.bak')",
    "shutil.move(path, path + '.bak')",
    "os.truncate(path, 0)",
    "os.close(os.open(path, os.O_RDWR | os.O_TRUNC))",
    "shutil.copyfile(__file__, path)",
    "os.mkfifo(path + '.fifo')",
    "open(path + '.new', 'x').write('new')",
    "io.FileIO(path, 'w').write(b'changed')",
    "os.symlink(path, path + '.link')",
    "tempfile.NamedTemporaryFile(dir=os.path.dirname(path)).close()",
)
REFUSED: tuple[str, ...] = (
    "os.fork()",
    "os.system('touch changed')",
    "subprocess.run(['touch', 'changed'])",
    "socket.create_connection(('127.0.0.1', 9))",
    "posix.unlink(path)",
    "posix.rename(path, path + '.bak')",
    "multiprocessing.get_context('spawn').Process(target=print).start()",
)
if sys.platform == "linux":
    REFUSED += ("signal.pidfd_send_signal(os.pidfd_open(os.getppid()), 0)",)


def test_files_are_as_they_were_whatever_is_done_to_them(server: Server, tmp_path: Path) -> None:
    lines = ["import io, os, pathlib, shutil, sys, tempfile"]
    for number, change in enumerate(CHANGES):
        path = tmp_path / f"{number}.txt"
        path.write_text("weights")
        lines += [f"path = {str(path)!r}", change]
    before = listing(tmp_path)
    script = written("\n".join(lines) + "\n")
    outcome = server.follow(script)
    assert outcome.steps == 2, outcome
    del (after := listing(tmp_path))[str(script.resolve())]
    assert after == before


def test_what_goes_other_ways_is_refused_with_its_line(server: Server, results: Path) -> None:
    path = results / "old" / "model.txt"
    modules = "multiprocessing, os, posix, signal, socket, subprocess, sys"
    lines = [f"import {modules}; path = sys.argv[1]"]
    for call in REFUSED:
        lines += [
            "try:",
            f"    {call}",
            "except PermissionError: pass",
            "else: raise SystemExit(1)",
        ]
    outcome = server.follow(written("\n".join(lines) + "\n"), str(path))
    assert outcome.steps == 2, outcome
    for number in range(len(REFUSED)):
        assert any(f"script.py, line {4 * number + 3}" in note for note in outcome.notes), number
    assert listing(results) == {str(path): "weights"}
    assert not Path("changed").exists()


def test_a_refusal_that_the_script_does_not_expect_names_its_line(server: Server) -> None:
    text = "import socket\nsocket.create_connection(('127.0.0.1', 9))\n"
    assert "script.py, line 2" in server.follow(written(text)).failed_at


@pytest.mark.skipif(sys.platform != "linux", reason="the folder is Linux's")
def test_files_in_shared_memory_are_left_as_others(server: Server) -> None:
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        outcome = server.follow(
            written(f"import os; open({file.name!r}, 'w').write('x'); os.remove({file.name!r})\n")
        )
        assert outcome.steps == 2, outcome
        assert Path(file.name).read_text() == ""


@pytest.mark.skipif(sys.platform != "linux", reason="Landlock is Linux's")
def test_native_code_is_held_back_by_the_kernel_or_a_note_says_that_it_is_not(
    server: Server, results: Path
) -> None:
    path = results / "old" / "model.txt"
    script = written(
        "import ctypes, os, sys\n"
        "libc = ctypes.CDLL(None)\n"
        "assert libc.unlink(sys.argv[1].encode()) == -1\n"
        "assert libc.truncate(sys.argv[1].encode(), 0) == -1\n"
        "assert not libc.fopen(sys.argv[1].encode(), b'w')\n"
        f"assert {landlock.version()} < 6 or libc.kill(os.getppid(), 0) == -1\n"
    )
    outcome = server.follow(script, str(path))
    if not any("Landlock" in note for note in outcome.notes):
        assert outcome.steps == 2, outcome
        assert listing(results) == {str(path): "weights"}


def test_the_script_s_own_folder_is_left_as_it_is(server: Server) -> None:
    before = {*Path().rglob("*")}
    text = """
import os
import torch
os.chdir(os.path.dirname(__file__))
torch.save({}, "model.pt")
open("log.txt", "w").write("x")
os.makedirs("runs/1")
"""
    outcome = server.follow(written(text))
    assert outcome.steps == 2, outcome
    assert {*Path().rglob("*")} - before == {Path("script.py")}


def refusing(calls: tuple[str, ...]) -> str:
    """Return lines that end the script unless each of these calls is refused; 4 for each."""
    form = "try:\n    {}\nexcept PermissionError: pass\nelse: raise SystemExit({!r})\n"
    return "".join(form.format(call, call) for call in calls)


STARTS = (
    "mp.get_context('spawn').Process(target=print).start()",
    "mp.get_context('forkserver').Process(target=print).start()",
    "mp.get_context('fork').Process(target=print).start()",
    "mp.Manager()",
    "mp.util.spawnv_passfds(b'/bin/sh', ['sh', '-c', 'touch changed'], [])",
    "torch.multiprocessing.spawn(print)",
    "os.posix_spawn('/bin/sh', ['sh'], {})",
    "signal.pidfd_send_signal(os.pidfd_open(os.getppid()), 0)",
    "os.kill(os.getppid(), 0)",
)


@pytest.mark.skipif(sys.platform != "linux", reason="pidfd_open is Linux's")
def test_no_process_is_started_or_reached_by_python(server: Server) -> None:
    text = "import multiprocessing as mp, multiprocessing.util, os, signal, torch\n"
    outcome = server.follow(written(text + refusing(STARTS)))
    assert outcome.steps == 2, outcome
    for number, call in enumerate(STARTS):
        line = f"script.py, line {4 * number + 3})"
        assert any(line in note for note in outcome.notes), (call, outcome.notes)
    assert not Path("changed").exists()


def test_attributes_of_files_stay_and_are_noted(server: Server, results: Path) -> None:
    path = results / "old" / "model.txt"
    before = path.stat()
    changes = (
        "os.chmod(path, 0)",
        "os.utime(path, (1, 1))",
        "os.chown(path, 65534, 65534)",
        "os.fchmod(fd, 0)",
        "os.utime(fd, (1, 1))",
        "pathlib.Path(path).chmod(0)",
        "shutil.copystat(__file__, path)",
    )
    lines = (
        "import os, pathlib, shutil, sys; path = sys.argv[1]",
        "fd = os.open(path, 0)",
        *changes,
    )
    own = "open('own', 'w').close(); os.chmod('own', 0o600); shutil.copy('own', 'own2')\n"
    outcome = server.follow(written("\n".join(lines) + "\n" + own), str(path))
    assert outcome.steps == 2, outcome
    after = path.stat()
    assert (after.st_mode, after.st_uid, after.st_mtime) == (
        before.st_mode,
        before.st_uid,
        before.st_mtime,
    )
    for number in range(len(changes)):
        assert any(f"line {number + 3})" in note for note in outcome.notes), outcome.notes
    assert not any("own" in note.replace("chown", "") for note in outcome.notes), outcome.notes


SHARED = """
import _multiprocessing
import multiprocessing as mp
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory("headway-test-sharing", create=True, size=8)
memory.buf[0] = 3
other = SharedMemory("headway-test-sharing")
assert other.buf[0] == 3
for context in (mp.get_context("fork"), mp.get_context("spawn")):
    queue = context.Queue()
    queue.put(1)
    assert queue.get() == 1
    with context.Lock(), context.RLock() as lock, context.Semaphore(2):
        assert lock
    event = context.Event()
    event.set()
    assert event.wait(1)
    assert not context.Semaphore(0).acquire(timeout=0)
    _multiprocessing.SemLock(0, 1, 1, name="/headway-test", unlink=True).acquire()
    number = context.Value("i", 2)
    assert number.value == 2
"""


def test_shared_memory_and_locks_work_and_nobody_else_sees_them(server: Server) -> None:
    for _ in range(2):  # the second finds nothing of the first
        outcome = server.follow(written(SHARED))
        assert (outcome.steps, outcome.notes) == (2, ()), outcome


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="shared memory has no folder here")
def test_shared_memory_of_others_is_left_as_it_is(server: Server) -> None:
    others = Path("/dev/shm") / f"headway-test-{os.getpid()}"
    others.write_text("weights")
    try:
        text = (
            "import os, sys; from multiprocessing.shared_memory import SharedMemory\n"
            "one = SharedMemory(os.path.basename(sys.argv[1]))\n"
            "assert bytes(one.buf[:7]) == b'weights'\n"
            "one.buf[:1] = b'x'; one.unlink()\n"
            "open(sys.argv[1], 'w').write('changed'); os.remove(sys.argv[1])\n"
        )
        outcome = server.follow(written(text), str(others))
        assert outcome.steps == 2, outcome
        assert others.read_text() == "weights"
    finally:
        others.unlink()


def test_temporary_files_and_databases_of_the_working_folder_are_its_own(server: Server) -> None:
    old = Path("old.db")
    with closing(sqlite3.connect(old)) as database:
        database.execute("create table t(x)")
    before = old.read_bytes()
    text = """
import os, sqlite3, tempfile
os.chdir(os.path.dirname(__file__))
with tempfile.NamedTemporaryFile("w", dir=".") as file:
    file.write("x")
file = tempfile.NamedTemporaryFile("w", dir=".", delete=False)
file.write("new")
file.close()
os.replace(file.name, "latest.txt")
assert open("latest.txt").read() == "new"
with tempfile.TemporaryDirectory(dir=".") as folder:
    open(os.path.join(folder, "a"), "w").close()
sqlite3.connect(":memory:").execute("create table t(x)")
for name in ("new.db", "old.db"):
    with sqlite3.connect(name) as database:
        database.execute("create table if not exists t(x)")
        database.execute("insert into t values (1)")
    assert sqlite3.connect(name).execute("select x from t").fetchall() == [(1,)]
assert sqlite3.connect("file:old.db?mode=ro", uri=True).execute("select x from t").fetchall() == []
try:
    sqlite3.connect("file:old.db", uri=True)
except PermissionError:
    pass
else:
    raise SystemExit(1)
"""
    outcome = server.follow(written(text))
    assert outcome.steps == 2, outcome
    assert {one.name for one in Path().iterdir()} == {"old.db", "script.py"}
    assert old.read_bytes() == before
