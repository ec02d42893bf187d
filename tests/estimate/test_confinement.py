"""A script that is estimated changes nothing: no file, no folder, no program, no network."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.estimate.planner import TrialResult
from tests.estimate.following import Follow

pytestmark = pytest.mark.processes

TRAINING = """
import torch
net = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(2):
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""
MODULES = (
    "import ctypes, io, multiprocessing as mp, multiprocessing.util, os, pathlib, posix, shutil\n"
    "import multiprocessing.shared_memory, signal, socket, sqlite3, subprocess, sys, torch\n"
)
NOTED = "# noted"


def written(text: str) -> Path:
    script = Path("script.py")
    script.write_text(text + TRAINING)
    return script


def goes_on_and_notes(outcome: TrialResult) -> bool:
    """Return whether a script was followed, and all lines with NOTED are in notes, and no other."""
    assert (outcome.steps, outcome.failed_at) == (2, ""), outcome
    lines = enumerate(Path("script.py").read_text().splitlines(), 1)
    expected = [number for number, line in lines if NOTED in line]
    notes = outcome.notes
    assert len(notes) == len(expected), notes
    return all(any(f"line {number})" in note for note in notes) for number in expected)


def listing(folder: Path) -> dict[str, str]:
    """Return the text of every file below a folder."""
    return {str(path): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    (folder / "old").mkdir(parents=True)
    (folder / "old" / "model.txt").write_text("weights")
    return folder


def test_a_script_that_begins_by_removing_its_results_leaves_them(
    follow: Follow, results: Path
) -> None:
    text = """
import os, shutil, sys
shutil.rmtree(sys.argv[1])  # noted
os.makedirs(sys.argv[1] + '/new')
open(sys.argv[1] + '/new/log.txt', 'w').write('new')
assert open(sys.argv[1] + '/new/log.txt').read() == 'new'
shutil.rmtree(sys.argv[1] + '/new')
assert not os.path.exists(sys.argv[1] + '/new')
"""
    assert goes_on_and_notes(follow(written(text), str(results)))
    assert listing(results) == {str(results / "old" / "model.txt"): "weights"}


CHANGES = (
    "open(path, 'w').write('changed')",
    "open(path, 'a').write('changed')",
    "pathlib.Path(path).write_text('changed')",
    "os.remove(path)  # noted",
    "pathlib.Path(path).unlink()  # noted",
    "os.rename(path, path + '.bak')  # noted",
    "os.replace(path, path + '.bak')  # noted",
    "shutil.move(path, path + '.bak')  # noted",
    "os.truncate(path, 0)  # noted",
    "os.close(os.open(path, os.O_RDWR | os.O_TRUNC))",
    "shutil.copyfile(__file__, path)",
    "open(path + '.new', 'x').write('new')",
    "os.symlink(path, path + '.link')  # noted",
    "os.chmod(path, 0)",
    "os.utime(path, (1, 1))",
    "os.chown(path, 65534, 65534)",
    "os.fchmod(os.open(path, 0), 0)",
    "pathlib.Path(path).chmod(0)",
    "shutil.copymode(__file__, path)",
)


def test_files_are_as_they_were_whatever_is_done_to_them(follow: Follow, results: Path) -> None:
    lines = []
    for number, change in enumerate(CHANGES):
        path = results / f"{number}.txt"
        path.write_text("weights")
        lines += [f"path = {str(path)!r}", change]
    own = "open('own', 'w').close(); os.chmod('own', 0o600); shutil.copy('own', 'own2')\n"
    before, of_files = listing(results), [path.stat() for path in sorted(results.iterdir())]
    assert goes_on_and_notes(follow(written(MODULES + "\n".join(lines) + "\n" + own)))
    assert listing(results) == before
    for old, new in zip(of_files, [path.stat() for path in sorted(results.iterdir())], strict=True):
        assert (old.st_mode, old.st_uid, old.st_mtime) == (new.st_mode, new.st_uid, new.st_mtime)


REFUSED: tuple[str, ...] = (
    "os.fork()",
    "os.system('touch changed')",
    "os.posix_spawn('/bin/sh', ['sh'], {})",
    "subprocess.run(['touch', 'changed'])",
    "mp.get_context('spawn').Process(target=print).start()",
    "mp.get_context('forkserver').Process(target=print).start()",
    "mp.get_context('fork').Process(target=print).start()",
    "mp.Manager()",
    "mp.shared_memory.SharedMemory(create=True, size=8)",
    "mp.util.spawnv_passfds(b'/bin/sh', ['sh', '-c', 'touch changed'], [])",
    "torch.multiprocessing.spawn(print)",
    "os.kill(os.getppid(), 0)",
    "socket.create_connection(('127.0.0.1', 9))",
    "sqlite3.connect(path)",
    "posix.unlink(path)",
    "posix.rename(path, path + '.bak')",
    "posix.chmod(path, 0)",
)


def test_what_goes_other_ways_is_refused_with_its_line(follow: Follow, results: Path) -> None:
    form = "try:\n    {}  # noted\nexcept PermissionError: pass\nelse: raise SystemExit({!r})\n"
    calls = "".join(form.format(call, call) for call in REFUSED)
    path = results / "old" / "model.txt"
    before = path.stat().st_mode
    assert goes_on_and_notes(follow(written(f"{MODULES}path = {str(path)!r}\n{calls}")))
    assert listing(results) == {str(path): "weights"}
    assert path.stat().st_mode == before
    assert not Path("changed").exists()


def test_a_refusal_that_the_script_does_not_expect_names_its_line(follow: Follow) -> None:
    text = "import socket\nsocket.create_connection(('127.0.0.1', 9))\n"
    assert "script.py, line 2" in follow(written(text)).failed_at


LOCKS = """
import multiprocessing as mp
context = mp.get_context("fork")
queue = context.Queue()
queue.put(1)
assert queue.get() == 1
with context.Lock() as lock, context.RLock():
    assert lock
assert context.Value("i", 2).value == 2
"""


def test_locks_and_queues_work(follow: Follow) -> None:
    assert goes_on_and_notes(follow(written(LOCKS)))


def test_what_is_written_in_the_script_s_own_folder_is_read_there_and_is_nowhere(
    follow: Follow,
) -> None:
    text = """
import os, pathlib, sqlite3, torch
os.chdir(os.path.dirname(__file__))
torch.save({}, "model.pt")
open("log.txt", "w").write("x")
os.makedirs("runs/1")
assert os.listdir("runs") == ["1"]
pathlib.Path("touched").touch()
assert os.path.exists("touched")
open("new.txt", "w").write("new")
os.replace("new.txt", "latest.txt")
assert open("latest.txt").read() == "new"
sqlite3.connect(":memory:").execute("create table t(x)")
"""
    outcome = follow(written(text))
    assert outcome.steps == 2, outcome
    assert {path.name for path in Path().iterdir()} == {"script.py"}
