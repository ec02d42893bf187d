"""Machines that tests plan and ask for, one for each kind that Headway knows."""

from __future__ import annotations

from headway.machine import Gpu, Machine


def gpus(count: int, name: str, capability: tuple[int, int]) -> tuple[Gpu, ...]:
    return tuple(Gpu(name, f"GPU-{index}", 80 * 2**30, capability) for index in range(count))


def cores(count: int) -> tuple[int, str]:
    return count, f"{count} usable core{'s' * (count != 1)}"


LAPTOP = Machine("Linux", *cores(8))
HALF_A_CORE = Machine("Linux", 1, "cgroup quota of 0.5 cores")
ONE_H100 = Machine("Linux", *cores(24), gpus(1, "NVIDIA H100", (9, 0)), "found by NVML")
EIGHT_H100 = Machine("Linux", *cores(192), gpus(8, "NVIDIA H100", (9, 0)), "found by NVML")
TWO_T4 = Machine("Linux", *cores(16), gpus(2, "Tesla T4", (7, 5)), "found by NVML")
HIDDEN = EIGHT_H100._replace(cuda_visible_devices="")
M2 = Machine("Darwin", *cores(8), (), "a Mac has no CUDA", mps=True, mps_reason="Apple silicon")

MACHINES = {
    "laptop": LAPTOP,
    "half a core": HALF_A_CORE,
    "one H100": ONE_H100,
    "eight H100": EIGHT_H100,
    "two T4": TWO_T4,
    "hidden GPUs": HIDDEN,
    "M2": M2,
}
