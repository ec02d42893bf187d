"""GPUs: NVIDIA's, listed by nvidia-smi, AMD's, by the kernel; and how to make them usable."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from headway.devices.kind import numbers
from headway.devices.table import kind_of
from headway.machine.facts import (
    DEFAULT,
    EXCLUSIVE,
    OLDEST_DRIVER,
    PROHIBITED,
    Gpu,
    GpuUse,
    Machine,
    MigSlice,
)
from headway.machine.source import Source

NVIDIA = "proc/driver/nvidia/version"
KFD = "sys/class/kfd/kfd/topology/nodes"
WHEELS = "https://download.pytorch.org/whl"
# texts of nvidia-smi, which may change with a new version of it
_SMI_MIG_IS_ON = "Enabled"
"""--query-gpu=mig.mode.current. Source: its manual page, driver 525 and later."""

_SMI_IS_EXCLUSIVE = "exclusive"
"""Prefix of --query-gpu=compute_mode, in lower case: Exclusive_Process, and before driver 418
Exclusive_Thread. Source: its manual page."""

_SMI_UUID = r"UUID: (\S+)\)"
_SMI_SLICE = r"\s+MIG (\S*?(\d+)gb\S*)"
"""A line of nvidia-smi -L, for a GPU and for a slice below it; the profile's name and its GB.

Source: NVIDIA, Multi-Instance GPU User Guide, for driver 525 and later."""


def with_gpus(
    machine: Machine, environ: Mapping[str, str], source: Source, *, full: bool
) -> Machine:
    """Return the snapshot with its GPUs, or with the reason why none was found."""
    if source.names_in(KFD) and not source.read(NVIDIA):
        return _with_amd_gpus(machine, environ, source)
    return machine._replace(**_NvidiaSmi(source, full).ask())


def how_to_use_gpus(machine: Machine, device: str = "") -> list[str]:
    """Return how to make GPUs usable, those of a kind if one is named; empty if nothing helps."""
    if device not in ("", machine.gpu_kind):
        install = "pip install --force-reinstall torch --index-url"
        is_listed = device in machine.listed_kinds
        return [f"`{install} {WHEELS}/{kind_of(device).wheels}`"] if is_listed else []
    if machine.torch_obstacle is not None:
        return _matching_torch(machine)
    if machine.visible_gpus:
        return how_to_free(machine.visible_gpus[0])
    if machine.gpus:
        return [f"`unset {kind_of(machine.gpu_kind).mask}`"]
    if machine.driver_is_silent:
        return [
            "run `nvidia-smi` to see why; reboot after a driver update; start a container with "
            "--gpus all"
        ]
    return []


def how_to_free(gpu: Gpu) -> list[str]:
    name = gpu.slice_of or gpu.uuid
    if gpu.compute_mode in (PROHIBITED, EXCLUSIVE):
        return [of_machine(f"nvidia-smi -i {name} -c DEFAULT"), "use another GPU"]
    if gpu.is_mig:
        return [of_machine(f"nvidia-smi -i {name} -mig 0"), "make slices of it"]
    return ["use another GPU"]


def of_machine(command: str) -> str:
    """Return the remedy of a command that changes a device, which others may use as well."""
    return f"ask who runs this machine for {command}"


def _matching_torch(machine: Machine) -> list[str]:
    if machine.is_rocm:
        return ["install torch's ROCm build: https://pytorch.org/get-started/locally"]
    driver = numbers(machine.driver or "0")
    major = max((cuda for cuda, oldest in OLDEST_DRIVER.items() if oldest <= driver), default=None)
    if major is None:
        return ["update the NVIDIA driver"]
    index = {11: "cu118", 12: "cu126", 13: "cu130"}[major]
    install = f"`pip install --force-reinstall torch --index-url {WHEELS}/{index}`"
    if machine.torch is not None and machine.torch.cuda is not None:
        return ["update the NVIDIA driver", install]
    return [install]


class _NvidiaSmi:
    FIELDS = (
        *("name", "uuid", "memory.total", "compute_cap", "compute_mode", "mig.mode.current"),
        *("memory.used", "utilization.gpu", "ecc.errors.uncorrected.volatile.total"),
        *("pci.bus_id", "driver_version"),
    )

    def __init__(self, source: Source, full: bool) -> None:
        self._source = source
        self._full = full

    def ask(self) -> dict[str, Any]:
        """Return the fields of the machine that nvidia-smi reports, or why it reports none."""
        try:
            rows = self._rows(f"--query-gpu={','.join(self.FIELDS)}")
            answers = [dict(zip(self.FIELDS, row, strict=True)) for row in rows]
            gpus = tuple(map(self._gpu, answers))
        except (OSError, ValueError, KeyError) as error:
            reason = f"an NVIDIA driver is installed, but nvidia-smi fails: {error}"
            return {"gpus": (), "gpus_reason": reason, "driver_is_silent": True}
        if not gpus:
            return {"gpus": (), "gpus_reason": "the NVIDIA driver lists no GPU"}
        driver = answers[0]["driver_version"]
        return {"gpus": gpus, "gpus_reason": "found by nvidia-smi", "driver": driver}

    def _rows(self, query: str) -> list[list[str]]:
        command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
        lines = self._source.output_of(command).splitlines()
        return [[cell.strip() for cell in line.split(",")] for line in lines if line.strip()]

    def _gpu(self, answer: Mapping[str, str]) -> Gpu:
        major, _, minor = answer["compute_cap"].partition(".")
        word = answer["compute_mode"].lower()
        mode = EXCLUSIVE if word.startswith(_SMI_IS_EXCLUSIVE) else word
        is_mig = answer["mig.mode.current"] == _SMI_MIG_IS_ON
        uuid = answer["uuid"]
        gpu = Gpu(
            name=answer["name"],
            uuid=uuid,
            memory_bytes=_bytes(answer["memory.total"]),
            capability=(int(major), int(minor)),
            compute_mode=mode if mode in (EXCLUSIVE, PROHIBITED) else DEFAULT,
            is_mig=is_mig,
            slices=self._slices(answer["name"], uuid) if is_mig else (),
        )
        if self._full or gpu.compute_mode == EXCLUSIVE:
            gpu = gpu._replace(
                use=GpuUse(
                    _bytes(answer["memory.used"]),
                    _number(answer["utilization.gpu"]),
                    self._pids(uuid),
                )
            )
        if not self._full:
            return gpu
        return gpu._replace(
            numa_node=_numa_node(self._source, answer["pci.bus_id"]),
            ecc_errors=_number(answer["ecc.errors.uncorrected.volatile.total"]),
        )

    def _pids(self, uuid: str) -> tuple[int, ...]:
        apps = self._rows("--query-compute-apps=gpu_uuid,pid")
        return tuple(int(pid) for gpu, pid in apps if gpu == uuid)

    def _slices(self, name: str, uuid: str) -> tuple[MigSlice, ...]:
        """Read `nvidia-smi -L`, which lists the slices of a GPU below it."""
        slices = []
        owner = ""
        for line in self._source.output_of(["nvidia-smi", "-L"]).splitlines():
            found = re.search(_SMI_UUID, line)
            profile = re.match(_SMI_SLICE, line)
            if found and not profile:
                owner = found[1]
            elif found and profile and owner == uuid:
                memory = int(profile[2]) * 2**30
                slices.append(MigSlice(f"{name} MIG {profile[1]}", found[1], memory))
        return tuple(slices)


def _with_amd_gpus(machine: Machine, environ: Mapping[str, str], source: Source) -> Machine:
    """Read the kernel's list of compute nodes, which includes CPUs.

    Source: the kernel's amdkfd, kfd_topology.c. amdsmi reports more, but must match the
    installed ROCm; planning needs only these facts.
    """
    gpus = []
    for node in sorted(source.names_in(KFD), key=int):
        lines = source.read(f"{KFD}/{node}/properties").splitlines()
        facts = dict(line.split(maxsplit=1) for line in lines if " " in line)
        version = int(facts.get("gfx_target_version", "0"))  # 90010 is gfx90a, 110000 gfx1100
        if not version:
            continue
        banks = [
            source.read(f"{KFD}/{node}/mem_banks/{bank}/properties")
            for bank in source.names_in(f"{KFD}/{node}/mem_banks")
        ]
        sizes = [int(size) for bank in banks for size in re.findall(r"size_in_bytes (\d+)", bank)]
        unique = int(facts.get("unique_id", "0"))  # 0 if the card has none
        major, minor, step = version // 10000, version // 100 % 100, version % 100
        gpus.append(
            Gpu(
                name=f"AMD gfx{major}{minor:x}{step:x}",
                uuid=f"GPU-{unique:016x}" if unique else f"GPU-XX-{node}",
                memory_bytes=sum(sizes),
                capability=(major, minor),
            )
        )
    for variable in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if variable in environ:
            reason = (
                f"{variable}={environ[variable]!r} is set, which Headway does not support; set "
                "CUDA_VISIBLE_DEVICES instead, which ROCm reads too"
            )
            return machine._replace(is_rocm=True, gpus_reason=reason)
    reason = "found by the amdgpu driver" if gpus else "the amdgpu driver lists no GPU"
    return machine._replace(gpus=tuple(gpus), gpus_reason=reason, is_rocm=bool(gpus))


def _numa_node(source: Source, bus_id: str) -> int | None:
    """Return the NUMA node of a PCI device; None if the kernel reports none."""
    address = bus_id.lower()[-len("0000:00:00.0") :]
    node = _number(source.read(f"sys/bus/pci/devices/{address}/numa_node"))
    return node if node is not None and node >= 0 else None


def _number(text: str) -> int | None:
    """Return a whole number, or None for other text such as [N/A]."""
    text = text.strip()
    return int(text) if text.removeprefix("-").isdecimal() else None


def _bytes(mebibytes: str) -> int:
    """Return a size; 0 if unknown, as for memory that a GPU shares with the CPU."""
    return (_number(mebibytes) or 0) * 2**20
