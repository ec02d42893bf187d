"""Detection of this machine.

It neither imports torch nor creates a CUDA context. A launch detects only what planning needs; the
full snapshot adds `Machine.host` and each GPU's usage.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from headway.devices.kind import DeviceKind
from headway.devices.table import CPU, CUDA, KINDS, MPS, extension_kinds
from headway.machine.facts import Gpu, Machine, Torch
from headway.machine.source import Source, cpu_quota, physical_cores

_ASSIGNED_TEXT = r"""^(\w+) *(?::.*?)?= *['"](.+)['"]"""
"""A line that assigns a string, such as `cuda: Optional[str] = '12.8'`; not one with None."""


def detect_machine(
    environ: Mapping[str, str] = os.environ,
    source: Source | None = None,
    *,
    full: bool = False,
    device: str = "auto",
) -> Machine:
    """Return a snapshot of this machine, or of a recorded `source`.

    `full` adds facts that planning does not need: `host` and each GPU's usage. `device` is the
    requested device. Devices that other packages add to torch are detected for an unknown device
    name, and for `auto` if no other device is found. torch is queried if a device is requested or a
    driver is loaded, but no device was detected.
    """
    source = source or Source()
    machine = Machine(
        system={"linux": "Linux", "darwin": "Darwin"}.get(source.platform, source.platform),
        architecture=source.architecture(),
        mask=environ.get(CUDA.mask),
    )
    machine = _with_cores(machine, source)
    if machine.system == "Darwin":
        from headway.machine.apple import with_mps

        machine = with_mps(_with_torch(machine, source), source)
    else:
        machine = _with_listed_gpus(machine, environ, source)
        if not machine.gpus:
            machine = _with_driver(machine, environ, source, device, full=full)
    is_outside = device not in (*KINDS, "auto", "gpu")
    if is_outside or (device != CPU.name and not machine.gpus and not machine.mps):
        kinds = extension_kinds()
        if is_outside:
            machine = machine._replace(gpus=())
            kinds = {name: kind for name, kind in kinds.items() if name == device}
        machine = _with_listed_gpus(machine, environ, source, kinds)
    if device != CPU.name:
        machine = _with_torch_result(machine, environ, source, device)
        if machine.missing_kernels(machine.visible_gpus):  # torch's build may be another
            from headway.machine.torch_query import with_architectures

            machine = with_architectures(machine, source)
    if not full:
        return machine
    from headway.machine.host import detect_host

    return _with_torch(machine, source)._replace(host=detect_host(machine, environ, source))


def _with_torch_result(
    machine: Machine, environ: Mapping[str, str], source: Source, device: str
) -> Machine:
    """Query torch if no device was detected although there may be one."""
    name = machine.gpu_kind if device in ("auto", "gpu") else device
    if device == "gpu" and machine.system == "Darwin":
        name = MPS.name
    is_missing = machine.unavailable_reason(name) is not None
    if device == "auto":
        is_missing &= machine.has_driver and not machine.is_hidden
    if machine.driver_fault and name == machine.gpu_kind:  # a GPU may be lost
        listed = source.names_in("proc/driver/nvidia/gpus")
        is_missing |= len(machine.gpus) < len(listed) or not all(gpu.uuid for gpu in machine.gpus)
    if not is_missing:
        return machine
    from headway.machine.torch_query import with_torch_devices

    return with_torch_devices(_with_torch(machine, source), environ, source, name)


def _with_driver(
    machine: Machine, environ: Mapping[str, str], source: Source, device: str, *, full: bool
) -> Machine:
    """Add the GPUs of loaded drivers, if torch supports them.

    For a CPU launch, check only whether a driver is loaded, because the driver's tool may hang.
    """
    devices = source.names_in("dev")
    libraries = source.names_in("usr/lib/wsl/lib") if "dxg" in devices else []
    is_nvidia = (
        bool(source.names_in("proc/driver/nvidia"))
        or not {"nvidiactl", "nvhost-gpu", "nvgpu"}.isdisjoint(devices)  # gVisor, Jetson
        or any(name.startswith("libcuda") for name in libraries)
    )
    for_cpu = device == CPU.name and not full
    if not (is_nvidia or "dxg" in devices or source.names_in("sys/class/kfd/kfd")):
        return machine if for_cpu else machine._replace(unused_card=_card_without_driver(source))
    if is_nvidia and for_cpu:
        return machine._replace(has_driver=True)
    from headway.machine.gpus import with_gpus

    return with_gpus(_with_torch(machine, source), environ, source, is_nvidia, full=full)


def _card_without_driver(source: Source) -> str:
    of_virtual_machines = source.names_in("sys/bus/pci/drivers/vfio-pci")
    for name in source.names_in("sys/bus/pci/devices"):
        place = f"sys/bus/pci/devices/{name}"
        if source.read(f"{place}/vendor").strip() != "0x10de" or name in of_virtual_machines:
            continue
        if source.read(f"{place}/class").startswith("0x03"):  # display controllers, not audio
            return f"an NVIDIA GPU ({name}) is unused because its driver is not loaded"
    return ""


def _with_cores(machine: Machine, source: Source) -> Machine:
    cores, kind, quota = source.usable_cores(), "usable", cpu_quota(source)
    if 0 < (physical := physical_cores(source)) < cores:  # hyper-threading
        cores, kind = physical, "physical"
    if quota is not None and quota < cores:
        reason = f"cgroup quota of {quota:g} cores"
        return machine._replace(cores=max(1, int(quota)), cores_reason=reason)
    return machine._replace(cores=cores, cores_reason=f"{cores} {kind} core{'s' * (cores != 1)}")


def _with_listed_gpus(
    machine: Machine,
    environ: Mapping[str, str],
    source: Source,
    kinds: Mapping[str, DeviceKind] = KINDS,
) -> Machine:
    """Add the GPUs that the kernel lists and the installed torch supports."""
    for kind in kinds.values():
        gpus = tuple(Gpu(**facts) for facts in kind.counted(kind.found_in(source), environ))
        if not gpus:
            continue
        machine = _with_torch(machine, source)
        machine = machine._replace(listed_kinds=(*machine.listed_kinds, kind.name))
        if not machine.gpus and machine.torch is not None and kind.is_supported_by(machine.torch):
            machine = machine._replace(
                gpus=gpus,
                gpus_reason=f"found by {kind.maker}'s driver",
                gpu_kind=kind.name,
                has_driver=True,
                mask=environ.get(kind.mask),
                mask_variable=kind.mask,
            )
    return machine


def _with_torch(machine: Machine, source: Source) -> Machine:
    """Add the installed torch version, read from its version.py without importing torch."""
    if machine.torch is not None:
        return machine
    facts = dict(re.findall(_ASSIGNED_TEXT, source.torch_version_file(), re.MULTILINE))
    if "__version__" not in facts:
        return machine._replace(torch_reason="torch is not installed for this Python")
    torch = Torch(facts["__version__"], *map(facts.get, ("cuda", "hip", "xpu")))
    return machine._replace(torch=torch, torch_reason="its version.py")
