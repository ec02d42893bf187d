"""Idle GPUs: two launches at the same moment never take the same. No GPU is needed."""

from __future__ import annotations

import fcntl
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from headway.contract.origin import Layer, Origin
from headway.errors import MachineError
from headway.launcher.starting.gpu_claims import claim_idle, with_claims
from headway.machine.facts import Gpu, GpuUse, Machine
from headway.settings.profile import Entry
from headway.settings.resolve import resolve
from headway.settings.table import Settings

IDLE = GpuUse(0, 0, ())
FOUR = Machine(gpus=tuple(Gpu("H100", f"GPU-{i}", 2**36, (9, 0), use=IDLE) for i in range(4)))

CLAIM = """\
import sys
sys.path[:] = sys.argv[4:]
from tests.launcher.starting.test_gpu_claims import FOUR, asking_for
from headway.launcher.starting.gpu_claims import claim_idle
settings = asking_for(sys.argv[2])
machine = claim_idle(settings, lambda: FOUR, float(sys.argv[3]), sys.argv[1])
print(*settings.devices.select(machine.visible_gpus).indices, flush=True)
sys.stdin.read()  # until the test has seen what all have
"""


def asking_for(devices: str) -> Settings:
    return resolve([{"devices": Entry(devices, Origin(Layer.FLAG, flag="--devices"))}], FOUR, {})


def start(folder: Path, devices: str, wait_s: float = 0) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CLAIM, str(folder), devices, str(wait_s), *sys.path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def chosen_by(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout is not None
    return [int(word) for word in process.stdout.readline().split()]


def end(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        process.communicate("", timeout=60)


@pytest.mark.processes
def test_launches_at_the_same_moment_share_the_gpus_out(tmp_path: Path) -> None:
    claims = [start(tmp_path, "idle:1") for _ in range(6)]
    chosen = [chosen_by(claim) for claim in claims]
    end(*claims)
    assert sorted(gpu for gpus in chosen for gpu in gpus) == [0, 1, 2, 3]
    assert chosen.count([]) == 2


@pytest.mark.processes
def test_launches_choose_one_after_the_other(tmp_path: Path) -> None:
    with open(tmp_path / "turn.lock", "w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        claim = start(tmp_path, "idle:1")
        assert claim.stdout is not None
        assert not select.select([claim.stdout], [], [], 1)[0]
    assert chosen_by(claim) == [0]
    end(claim)


def test_who_only_looks_makes_no_gpu_seem_claimed(tmp_path: Path) -> None:
    (tmp_path / "GPU-0.lock").touch()
    with open(tmp_path / "GPU-0.lock") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        assert with_claims(FOUR, str(tmp_path)) == FOUR


@pytest.mark.processes
def test_of_two_launches_that_both_want_the_last_gpus_one_gets_them(tmp_path: Path) -> None:
    claims = [start(tmp_path, "idle:3") for _ in range(2)]
    chosen = [chosen_by(claim) for claim in claims]
    end(*claims)
    assert sorted(map(len, chosen)) == [1, 3]  # the second sees what is left, and is refused
    assert sorted(chosen[0] + chosen[1]) == [0, 1, 2, 3]


@pytest.mark.processes
def test_a_claimed_gpu_is_passed_over_with_the_reason_until_its_launch_ends(
    tmp_path: Path,
) -> None:
    first = start(tmp_path, "idle:3")
    assert chosen_by(first) == [0, 1, 2]
    selection = asking_for("idle:2").devices.select(with_claims(FOUR, str(tmp_path)).visible_gpus)
    assert selection.indices == (3,)
    assert "GPU 0: claimed by another launch" in selection.passed_over[0]
    first.kill()  # however it ends
    end(first)
    assert with_claims(FOUR, str(tmp_path)) == FOUR


@pytest.mark.wording
@pytest.mark.processes
def test_a_launch_that_waits_gets_the_gpus_of_one_that_ends(tmp_path: Path) -> None:
    first = start(tmp_path, "idle:4")
    chosen_by(first)
    second = start(tmp_path, "idle:2", wait_s=30)
    assert second.stderr is not None
    assert "waiting: only 0 of 4 GPUs are idle" in second.stderr.readline()
    end(first)
    assert chosen_by(second) == [0, 1]
    end(second)


def test_waiting_ends_after_the_seconds_that_were_allowed(tmp_path: Path) -> None:
    began = time.monotonic()
    busy = FOUR._replace(gpus=(FOUR.gpus[0]._replace(use=GpuUse(0, 90, ())), *FOUR.gpus[1:]))
    machine = claim_idle(asking_for("idle:4"), lambda: busy, 0.1, str(tmp_path))
    assert asking_for("idle:4").devices.select(machine.visible_gpus).problems
    assert 0.1 <= time.monotonic() - began < 10


def test_nobody_waits_for_more_gpus_than_there_are(tmp_path: Path) -> None:
    machine = claim_idle(asking_for("idle:5"), lambda: FOUR, float("inf"), str(tmp_path))
    assert machine == FOUR


@pytest.mark.parametrize("change", [{"use": None}, {"compute_mode": "prohibited"}])
def test_nobody_waits_for_gpus_that_never_become_idle(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    machine = FOUR._replace(gpus=tuple(gpu._replace(**change) for gpu in FOUR.gpus))
    assert claim_idle(asking_for("idle:1"), lambda: machine, float("inf"), str(tmp_path)) == machine


def test_only_what_is_used_is_claimed(tmp_path: Path) -> None:
    slices = FOUR._replace(gpus=tuple(gpu._replace(slice_of="GPU-x") for gpu in FOUR.gpus))
    entry = Entry("idle:2", Origin(Layer.FLAG, flag="--devices"))
    settings = resolve([{"devices": entry}], slices, {})
    locks = tmp_path / "locks"
    claim_idle(settings, lambda: slices, None, str(locks))
    assert sorted(path.name for path in locks.iterdir()) == ["GPU-0.lock", "turn.lock"]


@pytest.mark.processes
def test_a_script_that_replaces_the_launcher_keeps_the_claim(tmp_path: Path) -> None:
    text = (
        "import os, sys\nsys.path[:] = sys.argv[2:]\n"
        "from tests.launcher.starting.test_gpu_claims import FOUR, asking_for\n"
        "from headway.launcher.starting.gpu_claims import claim_idle\n"
        "claim_idle(asking_for('idle:4'), lambda: FOUR, None, sys.argv[1])\n"
        "os.execv(sys.executable, [sys.executable, '-c', "
        "'import sys; print(\"up\", flush=True); sys.stdin.read()'])"
    )
    script = subprocess.Popen(
        [sys.executable, "-c", text, str(tmp_path), *sys.path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert script.stdout is not None
    assert script.stdout.readline() == "up\n"
    assert all(gpu.claimed_by for gpu in with_claims(FOUR, str(tmp_path)).gpus)
    end(script)
    assert not any(gpu.claimed_by for gpu in with_claims(FOUR, str(tmp_path)).gpus)


@pytest.mark.usefixtures("ordinary_user")
def test_a_folder_that_cannot_be_written_is_refused_with_the_way_out(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(MachineError, match="cannot be claimed"):
        claim_idle(asking_for("idle:1"), lambda: FOUR, None, str(tmp_path / "locks"))


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "locks").touch()
    with pytest.raises(MachineError, match="cannot be claimed"):
        claim_idle(asking_for("idle:1"), lambda: FOUR, None, str(tmp_path / "locks"))


def test_a_strict_umask_shuts_no_other_user_out(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        claim_idle(asking_for("idle:1"), lambda: FOUR, None, str(tmp_path / "locks"))
    finally:
        os.umask(before)
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "locks").iterdir()}
    assert modes == {0o644}


def test_a_lock_that_cannot_be_read_is_no_claim_but_named_with_its_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "GPU-2.lock").touch()
    monkeypatch.setattr(os, "getuid", lambda: 4711)  # somebody else's

    def refuse(path: str, *_: object) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("builtins.open", lambda path, *_: refuse(path))
    with pytest.raises(MachineError) as caught:
        with_claims(FOUR._replace(gpus=FOUR.gpus[2:3]), str(tmp_path))
    owner = (tmp_path / "GPU-2.lock").owner()
    assert f"GPU-2.lock of {owner}: Permission denied" in str(caught.value)
    assert f"ask {owner} for `chmod 644 " in caught.value.problems[0].fix


def test_a_link_in_the_place_of_a_lock_is_refused(tmp_path: Path) -> None:
    (tmp_path / "GPU-0.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(MachineError, match=r"GPU-0\.lock") as caught:
        claim_idle(asking_for("idle:1"), lambda: FOUR, None, str(tmp_path))
    assert "rm " in caught.value.problems[0].fix


LAUNCH = """\
import sys
folder, *sys.path[:] = sys.argv[1:]
from functools import partial
from headway.commands import launch
from headway.commands.main import main
from headway.launcher.starting import gpu_claims as claims
from tests.launcher.starting.test_gpu_claims import FOUR
launch.machine_from_flags = lambda parsed, environ: (FOUR, environ)
launch.detect_machine = lambda environ, full: FOUR
claims.claim_idle = partial(claims.claim_idle, folder=folder)
raise SystemExit(main(["launch", "--devices", "idle:1", "script.py"]))
"""


@pytest.mark.wording
@pytest.mark.processes
def test_real_launches_at_once_give_each_script_a_gpu_of_its_own(tmp_path: Path) -> None:
    Path("script.py").write_text(
        "import os, sys\nprint(os.environ['CUDA_VISIBLE_DEVICES'], flush=True)\nsys.stdin.read()"
    )
    launches = [
        subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(tmp_path), *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(5)
    ]
    chosen = [chosen_by(launch) for launch in launches]
    refused = launches[chosen.index([])]
    _, said = refused.communicate("", timeout=60)
    end(*(launch for launch in launches if launch is not refused))
    assert sorted(gpu for gpus in chosen for gpu in gpus) == [0, 1, 2, 3]
    assert refused.returncode == 3
    assert "only 0 of 4 GPUs are idle (GPU 0: claimed by another launch" in said
    assert "fix:  wait for them with --wait" in said
