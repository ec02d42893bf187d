"""Idle GPUs: two launches at the same moment never take the same. No GPU is needed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.errors import MachineError
from headway.launcher.processes import gpu_claims
from headway.launcher.processes.gpu_claims import claim_idle, waiting_launches, with_claims
from headway.machine.facts import Gpu, GpuUse, Machine
from headway.settings.table import Settings
from tests.another_user import NOBODY, fork_as, needs_root
from tests.distributed.launching import begin
from tests.launcher.plan.planning import settings_of
from tests.waiting import wait_until

IDLE = GpuUse(0, 0, ())
FOUR = Machine(gpus=tuple(Gpu("H100", f"GPU-{i}", 2**36, (9, 0), use=IDLE) for i in range(4)))

OF_THE_TEST = """\
import os, sys
from headway.launcher.processes import gpu_claims
from tests.launcher.processes.test_gpu_claims import FOUR, asking_for
gpu_claims.NAME_PREFIX = sys.argv[1]
"""
CLAIM = """\
settings = asking_for(sys.argv[2])
machine = gpu_claims.claim_idle(settings, lambda: FOUR, float(sys.argv[3]))
print(*settings.devices.select(machine.visible_gpus).indices, flush=True)
sys.stdin.read()  # until the test has seen what all have
"""


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let claims have names of the test's own; those of this process end with it."""
    before = open_sockets()
    monkeypatch.setattr(gpu_claims, "NAME_PREFIX", f"headway-test-{uuid.uuid4().hex}")
    yield
    for fd in open_sockets() - before:
        os.close(fd)


def open_sockets() -> set[int]:
    folder = Path("/proc/self/fd")
    files = {int(path.name): os.path.realpath(path) for path in folder.iterdir()}
    return {fd for fd, file in files.items() if "socket:" in file}


def asking_for(devices: str) -> Settings:
    return settings_of(FOUR, devices=devices)


def run_code(code: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", OF_THE_TEST + code, gpu_claims.NAME_PREFIX, *arguments]
    return begin(command, stdin=subprocess.PIPE)


def start(devices: str, wait_s: float = 0) -> subprocess.Popen[str]:
    return run_code(CLAIM, devices, str(wait_s))


def chosen_by(process: subprocess.Popen[str]) -> list[int]:
    return [int(word) for word in next(iter(process.stdout or ()), "").split()]


def end(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        process.communicate("", timeout=120)


def bound(name: str) -> socket.socket:
    """Return a socket that has the name, as any process of any user may have."""
    held = socket.socket(socket.AF_UNIX)
    held.bind(f"\0{gpu_claims.NAME_PREFIX}-{name}")
    held.listen(1)
    return held


def test_a_launch_that_is_overtaken_between_looking_and_claiming_chooses_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held: list[socket.socket] = []
    claimed_by = gpu_claims._claimed_by

    def look() -> Machine:
        if not held:  # after this look another launch takes GPU 1
            held.append(bound("GPU-1"))
            monkeypatch.setattr(gpu_claims, "_claimed_by", lambda *_: "")
        else:
            monkeypatch.setattr(gpu_claims, "_claimed_by", claimed_by)
        return FOUR

    machine = claim_idle(asking_for("idle:2"), look, None)
    assert asking_for("idle:2").devices.select(machine.visible_gpus).indices == (0, 2)
    held[0].close()


@needs_root
@pytest.mark.processes
def test_a_gpu_that_another_user_has_claimed_is_passed_over_with_the_process() -> None:
    def claim() -> None:
        claim_idle(asking_for("idle:1"), lambda: FOUR, None)
        signal.pause()

    pid = fork_as(NOBODY, claim)
    try:
        wait_until(lambda: with_claims(FOUR).gpus[0].claimed_by)
        claimed = with_claims(FOUR)
        assert f"process {pid} of nobody" in claimed.gpus[0].claimed_by
        assert not any(gpu.claimed_by for gpu in claimed.gpus[1:])
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert with_claims(FOUR) == FOUR


@pytest.mark.processes
def test_a_claimed_gpu_is_passed_over_with_the_reason_until_its_launch_ends() -> None:
    first = start("idle:3")
    assert chosen_by(first) == [0, 1, 2]
    selection = asking_for("idle:2").devices.select(with_claims(FOUR).visible_gpus)
    assert selection.indices == (3,)
    assert "GPU 0: claimed by another launch" in selection.skipped[0]
    first.kill()  # however it ends
    end(first)
    assert with_claims(FOUR) == FOUR


@pytest.mark.processes
def test_waiting_launches_are_served_in_the_order_in_which_they_began_to_wait() -> None:
    first = start("idle:3")
    chosen_by(first)
    second = start("idle:4", wait_s=300)
    assert "waiting: only 1 of 4 GPUs is idle" in next(iter(second.stderr or ()))
    third = start("idle:1", wait_s=300)
    waits = f"process {second.pid} of "
    assert f"waiting: behind 1 waiting launch ({waits}" in next(iter(third.stderr or ()))
    assert [waits in launch for launch in waiting_launches()] == [True, False]
    assert [launch.split()[-1] for launch in waiting_launches()] == ["idle:4", "idle:1"]
    for wait_s in (None, 0.1):
        with pytest.raises(MachineError, match="the idle GPUs are reserved for 2 waiting launches"):
            claim_idle(asking_for("idle:1"), lambda: FOUR, wait_s)
    second.kill()  # however it ends, the next one is served
    assert chosen_by(third) == [3]
    assert waiting_launches() == []
    fourth = start("idle:2", wait_s=300)
    assert "waiting: only 0 of 4 GPUs are idle" in next(iter(fourth.stderr or ()))
    end(first)
    assert chosen_by(fourth) == [0, 1]
    end(second, third, fourth)


def test_waiting_ends_after_the_seconds_that_were_allowed() -> None:
    began = time.monotonic()
    busy = FOUR._replace(gpus=(FOUR.gpus[0]._replace(use=GpuUse(0, 90, ())), *FOUR.gpus[1:]))
    looks: list[Machine] = []

    def look() -> Machine:
        looks.append(busy)
        return busy

    machine = claim_idle(asking_for("idle:4"), look, 0.1)
    assert asking_for("idle:4").devices.select(machine.visible_gpus).problems
    assert time.monotonic() - began >= 0.1
    assert len(looks) <= 2  # at the beginning and at the end


@pytest.mark.parametrize(
    ("wanted", "change"),
    [("idle:5", {}), ("idle:1", {"use": None}), ("idle:1", {"compute_mode": "prohibited"})],
)
def test_nobody_waits_for_more_gpus_than_can_become_idle(
    wanted: str, change: dict[str, Any]
) -> None:
    machine = FOUR._replace(gpus=tuple(gpu._replace(**change) for gpu in FOUR.gpus))
    assert claim_idle(asking_for(wanted), lambda: machine, float("inf")) == machine


def test_only_what_is_used_is_claimed() -> None:
    slices = FOUR._replace(gpus=tuple(gpu._replace(slice_of="GPU-x") for gpu in FOUR.gpus))
    claim_idle(settings_of(slices, devices="idle:2"), lambda: slices, None)
    assert [bool(gpu.claimed_by) for gpu in with_claims(FOUR).gpus] == [True] + [False] * 3


@pytest.mark.processes
def test_a_script_that_replaces_the_launcher_keeps_the_claim() -> None:
    text = (
        "gpu_claims.claim_idle(asking_for('idle:4'), lambda: FOUR, None)\n"
        "os.execv(sys.executable, [sys.executable, '-c', "
        "'import sys; print(\"up\", flush=True); sys.stdin.read()'])"
    )
    script = run_code(text)
    assert script.stdout is not None
    assert script.stdout.readline() == "up\n"
    assert all(gpu.claimed_by for gpu in with_claims(FOUR).gpus)
    end(script)
    assert not any(gpu.claimed_by for gpu in with_claims(FOUR).gpus)


def test_a_system_without_such_names_refuses_idle_gpus_and_claims_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_claims, "_HAS_NAMES", False)
    assert with_claims(FOUR) == FOUR
    with pytest.raises(MachineError, match="only on Linux"):
        claim_idle(asking_for("idle:1"), lambda: FOUR, None)


LAUNCH = """\
from headway.commands import launch
from headway.commands.main import main
launch.machine_from_flags = lambda parsed, environ, **_: (FOUR, environ)
launch.detect_machine = lambda environ, full: FOUR
raise SystemExit(main(["launch", "--devices", "idle:1", "script.py"]))
"""


@pytest.mark.processes
def test_real_launches_at_once_give_each_script_a_gpu_of_its_own() -> None:
    Path("script.py").write_text(
        "import os, sys\nprint(os.environ['CUDA_VISIBLE_DEVICES'], flush=True)\nsys.stdin.read()"
    )
    launches = [run_code(LAUNCH) for _ in range(5)]
    chosen = [chosen_by(launch) for launch in launches]
    refused = launches[chosen.index([])]
    _, said = refused.communicate("", timeout=120)
    end(*(launch for launch in launches if launch is not refused))
    assert sorted(gpu for gpus in chosen for gpu in gpus) == [0, 1, 2, 3]
    assert refused.returncode == 3
    assert "only 0 of 4 GPUs are idle (GPU 0: claimed by another launch" in said
    assert "fix:  wait for them with --wait" in said
