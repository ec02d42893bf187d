"""Machines on which users train, each with the plan that it gets: facts in, a plan out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest

from headway.errors import MachineError
from headway.estimate.planner import devices_of
from headway.launcher.plan.describe import describe
from headway.launcher.plan.plan import LaunchPlan
from headway.machine.detection import detect_machine
from tests.launcher.clusters.test_detection import STEP
from tests.launcher.plan.planning import plan, set_by
from tests.machines.recorded import (
    GIB,
    RECORDINGS,
    RTX,
    Recorded,
    Recording,
    amd,
    gpus,
    h100s,
    intel,
    linux,
    mac,
    nvidia_smi,
    server,
    snapshot,
    torch,
    with_torch,
)


def small(card: dict[str, Any], cores: int, gib: int, **changes: Any) -> Recording:
    """Return a machine with one GPU of NVIDIA and this much memory of its own."""
    driver = changes.pop("driver", "580.95.05")
    files = linux("CPU", cores, gib, driver=driver) | changes.pop("files", {})
    build, tools = torch("2.13.0+cu130", cuda="13.0"), nvidia_smi(driver, [card])
    return Recording(files, cores, build, tools=tools)._replace(**changes)


ROCM = RECORDINGS["amd_2"].torch
CU126 = torch("2.13.0+cu126", cuda="12.6")
OLD_GPU = server(gpus(1, "Tesla V100-SXM2-32GB", 32, (7, 0)), cores=16)
FRONTIER = Recording(
    files=linux("AMD EPYC 7A53 64-Core Processor", 64, 512) | amd(8, 90010, 64),
    cores=56,  # one core of each of the eight parts is the system's
    torch=ROCM,
    environ={**STEP, "ROCR_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"},
)
A_RANK_EACH = {"SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_PROCID": "11", "SLURM_LOCALID": "3"}
GB10 = gpus(1, "NVIDIA GB10", 0, (12, 1))[0]
SLICE = "MIG-b7c0ffee-0000-5000-8000-000000000003"
SLICED = {**h100s(1)[0], "slices": [("1g.10gb", f"{SLICE[:-1]}{slot}") for slot in range(7)]}
LAPTOP = small(
    gpus(1, "NVIDIA GeForce RTX 4060 Laptop GPU", 8, (8, 9))[0],
    *(16, 32),
    files=intel("0000:00:02.0", driver="i915", model="A7A0") | amd(1, 110003, 0.5),
)
FOR_INTEL = RECORDINGS["intel_4"].torch
P2P = ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE")
OLD_RTX = server(RTX, cores=32, driver="535.183.06", torch=CU126)


class Row(NamedTuple):
    recording: Recording
    start: str  # "device processes x threads"
    sets: Mapping[str, str] = {}  # variables of the script, among others
    leaves: tuple[str, ...] = ()  # variables that the plan does not touch
    note: str = ""  # a part of the only note; empty: there is none


MACHINES = {
    "Frontier: four MI250X, eight devices, a task on each node": Row(
        FRONTIER,
        "cuda 8 x 7, machine 1 of 2",
        leaves=("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
    ),
    "LUMI: a task for each of the eight devices, which all see all": Row(
        FRONTIER._replace(environ={**FRONTIER.environ, **A_RANK_EACH}),
        "cuda 8 x 7, machine 1 of 2",
        sets={"RANK": "11", "LOCAL_RANK": "3", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"},
    ),
    "GB10, whose memory is the host's": Row(small(GB10, 20, 119), "cuda 1 x 20"),
    "Jetson without nvidia-smi: torch is asked": Row(
        with_torch(
            Recording(linux("ARMv8", 12, 61) | {"dev/nvhost-gpu": ""}, 12, CU126),
            {"name": "Orin", "memory_bytes": 61 * GIB, "capability": (8, 7)},
        ),
        "cuda 1 x 12",
    ),
    "a MIG slice that the job has chosen": Row(
        server([SLICED], cores=8, environ={"CUDA_VISIBLE_DEVICES": SLICE}),
        "cuda 1 x 8",
        sets={"CUDA_VISIBLE_DEVICES": SLICE},
    ),
    "a laptop with cards of NVIDIA, Intel and AMD": Row(LAPTOP, "cuda 1 x 16"),
    "the same with a torch for Intel's": Row(LAPTOP._replace(torch=FOR_INTEL), "xpu 1 x 16"),
    "Aurora: six cards of two tiles, each a device": Row(
        Recording(
            files=linux("Intel(R) Xeon(R) CPU Max 9470", 104, 1024, nodes=2)
            | intel(*(f"0000:{bus}:00.0" for bus in (18, 42, 53, 64, 75, 86)), model="0BD5"),
            cores=208,  # two threads of each core
            torch=FOR_INTEL,
            environ={"ZE_FLAT_DEVICE_HIERARCHY": "FLAT"},
        ),
        "xpu 12 x 8",
        leaves=("ZE_FLAT_DEVICE_HIERARCHY", "ZE_AFFINITY_MASK"),
    ),
    "an Intel Mac": Row(RECORDINGS["mac_intel"], "cpu 1 x 8"),
    "an M4 Mac": Row(
        mac("15.6", sysctl={"machdep.cpu.brand_string": "Apple M4 Pro"}),
        "mps 1 x 8",
        sets={"PYTORCH_ENABLE_MPS_FALLBACK": "1"},
    ),
    "Colab's T4": Row(
        small(
            gpus(1, "Tesla T4", 15, (7, 5))[0],
            2,
            13,
            driver="550.54.15",
            torch=CU126,
            environ={"COLAB_GPU": "1"},
        ),
        "cuda 1 x 2",
    ),
    "two RTX 4090 with an old driver, which has no peer-to-peer and does not say so": Row(
        OLD_RTX, "cuda 2 x 16", sets=dict.fromkeys(P2P, "1")
    ),
    "two RTX 4090 with a driver that NCCL can ask": Row(
        server(RTX, cores=32), "cuda 2 x 16", leaves=P2P
    ),
    "one RTX 4090, which has nobody to exchange with": Row(
        OLD_RTX._replace(environ={"CUDA_VISIBLE_DEVICES": "0"}), "cuda 1 x 32", leaves=P2P
    ),
    "a user's own word on peer-to-peer": Row(
        OLD_RTX._replace(environ={"NCCL_P2P_DISABLE": "0"}),
        "cuda 2 x 16",
        sets={"NCCL_IB_DISABLE": "1"},
        leaves=("NCCL_P2P_DISABLE",),
    ),
    "a new GPU with a wheel without kernels for it": Row(
        server(gpus(1, "NVIDIA GeForce RTX 5090", 32, (12, 0)), cores=16, torch=CU126),
        "cuda 1 x 16",
        note="is sm_120, but PyTorch's builds for CUDA 12.6 have kernels for sm_50 to sm_90; fix",
    ),
    "an old GPU with a wheel without kernels for it": Row(
        OLD_GPU,
        "cuda 1 x 16",
        note="is sm_70, but PyTorch's builds for CUDA 13.0 have kernels for sm_75 and up; fix",
    ),
    "an old GPU with a torch that was built for others": Row(
        with_torch(OLD_GPU, architectures=["sm_80", "sm_90a", "compute_90"]),
        "cuda 1 x 16",
        note="is sm_70, but torch has kernels for sm_80, sm_90a, compute_90; fix",
    ),
    "an old GPU with a torch that was built for it": Row(
        with_torch(OLD_GPU, architectures=["sm_70", "sm_90"]), "cuda 1 x 16"
    ),
}


def plan_on(recording: Recording, **values: Any) -> LaunchPlan:
    machine = detect_machine(recording.environ, Recorded(recording))
    return plan(machine, recording.environ, joins_cluster=True, **values)


@pytest.mark.parametrize("name", MACHINES)
def test_a_users_machine_and_its_plan(name: str) -> None:
    row = MACHINES[name]
    found = plan_on(row.recording)
    settings = found.settings
    start = f"{settings.device} {settings.num_processes} x {settings.threads_per_process}"
    if settings.num_machines > 1:
        start += f", machine {settings.machine_rank} of {settings.num_machines}"
    assert start == row.start
    changes = set_by(found)
    assert changes.items() >= row.sets.items()
    assert not changes.keys() & {*row.leaves}
    assert len(found.notes) == bool(row.note), found.notes
    assert row.note in "".join(found.notes)


def test_ranks_are_bound_to_the_cores_beside_their_gpus_only_where_that_is_asked_for() -> None:
    place = "sys/bus/pci/devices/0000:{:x}:00.0/local_cpulist"
    cores = ("0-31", "0-31", "32-63", "32-63")
    files = {place.format(0x10 + index): f"{core}\n" for index, core in enumerate(cores)}
    four = server(gpus(4, "NVIDIA A100-SXM4-80GB", 80, (8, 0)), files=files)
    assert plan_on(four).cpus == ()
    found = plan_on(four, numa_binding="node")
    assert found.cpus == cores
    assert "0-31; 32-63" in describe(found)
    for unknown in (RECORDINGS["gpu_4"], RECORDINGS["laptop_cpu"]):
        with pytest.raises(MachineError, match="numa_binding is 'node', but the cores close"):
            plan_on(unknown, numa_binding="node")


@pytest.mark.parametrize(
    ("recording", "gib"),
    [
        (MACHINES["GB10, whose memory is the host's"].recording, 119),
        (
            Recording(files=linux("Ryzen AI Max+", 32, 96) | amd(1, 110501, 0.5), torch=ROCM),
            96,
        ),  # Strix Halo, for which the firmware has set half a GiB aside
        (Recording(files=linux("Ryzen AI Max+", 32, 32) | amd(1, 110501, 96), torch=ROCM), 96),
        (MACHINES["an M4 Mac"].recording, 16),
    ],
)
def test_a_gpu_that_shares_the_hosts_memory_has_all_of_it(recording: Recording, gib: int) -> None:
    assert devices_of(snapshot(recording)).memory_bytes == gib * GIB
