"""Detects this machine with a probe for each kind of fact.

Imports no torch and creates no CUDA context. A launch detects only what planning needs; the full
snapshot also has `Machine.host` and the use of each GPU.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from headway.devices.kind import DeviceKind
from headway.devices.table import CPU, CUDA, KINDS, outside_kinds
from headway.machine.facts import Gpu, Machine, Torch
from headway.machine.source import Source, cpu_quota


def detect_machine(
    environ: Mapping[str, str] = os.environ,
    source: Source | None = None,
    *,
    full: bool = False,
    device: str = "auto",
) -> Machine:
    """Return a snapshot of this machine, or of a recorded `source`.

    `full` adds what planning does not need: `host`, and the use of each GPU. `device` is the
    requested one: devices of other packages are looked up for an unknown name, and for `auto` if
    nothing else is found.
    """
    source = source or Source()
    machine = Machine(
        system={"linux": "Linux", "darwin": "Darwin", "win32": "Windows"}.get(
            source.platform, source.platform
        ),
        architecture=source.architecture(),
        cuda_visible_devices=environ.get(CUDA.mask),
        cuda_device_order=environ.get("CUDA_DEVICE_ORDER"),
    )
    machine = _with_cores(machine, source)
    if machine.system == "Darwin":
        from headway.machine.apple import with_mps

        machine = with_mps(_with_torch(machine, source), source)
    else:
        machine = _with_listed_gpus(machine, environ, source)
        if not machine.gpus and _has_driver(machine, source):
            from headway.machine.gpus import with_gpus

            machine = with_gpus(_with_torch(machine, source), environ, source, full=full)
    is_outside = device not in (*KINDS, "auto", "gpu")
    if is_outside or (device != CPU.name and not machine.gpus and not machine.mps):
        kinds = outside_kinds()
        if is_outside:
            machine = machine._replace(gpus=())
            kinds = {name: kind for name, kind in kinds.items() if name == device}
        machine = _with_listed_gpus(machine, environ, source, kinds)
    if not full:
        return machine
    from headway.machine.host import detect_host

    return _with_torch(machine, source)._replace(host=detect_host(machine, environ, source))


def _with_cores(machine: Machine, source: Source) -> Machine:
    cores = source.usable_cores()
    quota = cpu_quota(source)
    if quota is not None and quota < cores:
        return machine._replace(
            cores=max(1, int(quota)), cores_reason=f"cgroup quota of {quota:g} cores"
        )
    return machine._replace(cores=cores, cores_reason=f"{cores} usable core{'s' * (cores != 1)}")


def _with_listed_gpus(
    machine: Machine,
    environ: Mapping[str, str],
    source: Source,
    kinds: Mapping[str, DeviceKind] = KINDS,
) -> Machine:
    """Add the GPUs that the kernel lists, of a kind that the installed torch can use."""
    for kind in kinds.values():
        gpus = tuple(Gpu(**facts) for facts in kind.found_in(source))
        if not gpus:
            continue
        machine = _with_torch(machine, source)
        machine = machine._replace(listed_kinds=(*machine.listed_kinds, kind.name))
        if not machine.gpus and machine.torch is not None and kind.is_supported_by(machine.torch):
            machine = machine._replace(
                gpus=gpus,
                gpus_reason=f"found by {kind.maker}'s driver",
                gpu_kind=kind.name,
                gpu_mask=environ.get(kind.mask),
            )
    return machine


def _has_driver(machine: Machine, source: Source) -> bool:
    if machine.system == "Linux":
        places = ("proc/driver/nvidia", "sys/class/kfd/kfd")
        return any(source.names_in(place) for place in places) or "dxg" in source.names_in("dev")
    return machine.system == "Windows"


def _with_torch(machine: Machine, source: Source) -> Machine:
    """Add the installed torch, read from its version.py without importing it."""
    if machine.torch is not None:
        return machine
    facts: dict[str, str] = {}
    for line in source.torch_version_file().splitlines():
        name, equals, value = line.partition("=")
        if equals:
            facts[name.split(":")[0].strip()] = value.strip().strip("'\"")
    if "__version__" not in facts:
        return machine._replace(torch_reason="torch is not installed for this Python")
    cuda, hip, xpu = (
        None if facts.get(name, "None") == "None" else facts[name]
        for name in ("cuda", "hip", "xpu")
    )
    torch = Torch(facts["__version__"], cuda, hip, xpu)
    return machine._replace(torch=torch, torch_reason="its version.py")
