"""The machine's facts, from recorded raw answers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headway.machine import Gpu, Machine, count_memory_kills, detect_machine

GPUS = tuple(Gpu("RTX", f"GPU-{letter}{letter}", 2**34, (8, 6)) for letter in "abcd")


def record(root: Path, **files: str) -> str:
    """Write recorded files below `root`: __ in a name stands for a slash."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return f"{root}/"


@pytest.fixture
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)


@pytest.mark.usefixtures("sixteen_cores")
class TestCores:
    def test_without_a_quota_all_usable_cores_count(self, tmp_path: Path) -> None:
        root = record(tmp_path, proc__self__cgroup="0::/user.slice\n")
        assert detect_machine({}, root).cores == 16

    def test_a_quota_above_the_own_cgroup_counts(self, tmp_path: Path) -> None:
        root = record(tmp_path, proc__self__cgroup="0::/pod/container\n")
        cgroups = tmp_path / "sys/fs/cgroup/pod"
        (cgroups / "container").mkdir(parents=True)
        (cgroups / "container/cpu.max").write_text("max 100000\n")
        (cgroups / "cpu.max").write_text("250000 100000\n")
        machine = detect_machine({}, root)
        assert machine.cores == 2
        assert machine.cores_reason == "cgroup quota of 2.5 cores"

    def test_half_a_core_is_one(self, tmp_path: Path) -> None:
        root = record(tmp_path, proc__self__cgroup="0::/\n")
        (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
        (tmp_path / "sys/fs/cgroup/cpu.max").write_text("50000 100000\n")
        assert detect_machine({}, root).cores == 1

    def test_a_quota_of_cgroup_v1_counts(self, tmp_path: Path) -> None:
        root = record(tmp_path, proc__self__cgroup="12:memory:/x\n4:cpu,cpuacct:/docker/abc\n")
        (tmp_path / "sys/fs/cgroup/cpu").mkdir(parents=True)  # as seen from inside a container
        (tmp_path / "sys/fs/cgroup/cpu/cpu.cfs_quota_us").write_text("400000\n")
        (tmp_path / "sys/fs/cgroup/cpu/cpu.cfs_period_us").write_text("100000\n")
        assert detect_machine({}, root).cores == 4


@pytest.mark.parametrize(
    ("mask", "visible"),
    [
        (None, "abcd"),
        ("", ""),
        ("-1", ""),
        ("NoDevFiles", ""),
        ("2,0", "ca"),
        ("0,9,1", "a"),
        ("0,-1,1", "a"),
        ("1,1", ""),
        ("GPU-bb,GPU-d", "bd"),
        ("GPU-", ""),
        (" 3 , 1 ", "db"),
    ],
)
def test_visible_gpus_are_read_as_cuda_reads_them(mask: str | None, visible: str) -> None:
    machine = Machine(gpus=GPUS, cuda_visible_devices=mask)
    assert "".join(gpu.uuid[-1] for gpu in machine.visible_gpus) == visible


def test_hidden_gpus_make_auto_the_cpu_with_the_variable_as_the_reason() -> None:
    device, reason = Machine(gpus=GPUS, cuda_visible_devices="").best_device()
    assert device == "cpu"
    assert "CUDA_VISIBLE_DEVICES=''" in reason


def test_a_machine_without_a_driver_says_so(tmp_path: Path) -> None:
    machine = detect_machine({}, f"{tmp_path}/")
    assert (machine.gpus, machine.best_device()) == (
        (),
        ("cpu", "no NVIDIA driver on this machine"),
    )


def test_a_driver_that_does_not_answer_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = record(tmp_path, proc__driver__nvidia__version="NVRM version: 535\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    machine = detect_machine({}, root)
    assert machine.gpus == ()
    assert "does not answer" in machine.gpus_reason


def test_gpus_are_read_from_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = record(tmp_path, proc__driver__nvidia__version="NVRM version: 535\n")
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(
        "#!/bin/sh\necho 'Tesla T4, GPU-12, 15360, 7.5'\necho 'NVIDIA H100, GPU-34, 81559, 9.0'\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/bin:/usr/bin")
    monkeypatch.setattr("headway.machine._ask_nvml", lambda: (None, "not installed"))
    monkeypatch.setattr("headway.machine._torch_without_cuda", lambda: None)
    assert detect_machine({}, root).gpus == (
        Gpu("Tesla T4", "GPU-12", 15360 * 2**20, (7, 5)),
        Gpu("NVIDIA H100", "GPU-34", 81559 * 2**20, (9, 0)),
    )
    monkeypatch.setattr("headway.machine._torch_without_cuda", lambda: "2.13.0+cpu")
    assert "torch (2.13.0+cpu) is built without CUDA" in detect_machine({}, root).gpus_reason


def test_the_memory_killers_count_is_read_from_either_cgroup_version(tmp_path: Path) -> None:
    assert count_memory_kills(f"{tmp_path}/") == 0
    root = record(tmp_path, proc__self__cgroup="0::/job\n5:memory:/job\n")
    for folder, text in (
        ("sys/fs/cgroup/job/memory.events", "low 0\nmax 7\noom 2\noom_kill 3\n"),
        ("sys/fs/cgroup/memory/job/memory.oom_control", "under_oom 0\noom_kill 2\n"),
    ):
        (tmp_path / folder).parent.mkdir(parents=True)
        (tmp_path / folder).write_text(text)
    assert count_memory_kills(root) == 3
