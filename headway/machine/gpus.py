"""Detection of NVIDIA GPUs (nvidia-smi) and AMD GPUs (kernel), and fixes for unusable GPUs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from headway.devices.kind import numbers
from headway.devices.table import CUDA, kind_of
from headway.ipc.stderr import shown
from headway.machine.facts import (
    DEFAULT,
    EXCLUSIVE,
    OLDEST_DRIVER,
    PROHIBITED,
    WHEELS,
    Gpu,
    GpuUse,
    Machine,
    MigSlice,
    apply_cuda_mask,
)
from headway.machine.source import Source, memory_facts

_UNIFIED = ((7, 2), (8, 7), (11, 0), (12, 1))
"""Compute capabilities of GPUs that share the CPU's memory: Xavier, Orin, Thor, GB10."""

_UNIFIED_AMD = (110003, 110500, 110501, 110502, 110503)
"""AMD GPUs that share the CPU's memory: Phoenix, Strix, Krackan. Source: kfd_device.c, LLVM."""

KFD = "sys/class/kfd/kfd/topology/nodes"
_ABSENT = "it is not installed"
_ROCR, _HIP = "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"
_INSTALL = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl"
# output of nvidia-smi, which may change between versions
_SMI_MIG_IS_ON = "Enabled"
_SMI_MODES = {"exclusive_process": EXCLUSIVE, "prohibited": PROHIBITED}
"""Values of mig.mode.current and, in lower case, compute_mode. Source: man page, driver 525."""

_SMI_UUID = r"UUID: (\S+)\)"
_SMI_SLICE = r"\s+MIG (\S+)"
"""Lines of `nvidia-smi -L` for a GPU and its slices. Source: NVIDIA's MIG guide."""


def with_gpus(
    machine: Machine, environ: Mapping[str, str], source: Source, is_nvidia: bool, *, full: bool
) -> Machine:
    """Add NVIDIA or AMD GPUs to the snapshot, or the reason why there are none."""
    is_rocm = machine.torch is not None and machine.torch.hip is not None
    if is_rocm or not is_nvidia:
        machine = _with_amd_gpus(machine, environ, source)
    if is_nvidia and not machine.gpus:
        return machine._replace(**_NvidiaSmi(source, full).detect())
    return machine._replace(has_driver=is_rocm)  # AMD's driver is loaded for any AMD card


def gpu_fixes(machine: Machine, device: str = "") -> list[str]:
    """Return fixes for unusable GPUs; if `device` is set, only for GPUs of that kind."""
    if device not in ("", machine.gpu_kind):
        return [f"`{_INSTALL}/{kind_of(device).wheels}`"] if device in machine.listed_kinds else []
    if machine.mismatch is not None and not machine.is_hidden:
        if machine.is_rocm:
            return ["install torch's ROCm build: https://pytorch.org/get-started/locally"]
        install, has_cuda = _wheel_fix(machine), machine.torch is not None and machine.torch.cuda
        return install if install and not has_cuda else ["update the NVIDIA driver", *install]
    if machine.visible_gpus:
        return availability_fixes(machine.visible_gpus[0])
    if machine.mask is not None and (machine.gpus or machine.is_hidden):
        return [f"`unset {machine.mask_variable}`"]
    if machine.has_driver and machine.gpu_kind == CUDA.name:
        of_amd = ("rocm-smi", "--device /dev/kfd --device /dev/dri")
        tool, flags = of_amd if machine.is_rocm else (CUDA.tool, "--gpus all")
        return [f"run `{tool}` to see why; after an update, reboot; start a container with {flags}"]
    return []


def availability_fixes(gpu: Gpu) -> list[str]:
    name = gpu.slice_of or gpu.uuid
    if gpu.compute_mode in (PROHIBITED, EXCLUSIVE):
        return [admin_fix(f"nvidia-smi -i {name} -c DEFAULT"), "use another GPU"]
    if gpu.is_mig:
        return [admin_fix(f"nvidia-smi -i {name} -mig 0"), "create MIG slices"]
    return ["use another GPU"]


def admin_fix(command: str) -> str:
    """Return a fix that asks an administrator to run a command that affects other users."""
    return f"ask the machine's administrator to run {command}"


def kernel_fixes(machine: Machine) -> list[str]:
    return _wheel_fix(machine) or ["with --devices, select GPUs that one PyTorch build supports"]


def _wheel_fix(machine: Machine) -> list[str]:
    """Return the fix that installs PyTorch's newest build for this machine, if there is one."""
    driver = numbers(machine.driver or "999")
    needed = [gpu.capability for gpu in machine.gpus if gpu.capability is not None]
    for index, cuda, first, last in reversed(WHEELS):
        fits = all(first <= capability <= last for capability in needed)
        if fits and OLDEST_DRIVER[cuda[0]] <= driver:
            return [f"`{_INSTALL}/{index}`"]
    return []


FIELDS = (
    *("name", "uuid", "memory.total", "compute_cap", "compute_mode", "mig.mode.current"),
    *("memory.used", "utilization.gpu", "ecc.errors.uncorrected.volatile.total"),
    *("pci.bus_id", "driver_version"),
)
"""Fields to query from nvidia-smi for each GPU."""


class _NvidiaSmi:
    def __init__(self, source: Source, full: bool) -> None:
        self._source = source
        self._full = full

    def detect(self) -> dict[str, Any]:
        """Return fields of `Machine`: the reported GPUs, or the reason why there are none."""
        answers, error = self._query()
        gpus = tuple(self._gpu(answer, error) for answer in answers)
        error = error or next((gpu.unknown["uuid"] for gpu in gpus if not gpu.uuid), "")
        versions = [answer.get("driver_version", "") for answer in answers]
        why = f"an NVIDIA driver is loaded, but nvidia-smi lists no GPU: {error}".removesuffix(": ")
        return {
            "gpus": gpus,
            "gpus_reason": "found by nvidia-smi" if gpus else why,
            "driver": next((version for version in versions if numbers(version) > (0,)), None),
            "driver_fault": error if error != _ABSENT else "",  # a Jetson has no tool
            "has_driver": True,
        }

    def _lines(self, *words: str) -> tuple[list[str], str]:
        """Return the lines that nvidia-smi prints, and the error if it fails."""
        try:
            text = self._source.output_of(["nvidia-smi", *words])
        except FileNotFoundError:
            return [], _ABSENT
        except OSError as error:
            return [], shown(error.strerror or str(error))
        return [line for line in text.splitlines() if line.strip()], ""

    def _rows(self, query: str, width: int) -> tuple[list[list[str]], str]:
        """Return the rows with `width` cells, and nvidia-smi's error or the first invalid line."""
        lines, error = self._lines(query, "--format=csv,noheader,nounits")
        rows = [[cell.strip() for cell in line.split(",")] for line in lines]
        odd = [line for line, row in zip(lines, rows, strict=True) if len(row) != width]
        fault = error or shown("".join(odd[:1]).strip())
        return [row for row in rows if len(row) == width], fault

    def _query(self) -> tuple[list[dict[str, str]], str]:
        """Return each GPU's values of the fields that this driver supports, and the error."""
        fields = list(FIELDS)
        while True:
            rows, error = self._rows(f"--query-gpu={','.join(fields)}", len(fields))
            known = [name for name in fields if f'"{name}"' not in error]
            if known == fields or not known:
                return [dict(zip(fields, row, strict=True)) for row in rows], error
            fields = known

    def _gpu(self, answer: Mapping[str, str], error: str) -> Gpu:
        name, uuid = answer.get("name", ""), answer.get("uuid", "")
        version = re.fullmatch(r"(\d+)\.(\d+)", answer.get("compute_cap", ""))
        place = f"sys/bus/pci/devices/{answer.get('pci.bus_id', '').lower()[4:]}"
        gpu = Gpu(
            name="NVIDIA GPU" if name[:1] in ("", "[") else name,
            uuid=uuid if uuid.startswith("GPU-") else "",
            memory_bytes=_bytes(answer.get("memory.total", "")),
            capability=(int(version[1]), int(version[2])) if version else None,
            compute_mode=_SMI_MODES.get(answer.get("compute_mode", "").lower(), DEFAULT),
            local_cpus=self._source.read(f"{place}/local_cpulist").strip(),
        )
        if gpu.memory_bytes is None and gpu.capability in _UNIFIED:
            memory_bytes = memory_facts(self._source).get("MemTotal")
            gpu = gpu._replace(memory_bytes=memory_bytes, shares_memory=True)
        if answer.get("mig.mode.current") == _SMI_MIG_IS_ON:
            gpu = self._with_slices(gpu)
        if self._full or gpu.compute_mode == EXCLUSIVE:
            apps, _ = self._rows("--query-compute-apps=gpu_uuid,pid", 2)
            use = GpuUse(
                _bytes(answer.get("memory.used", "")),
                _number(answer.get("utilization.gpu", "")),
                tuple(int(pid) for owner, pid in apps if owner == gpu.uuid and pid.isdecimal()),
            )
            gpu = gpu._replace(use=use)
        if self._full:
            errors = answer.get("ecc.errors.uncorrected.volatile.total", "")
            gpu = gpu._replace(ecc_errors=_number(errors))
        fields = {"uuid": "uuid", "memory_bytes": "memory.total", "capability": "compute_cap"}
        reasons = {
            fact: f"nvidia-smi reports {answer.get(field) or error or 'nothing'}"
            for fact, field in fields.items()
            if not getattr(gpu, fact)
        }
        return gpu._replace(unknown={**gpu.unknown, **reasons})

    def _with_slices(self, gpu: Gpu) -> Gpu:
        """Add the slices of a GPU, which `nvidia-smi -L` lists below it."""
        slices = []
        owner = ""
        lines, error = self._lines("-L")
        for line in lines:
            found = re.search(_SMI_UUID, line)
            profile = re.match(_SMI_SLICE, line)
            if found and not profile:
                owner = found[1]
            elif found and profile and owner == gpu.uuid:
                size = re.search(r"(\d+)gb", profile[1])
                memory = int(size[1]) * 2**30 if size else None
                slices.append(MigSlice(f"{gpu.name} MIG {profile[1]}", found[1], memory))
        unknown = {"slices": f"nvidia-smi -L: {error}"} if error else {}
        return gpu._replace(is_mig=True, slices=tuple(slices), unknown=unknown)


def _with_amd_gpus(machine: Machine, environ: Mapping[str, str], source: Source) -> Machine:
    """Add the GPUs in the kernel's list of compute nodes, which also contains CPUs.

    Source: the kernel's amdkfd, kfd_topology.c. amdsmi reports more facts than planning needs, and
    must match the installed ROCm.
    """
    nodes = sorted((node for node in source.names_in(KFD) if node.isdecimal()), key=int)
    gpus = tuple(gpu for gpu in [_amd_gpu(source, node) for node in nodes] if gpu is not None)
    reason = "found by the amdgpu driver" if gpus else "the amdgpu driver lists no GPU"
    machine = machine._replace(gpus=gpus, gpus_reason=reason, is_rocm=True)
    rocr, hip, cuda = map(environ.get, (_ROCR, _HIP, machine.mask_variable))
    if rocr is not None:
        left = tuple(gpu for _, gpu in apply_cuda_mask(rocr, gpus))
        if not left:
            return machine._replace(mask=rocr, mask_variable=_ROCR)
        machine = machine._replace(gpus=left)
    # torch counts by ROCR's variable only if HIP's is not set
    if hip is not None or (rocr is not None and cuda is None):
        return machine._replace(mask=hip, mask_variable=_HIP)
    return machine


def _amd_gpu(source: Source, node: str) -> Gpu | None:
    lines = source.read(f"{KFD}/{node}/properties").splitlines()
    facts = {name: _number(text) for name, _, text in (line.partition(" ") for line in lines)}
    version = facts.get("gfx_target_version")  # 90010: gfx90a, 110000: gfx1100
    if not (version or facts.get("simd_count")):
        return None  # a CPU
    folder = f"{KFD}/{node}/mem_banks"
    banks = [source.read(f"{folder}/{bank}/properties") for bank in source.names_in(folder)]
    sizes = [int(size) for bank in banks for size in re.findall(r"size_in_bytes (\d+)", bank)]
    unique = facts.get("unique_id")  # 0 if the card has none
    name, capability = "AMD GPU", None
    if version:
        major, minor, step = version // 10000, version // 100 % 100, version % 100
        name, capability = f"AMD gfx{major}{minor:x}{step:x}", (major, minor)
    shares = version in _UNIFIED_AMD  # the driver reports only the firmware's carve-out
    of_host = memory_facts(source).get("MemTotal", 0) if shares else 0
    return Gpu(
        name=name,
        uuid=f"GPU-{unique:016x}" if unique else f"GPU-XX-{node}",
        memory_bytes=max(sum(sizes), of_host) or None,
        shares_memory=shares,
        capability=capability,
    )


def _number(text: str) -> int | None:
    """Parse a whole number; None for other text such as [N/A]."""
    text = text.strip()
    return int(text) if text.removeprefix("-").isdecimal() and len(text) < 20 else None


def _bytes(mebibytes: str) -> int | None:
    """Convert mebibytes to bytes; None if unknown, as for a GPU that shares the CPU's memory."""
    number = _number(mebibytes)
    return None if number is None or number < 0 else number * 2**20
