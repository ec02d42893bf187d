"""The launcher's side of the process that starts the ranks."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from headway.errors import LaunchError
from headway.launcher.plan.program import Program
from headway.launcher.processes import starter as starting
from headway.launcher.rank import worker
from tests.distributed.launching import environment, run
from tests.launcher.plan.planning import plan

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def other_children_live_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a starter in this process, which is no launcher, end none of its other children."""
    monkeypatch.setattr(starting, "terminate_descendants", lambda grace_s: None)


def error_of_start(code: str, monkeypatch: pytest.MonkeyPatch) -> Exception:
    """Start a server that runs this code instead; return why it starts no rank."""
    monkeypatch.setattr(worker, "bootstrap_code", lambda _: code)
    launch = plan(program=Program("a.py"), python=[sys.executable])
    starter = starting.Starter(launch, os.environ)
    try:
        with pytest.raises((LaunchError, starting.ServerExited)) as raised:
            starter.start({}, (), lambda: None)
    finally:
        starter.close()
    return raised.value


def test_a_server_has_the_standard_streams_of_a_launcher_that_opened_them_for_itself_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code = f"""
import os
found = [(one.st_dev, one.st_ino) for one in (os.fstat(1), os.fstat(2))]
with open({str(tmp_path / "found")!r}, "w") as file:
    file.write(repr(found))
"""
    before = [os.get_inheritable(fd) for fd in (1, 2)]
    for fd in (1, 2):  # as the null device, in the place of a stream that was closed
        os.set_inheritable(fd, False)
    try:
        assert isinstance(error_of_start(code, monkeypatch), starting.ServerExited)
    finally:
        for fd, is_inherited in zip((1, 2), before, strict=True):
            os.set_inheritable(fd, is_inherited)
    expected = [(status.st_dev, status.st_ino) for status in (os.fstat(1), os.fstat(2))]
    assert (tmp_path / "found").read_text() == repr(expected)


@pytest.mark.distributed
@pytest.mark.parametrize("method", ["fork", "exec"])
def test_ranks_are_bound_to_the_cores_of_the_plan_among_those_that_they_may_use(
    method: str, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    may_use = os.sched_getaffinity(0)
    last = max(may_use)
    (tmp_path / "a.py").write_text("import os; print(os.sched_getaffinity(0), sorted(os.environ))")
    code = f"""from headway.launcher.plan.plan import LaunchPlan
LaunchPlan.cpus = property(lambda _: ("9000,{last}-8999", "9000"))
__import__("headway.commands.main").commands.main.run_command()"""
    words = ["launch", "--cpu", "--num-processes", "2", "--set", f"start_method={method}", "a.py"]
    command = [sys.executable, "-c", code, *words]
    done = run(command, environment(), timeout_s=170, cwd=tmp_path)
    assert {f"[0] {{{last}}} [", f"[1] {may_use} ["} == set(re.findall(r".*} \[", done.stdout))
    assert "HEADWAY_CPUS" not in done.stdout
