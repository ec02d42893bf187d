"""A program that a warm Python forks finds what an executed one finds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launching import environment, executed, on_linux, popen, script
from tests.distributed.warm_start import WarmPopen

pytestmark = on_linux

PROBE = """
import json, os, signal, sys, threading
os.umask(umask := os.umask(0))
found = {
    "name": __name__,
    "torch": "torch" in sys.modules,
    "argv": sys.argv,
    "command": sys.orig_argv,
    "path": sys.path,
    "flags": list(sys.flags),
    "warnings": sys.warnoptions,
    "folder": os.getcwd(),
    "umask": umask,
    "environ": os.environ | dict.fromkeys(("HEADWAY_RUN", "HEADWAY_OWN_RECORD", "MASTER_PORT")),
    "process": [os.getppid(), os.getpgrp(), os.getsid(0)],
    "handlers": {one.name: str(signal.getsignal(one)) for one in signal.Signals},
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "fds": sorted(os.listdir("/proc/self/fd")),
    "threads": [threading.active_count(), len(os.listdir("/proc/self/task"))],
    "input": sys.stdin.read(),
    "buffered": [[one.line_buffering, one.write_through] for one in (sys.stdout, sys.stderr)],
}
print(json.dumps(found))
print("said", file=sys.stderr)
sys.exit(7)
"""


def seen_by(command: list[str], **options: Any) -> tuple[type, object, dict[str, Any]]:
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with popen(command, text=True, **streams, **options) as process:
        out, errors = process.communicate("typed", timeout=120)
    return type(process), (process.returncode, errors), json.loads(out)


ALONE = ["-m", "headway", "launch", "-q", "--cpu", "probe.py"]


@pytest.mark.parametrize("program", [["probe.py"], ["-m", "probe"], ALONE])
def test_a_forked_program_finds_what_an_executed_one_finds(program: list[str]) -> None:
    script(PROBE, "probe.py")
    Path("folder").mkdir()
    script(PROBE, "folder/probe.py")
    command = [sys.executable, *program, "a b", "--", "-x"]
    for options in ({}, {"cwd": Path("folder")}):
        env = environment(EXTRA="1")
        kind, end, forked = seen_by(command, env=env, **options)
        assert kind is WarmPopen
        with executed():
            kind, usual_end, usual = seen_by(command, env=env, **options)
        assert kind is subprocess.Popen
        assert end == usual_end == (7, "said\n")
        assert (forked.pop("torch"), usual.pop("torch")) == (True, False)
        different = [name for name in usual if forked[name] != usual[name]]
        assert not different, [(forked[name], usual[name]) for name in different]


def test_variables_that_python_or_torch_read_at_their_start_are_obeyed() -> None:
    name = script(PROBE)
    for variable in ("PYTHONUNBUFFERED", "PYTHONOPTIMIZE", "OMP_NUM_THREADS"):
        kind, _, found = seen_by([sys.executable, name], env=environment(**{variable: "77"}))
        assert kind is subprocess.Popen
        assert found["environ"][variable] == "77"
    kind, _, found = seen_by([sys.executable, name], env=environment(OMP_NUM_THREADS="1"))
    assert (kind, found["environ"]["OMP_NUM_THREADS"]) == (WarmPopen, "1")


def test_a_signal_ends_a_forked_program_and_its_parent_is_told() -> None:
    name = script("import os; os.kill(os.getpid(), 9)")
    with popen([sys.executable, name], env=environment()) as process:
        assert process.wait(timeout=120) == -9
    assert type(process) is WarmPopen
