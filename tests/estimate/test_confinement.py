"""A script that is estimated changes nothing: no file, no folder, no program, no network."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

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
    "open(path + '.new', 'x').write('new')",
    "io.FileIO(path, 'w').write(b'changed')",
    "os.symlink(path, path + '.link')",
)
REFUSED = (
    "os.fork()",
    "os.system('touch changed')",
    "subprocess.run(['touch', 'changed'])",
    "socket.create_connection(('127.0.0.1', 9))",
    "posix.unlink(path)",
    "posix.rename(path, path + '.bak')",
)


def test_files_are_as_they_were_whatever_is_done_to_them(server: Server, tmp_path: Path) -> None:
    lines = ["import io, os, pathlib, shutil, sys"]
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
    lines = ["import os, posix, socket, subprocess, sys; path = sys.argv[1]"]
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


@pytest.mark.skipif(sys.platform != "linux", reason="Landlock is Linux's")
def test_native_code_is_held_back_by_the_kernel_or_a_note_says_that_it_is_not(
    server: Server, results: Path
) -> None:
    path = results / "old" / "model.txt"
    script = written(
        "import ctypes, sys\n"
        "libc = ctypes.CDLL(None)\n"
        "assert libc.unlink(sys.argv[1].encode()) == -1\n"
        "assert libc.truncate(sys.argv[1].encode(), 0) == -1\n"
        "assert not libc.fopen(sys.argv[1].encode(), b'w')\n"
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
