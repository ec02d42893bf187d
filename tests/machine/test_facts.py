"""The machine's facts, from recorded raw answers."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from headway.devices.kind import numbers
from headway.errors import ConfigError
from headway.estimate.planner import devices_of
from headway.machine.detection import detect_machine
from headway.machine.facts import Gpu, GpuUse, Machine, MigSlice, as_data, load_machine
from headway.machine.gpus import gpu_fixes
from headway.machine.source import Source, count_oom_kills
from headway.settings.resolve import resolve
from tests.commands.running import python
from tests.distributed.launching import wait_for_end
from tests.machines.recorded import (
    FOLDER,
    RECORDINGS,
    Recorded,
    Recording,
    changed,
    h100s,
    linux,
    server,
    snapshot,
    torch,
)


def record(root: Path, **files: str) -> str:
    """Write recorded files below `root`."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return f"{root}/"


@pytest.fixture
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)


CPU = "sys/fs/cgroup/cpu/cpu.cfs"
THREADS_OF_8_CORES = "".join(
    f"processor\t: {n}\nphysical id\t: 0\ncore id\t\t: {n % 8}\n\n" for n in range(16)
)
QUOTAS = {  # where this process is, the files of its cgroups, the cores it may use
    "none": ("0::/user.slice", {}, 16),
    "above its own cgroup": ("0::/a/b", {"sys/fs/cgroup/a/cpu.max": "250000 100000"}, 2),
    "the smallest of several": (
        "0::/a/b",
        {"sys/fs/cgroup/a/cpu.max": "300000 100000", "sys/fs/cgroup/a/b/cpu.max": "800000 100000"},
        3,
    ),
    "no quota of its own": (
        "0::/a/b",
        {"sys/fs/cgroup/a/cpu.max": "250000 100000", "sys/fs/cgroup/a/b/cpu.max": "max 100000"},
        2,
    ),
    "half a core": ("0::/", {"sys/fs/cgroup/cpu.max": "50000 100000"}, 1),
    "version 1, from inside a container": (
        "12:memory:/x\n4:cpu,cpuacct:/docker/abc",
        {f"{CPU}_quota_us": "400000", f"{CPU}_period_us": "100000"},
        4,
    ),
    "two hardware threads for each core": ("0::/", {"proc/cpuinfo": THREADS_OF_8_CORES}, 8),
}


@pytest.mark.parametrize("case", QUOTAS)
@pytest.mark.usefixtures("sixteen_cores")
def test_usable_cores_are_physical_and_those_of_the_smallest_quota(
    case: str, tmp_path: Path
) -> None:
    place, files, cores = QUOTAS[case]
    root = record(tmp_path, **{"proc/self/cgroup": f"{place}\n", **files})
    machine = detect_machine({}, Source(root))
    assert machine.cores == cores
    if cores == 2:
        assert machine.cores_reason == "cgroup quota of 2.5 cores"


SMI = """\
Tesla T4, GPU-12, 15360, 7.5, Default, [N/A], 1024, 30, 0, 00000000:00:04.0, 580.82.07
NVIDIA H100, GPU-34, 81559, 9.0, Prohibited, Enabled, 0, [N/A], [N/A], 00000000:00:05.0, 580.82.07
GB10, GPU-56, [N/A], 12.1, Default, [N/A], [N/A], 0, [N/A], 0000000F:01:00.0, 580.82.07
"""
SMI_LIST = """\
GPU 0: Tesla T4 (UUID: GPU-12)
GPU 1: NVIDIA H100 (UUID: GPU-34)
  MIG 1g.10gb     Device  0: (UUID: MIG-56)
"""


def test_what_nvidia_smi_prints_is_read() -> None:
    recording = Recording(
        files=linux("CPU", 8, 16, driver="580.82.07"),
        torch=torch("2.13.0+cu130", cuda="13.0"),
        tools={
            "nvidia-smi --query-gpu": SMI,
            "nvidia-smi --query-compute-apps": "GPU-12, 77\nGPU-34, 78\n",
            "nvidia-smi -L": SMI_LIST,
        },
    )
    machine = detect_machine({}, Recorded(recording), full=True)
    t4, h100, shared = machine.gpus
    assert t4 == Gpu(
        "Tesla T4", "GPU-12", 15360 * 2**20, (7, 5), use=GpuUse(2**30, 30, (77,)), ecc_errors=0
    )
    assert (h100.compute_mode, h100.ecc_errors, h100.use) == (
        "prohibited",
        None,
        GpuUse(0, None, (78,)),
    )
    assert h100.slices == (MigSlice("NVIDIA H100 MIG 1g.10gb", "MIG-56", 10 * 2**30),)
    assert (shared.memory_bytes, shared.shares_memory) == (16 * 2**30, True)  # it has the CPU's
    assert (shared.use, shared.unknown) == (GpuUse(None, 0, ()), {})
    assert (machine.driver, machine.gpus_reason) == ("580.82.07", "found by nvidia-smi")
    quick = detect_machine({}, Recorded(recording))
    assert quick.gpus[0].use is None


def test_what_nvidia_smi_gets_wrong_is_unknown_and_shown_as_text_and_a_cpu_needs_none() -> None:
    tools = {"nvidia-smi --query-gpu": f"\x1b[31mwarning\n{SMI.replace('15360', '-1')}"}
    recording = Recording(files=linux("CPU", 8, 16, driver="580.82.07"), tools=tools)
    machine = detect_machine({}, Recorded(recording))
    assert machine.gpus[0].memory_bytes is None
    with pytest.raises(ConfigError, match="memory of Tesla T4 is unknown: nvidia-smi reports -1"):
        devices_of(machine)
    assert machine.driver_fault == r"\x1b[31mwarning"
    machine = detect_machine({}, Recorded(recording), device="cpu")
    assert (machine.has_driver, machine.driver_fault) == (True, "")  # the tool is not asked


def test_how_to_use_gpus_follows_what_hides_them_and_what_is_known() -> None:
    machine = load_machine(str(FOLDER / "cpu_torch_on_gpu_box.json"))
    hidden = machine._replace(mask="-1", torch_refusal="")  # it is not asked then
    assert hidden.no_gpu_reason == "CUDA_VISIBLE_DEVICES='-1' hides all GPUs"
    assert gpu_fixes(hidden) == ["`unset CUDA_VISIBLE_DEVICES`"]


@pytest.mark.parametrize("name", RECORDINGS)
def test_the_real_probes_make_each_snapshot_from_its_raw_answers(name: str) -> None:
    recording = RECORDINGS[name]
    assert snapshot(recording) == load_machine(str(FOLDER / f"{name}.json"))


@pytest.mark.parametrize("name", RECORDINGS)
def test_a_launch_looks_at_less_and_plans_the_same(name: str) -> None:
    recording = RECORDINGS[name]
    full = load_machine(str(FOLDER / f"{name}.json"))
    quick = detect_machine(recording.environ, Recorded(recording))
    assert quick.host is None
    assert quick.best_device() == full.best_device()
    assert [gpu.uuid for gpu in quick.visible_gpus] == [gpu.uuid for gpu in full.visible_gpus]
    assert (quick.cores, quick.mps_reason) == (full.cores, full.mps_reason)


@pytest.mark.parametrize("name", RECORDINGS)
def test_every_fact_of_a_snapshot_has_a_reason_and_every_absence_a_cause(name: str) -> None:
    host = load_machine(str(FOLDER / f"{name}.json")).host
    assert host is not None
    assert host.reasons.keys() == set(host._fields) - {"reasons"}
    assert all(host.reasons.values())


@pytest.mark.processes
@pytest.mark.skipif(
    sys.platform != "linux" or os.path.exists("/proc/driver/nvidia"),
    reason="a driver's programs are asked there",
)
def test_looking_at_this_machine_starts_no_process_and_imports_no_torch() -> None:
    text = (
        "import sys\n"
        "from headway.machine.detection import detect_machine\n"
        "events = []\n"
        "sys.addaudithook(lambda event, _: events.append(event))\n"
        "detect_machine(full=True)\n"
        "assert not {'subprocess.Popen', 'os.fork', 'os.posix_spawn'} & {*events}\n"
        "assert 'torch' not in sys.modules"
    )
    python("-c", text).check_returncode()


def test_a_memory_limit_of_cgroup_v1_counts_and_its_way_to_say_none_does_not() -> None:
    host = load_machine(str(FOLDER / "container_cgroup_v1.json")).host
    assert host is not None
    assert host.memory_limit_bytes == 8 * 2**30
    files = RECORDINGS["container_cgroup_v1"].files
    unlimited = {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}
    recording = RECORDINGS["container_cgroup_v1"]._replace(files={**files, **unlimited})
    host = snapshot(recording).host
    assert host is not None
    assert host.memory_limit_bytes is None
    assert "not limited by a cgroup" in host.reasons["memory_limit_bytes"]


def test_secrets_stay_out_of_a_snapshot() -> None:
    environ = {"AWS_SECRET_ACCESS_KEY": "x", "WANDB_API_KEY": "x", "NCCL_DEBUG": "INFO"}
    host = detect_machine(environ, full=True).host
    assert host is not None
    assert host.variables == {"NCCL_DEBUG": "INFO"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not a valid machine snapshot"),
        ("[]", "version is None"),
        ('{"version": 9}', "version is 9"),
        ('{"version": 1, "coers": 3}', "unknown fields: coers"),
        ('{"version": 1, "cores": "3"}', "cores is '3', not of type int"),
        ('{"version": 1, "gpus": [{"uuid": "x"}]}', "missing fields: name"),
        ('{"version": 1, "gpus": 3}', "not a list"),
        ("[" * 100_000, "not a valid machine snapshot"),
    ],
)
def test_a_file_that_is_no_snapshot_is_refused_with_the_place(
    text: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "machine.json").write_text(text)
    with pytest.raises(ConfigError, match=reason) as caught:
        load_machine(str(tmp_path / "machine.json"))
    assert "headway env --json" in caught.value.problems[0].fix


def test_a_value_of_another_type_is_refused_with_file_and_key() -> None:
    Path("machine.json").write_text(json.dumps(changed("gpu_4", "host.memory_bytes", 1.5)))
    with pytest.raises(ConfigError) as caught:
        load_machine("machine.json")
    (problem,) = caught.value.problems
    assert "host.memory_bytes is 1.5, not of type int" in problem.what
    assert problem.where == "flag --machine, machine.json, key host.memory_bytes"


def test_amd_cards_without_an_id_of_their_own_can_be_told_apart() -> None:
    amd = RECORDINGS["amd_2"]
    files = {
        name: re.sub(r"unique_id \d+", "unique_id 0", text) for name, text in amd.files.items()
    }
    machine = snapshot(amd._replace(files=files, environ={"CUDA_VISIBLE_DEVICES": "0,1"}))
    assert [gpu.uuid for gpu in machine.visible_gpus] == ["GPU-XX-1", "GPU-XX-2"]
    Path("machine.json").write_text(json.dumps(as_data(machine)))
    assert load_machine("machine.json") == machine


@pytest.mark.parametrize("digits", [10, 5000])
def test_a_number_of_thousands_of_digits_is_no_version(digits: int) -> None:
    assert numbers("9" * digits) == (0,)


@pytest.mark.parametrize("word", ["1", "true", "YES", "on", "0", "false", "No", "", "off"])
def test_a_switch_means_what_it_says(word: str) -> None:
    settings = resolve([], Machine(), {"ACCELERATE_USE_CPU": word})
    assert bool(settings.origin("device").variable) is (word in ("1", "true", "YES", "on"))


def test_the_memory_killers_count_is_read_from_either_cgroup_version(tmp_path: Path) -> None:
    assert count_oom_kills(f"{tmp_path}/") is None
    files = {
        "proc/self/cgroup": "0::/job\n5:memory:/job\n",
        "sys/fs/cgroup/job/memory.events": "low 0\nmax 7\noom 2\noom_kill 3\n",
        "sys/fs/cgroup/memory/job/memory.oom_control": "under_oom 0\noom_kill 2\n",
    }
    root = record(tmp_path, **files)
    assert count_oom_kills(root) == 3


@pytest.mark.processes
def test_nothing_is_left_of_a_tool_that_hangs(tmp_path: Path) -> None:
    tool = tmp_path / "tool"
    tool.write_text("#!/bin/sh\nsleep 60 &\necho $! > child\nwait\n")
    tool.chmod(0o755)
    with pytest.raises(OSError, match="timed out after"):
        Source("/").output_of([str(tool)], limit_s=1.5)
    wait_for_end(int(Path("child").read_text()))


def test_nvidia_smi_that_hangs_is_waited_for_once() -> None:
    calls = []

    class Hanging(Recorded):
        def output_of(self, command: Sequence[str], limit_s: float | None = None) -> str:
            if command[0] == "nvidia-smi":
                calls.append(command)
                raise OSError("timed out after 30 s")
            return super().output_of(command)

    machine = detect_machine({}, Hanging(server(h100s(2))))
    assert len(calls) == 1
    assert "timed out" in machine.gpus_reason
