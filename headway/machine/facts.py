"""The snapshot of a machine: every fact with its reason, every missing one with its cause."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from headway.contract.run import YES
from headway.devices.kind import DIGITS, numbers
from headway.devices.table import CUDA, MPS, kind_of
from headway.errors import ConfigError

DEFAULT, EXCLUSIVE, PROHIBITED = "default", "exclusive-process", "prohibited"  # compute modes
OLDEST_DRIVER = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
"""The oldest Linux driver for each CUDA major version that torch is built for.

Source: NVIDIA, CUDA Compatibility, table of minor version compatibility."""

_END_OF_MASK = ("", "-1")
"""Entries that end CUDA_VISIBLE_DEVICES on purpose; any other unknown entry is a mistake.

Source: NVIDIA, CUDA C++ Programming Guide, environment variables."""


class GpuUse(NamedTuple):
    memory_bytes: int
    utilization_percent: int | None  # None: not reported, as in MIG mode
    pids: tuple[int, ...]  # with a CUDA context; a container hides processes outside it


class MigSlice(NamedTuple):
    """A slice of a GPU in MIG mode, which CUDA shows as a GPU."""

    name: str
    uuid: str
    memory_bytes: int


class Gpu(NamedTuple):
    """One GPU as the driver lists it, regardless of CUDA_VISIBLE_DEVICES."""

    name: str
    uuid: str
    memory_bytes: int
    capability: tuple[int, int]  # compute capability: (8, 0) for an A100
    compute_mode: str = DEFAULT
    numa_node: int | None = None
    is_mig: bool = False  # only its slices can be used
    slices: tuple[MigSlice, ...] = ()
    slice_of: str = ""  # of a slice: the whole GPU's uuid
    use: GpuUse | None = None  # None: not queried, or of a slice, where nvidia-smi has none
    claimed_by: str = ""  # another launch that has claimed this GPU as idle
    ecc_errors: int | None = None  # uncorrected, since the driver was loaded; None: unknown

    @property
    def is_disabled(self) -> bool:
        """Whether it is unusable, and will stay so."""
        return self.compute_mode == PROHIBITED or (self.is_mig and not self.slices)

    @property
    def obstacle(self) -> str | None:
        """Why this GPU cannot be used now, or None."""
        if self.compute_mode == PROHIBITED:
            return "its compute mode is prohibited"
        if self.compute_mode == EXCLUSIVE and self.use and self.use.pids:
            return f"its compute mode is exclusive-process, and process {self.use.pids[0]} uses it"
        if self.is_mig and not self.slices:
            return "it is in MIG mode without slices"
        return None

    def parts(self) -> tuple[Gpu, ...]:
        """Return the devices that CUDA shows for this GPU: itself, or its MIG slices."""
        if not self.slices:
            return (self,)
        whole = self._replace(is_mig=False, slices=(), slice_of=self.uuid, use=None)
        return tuple(whole._replace(**part._asdict()) for part in self.slices)


class Torch(NamedTuple):
    """The installed torch, from its version.py."""

    version: str
    cuda: str | None = None  # the CUDA that it is built for
    hip: str | None = None
    xpu: str | None = None  # the release of Intel's compiler
    mps: bool | None = None  # None: unknown without importing torch

    def is_at_least(self, *version: int) -> bool:
        return numbers(self.version) >= version


class Host(NamedTuple):
    """Facts for diagnosis that planning does not need; `reasons` has the source of each."""

    os: str
    kernel: str
    python: str
    cpu: str | None
    logical_cores: int | None
    physical_cores: int | None
    affinity: int  # cores in this process's affinity mask
    cpu_quota: float | None  # in cores
    numa_nodes: int | None
    memory_bytes: int | None
    available_bytes: int | None
    memory_limit_bytes: int | None  # of the cgroup
    shm_bytes: int | None  # the size of /dev/shm
    open_files: int | None  # soft limits; -1 is unlimited
    processes: int | None
    locked_bytes: int | None
    container: str | None
    mpi: str | None
    kubernetes: str | None
    interfaces: tuple[str, ...]
    infiniband: tuple[str, ...]
    variables: Mapping[str, str]  # of the environment: those that affect training
    reasons: Mapping[str, str]


class Machine(NamedTuple):
    """The snapshot of a machine, from which all decisions are made."""

    system: str = "Linux"  # Linux, Darwin, Windows
    macos: str = ""  # 14.5
    architecture: str = "x86_64"  # of this Python, not of the CPU
    cores: int = 1  # that this process may use
    cores_reason: str = "one core"
    gpus: tuple[Gpu, ...] = ()
    gpu_kind: str = CUDA.name  # the kind of device that they are: a torch is built for one
    listed_kinds: tuple[str, ...] = ()  # of GPUs that the kernel lists, whatever torch is for
    gpus_reason: str = "no NVIDIA driver on this machine"
    driver: str | None = None  # version of the GPU driver
    driver_is_silent: bool = False  # a driver is installed, but does not list the GPUs
    is_rocm: bool = False  # AMD GPUs, which torch also calls cuda
    mps: bool = False
    mps_reason: str = "not a Mac"
    mps_fix: str = ""  # how to make MPS available, if possible
    torch: Torch | None = None
    torch_reason: str = "not read: planning does not need it here"
    cuda_visible_devices: str | None = None
    gpu_mask: str | None = None  # the same for GPUs of a kind with another variable
    cuda_device_order: str | None = None
    host: Host | None = None

    @property
    def visible_gpus(self) -> tuple[Gpu, ...]:
        """The GPUs that torch shows a process, in order, under CUDA_VISIBLE_DEVICES or its like."""
        if self.torch_obstacle is not None:
            return ()
        if self.mask is None:
            return tuple(part for gpu in self.gpus for part in gpu.parts())
        visible: list[Gpu] = []
        for token in self.mask_entries:
            gpu = self._named(token)
            if gpu is None:  # CUDA ignores an unknown entry and all that follow
                break
            if gpu in visible:  # CUDA then shows no GPU
                return ()
            visible.append(gpu)
        return tuple(visible)

    def gpus_of(self, device: str) -> tuple[Gpu, ...]:
        return self.visible_gpus if device == self.gpu_kind else ()

    @property
    def mask(self) -> str | None:
        """The value of the variable that says which of the GPUs are visible."""
        return self.cuda_visible_devices if self.gpu_kind == CUDA.name else self.gpu_mask

    @property
    def mask_entries(self) -> list[str]:
        """The entries of `mask`, in the order of the GPUs that they show."""
        tokens = [token.strip() for token in (self.mask or "").split(",")]
        if kind_of(self.gpu_kind).mask_is_ordered:
            return tokens
        return [str(index) for index in range(len(self.gpus)) if str(index) in tokens]

    def _named(self, token: str) -> Gpu | None:
        if token.isdecimal() and len(token) <= DIGITS:
            return self.gpus[int(token)].parts()[0] if int(token) < len(self.gpus) else None
        if not token:
            return None
        matches = [gpu.parts()[0] for gpu in self.gpus if gpu.uuid.startswith(token)]
        matches += [
            part for gpu in self.gpus for part in gpu.parts() if part.uuid.startswith(token)
        ]
        return matches[0] if len(set(matches)) == 1 else None

    @property
    def torch_obstacle(self) -> str | None:
        """Why the installed torch cannot use the GPUs of this machine, or None."""
        torch = self.torch
        if torch is None or not self.gpus or self.gpu_kind != CUDA.name:
            return None
        if (torch.hip if self.is_rocm else torch.cuda) is None:
            build = "ROCm" if self.is_rocm else "CUDA"
            return f"this torch ({torch.version}) is built without {build}"
        needed = OLDEST_DRIVER.get(numbers(torch.cuda or "0")[0])
        if self.driver and needed and numbers(self.driver) < needed:
            return (
                f"the NVIDIA driver {self.driver} is too old for this torch, which is built for "
                f"CUDA {torch.cuda} and needs driver {'.'.join(map(str, needed))} or newer"
            )
        return None

    @property
    def why_no_gpu(self) -> str:
        """Why `visible_gpus` is empty."""
        if not self.gpus:
            return self.gpus_reason
        if self.torch_obstacle is not None:
            return self.torch_obstacle
        mask = f"{kind_of(self.gpu_kind).mask}={self.mask!r}"
        if self._named("".join(self.mask_entries[:1])) is None:
            return f"{mask} hides all GPUs"
        return f"{mask} hides all GPUs: it lists one twice, and CUDA then shows none"

    def why_not(self, device: str) -> str | None:
        if device == self.gpu_kind:
            return None if self.visible_gpus else self.why_no_gpu
        if device == MPS.name:
            return None if self.mps else self.mps_reason
        kind, torch = kind_of(device), self.torch
        if not kind.is_numbered:
            return None
        is_there = device in (CUDA.name, *self.listed_kinds)
        if is_there and torch is not None and not kind.is_supported_by(torch):
            return f"this torch ({torch.version}) is built without {kind.label}"
        return f"no {kind.maker} GPU on this machine"

    @property
    def mask_fault(self) -> str | None:
        """Why CUDA_VISIBLE_DEVICES shows some, but not all, of the GPUs that it lists, or None."""
        shown = len(self.visible_gpus)
        ignored = self.mask_entries[shown:]
        if not shown or not {*ignored} - {*_END_OF_MASK}:
            return None
        return (
            f"CUDA_VISIBLE_DEVICES={self.mask} shows no GPU from {ignored[0] or 'the empty entry'} "
            "on: CUDA ignores an entry that is none of its GPUs, and all after it"
        )

    def best_device(self) -> tuple[str, str]:
        """Return the device that `auto` selects, and why."""
        visible = self.visible_gpus
        if any(gpu.obstacle is None for gpu in visible):
            return self.gpu_kind, self.describe_gpus()
        if visible:
            return "cpu", f"{self.describe_gpus()}, not usable: {visible[0].obstacle}"
        if self.gpus:
            return "cpu", self.why_no_gpu
        if self.mps:
            return MPS.name, self.mps_reason
        return "cpu", self.mps_reason if self.system == "Darwin" else self.gpus_reason

    def describe_gpus(self) -> str:
        """Describe the visible GPUs: "8 GPUs (NVIDIA H100)"."""
        names = sorted({gpu.name for gpu in self.visible_gpus})
        count = len(self.visible_gpus)
        return f"{count} GPU{'s' * (count != 1)} ({', '.join(names)})" if count else "no GPU"


def is_on(environ: Mapping[str, str], name: str) -> bool:
    """Return a boolean variable; "0", "false", "no", "off" and "" are false, as is an unset one."""
    word = environ.get(name, "").strip().lower()
    if word in YES:
        return True
    if word in ("", "0", "false", "f", "no", "n", "off"):
        return False
    raise ConfigError(
        f"{name} is {environ[name]!r}, not a boolean",
        where=f"environment {name}",
        fix=f"`export {name}=1` to enable it, or unset it",
    )
