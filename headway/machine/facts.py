"""The snapshot of a machine: each fact with its source, and each missing fact with the reason.

`headway env --json` writes a snapshot as JSON, and `--machine` reads it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from headway.devices.kind import numbers, sm
from headway.devices.table import CPU, CUDA, MPS, kind_of
from headway.errors import Code, ConfigError
from headway.ipc.typed import SchemaError, plain, read

_FORMAT = 1
_MAX_BYTES = 2**24
DEFAULT, EXCLUSIVE, PROHIBITED = "default", "exclusive-process", "prohibited"  # compute modes
OLDEST_TORCH = (2, 8)  # as in pyproject.toml
NEWEST_TORCH = (2, 13)  # that Headway is tested with, as in constraints.txt
OLDEST_DRIVER = {12: (525, 60), 13: (580, 65)}
"""The minimum Linux driver for each CUDA major version that torch is built for.

Source: NVIDIA, CUDA Compatibility, table of minor version compatibility."""

WHEELS = (
    ("cu126", (12,), (5, 0), (9, 0)),
    ("cu128", (12, 8), (7, 5), (12, 1)),
    ("cu130", (13,), (7, 5), (99, 0)),
)
"""PyTorch's builds: index, minimum CUDA version, first and last compute capability with kernels.

Source: pytorch's RELEASE.md, PyTorch CUDA Support Matrix, 2.11 to 2.14."""

_END_OF_MASK = ("", "-1")
"""Entries that end a mask; other invalid entries are errors. Source: NVIDIA's CUDA guide."""


class GpuUse(NamedTuple):
    memory_bytes: int | None  # None: not reported, as in MIG mode
    utilization_percent: int | None
    pids: tuple[int, ...]  # processes with a CUDA context, except in other containers


class MigSlice(NamedTuple):
    """A MIG slice, which CUDA shows as a GPU."""

    name: str
    uuid: str
    memory_bytes: int | None


class Gpu(NamedTuple):
    """A detected GPU, visible or hidden by a mask, with its known properties."""

    name: str
    uuid: str = ""  # empty: unknown
    memory_bytes: int | None = None
    capability: tuple[int, int] | None = None  # compute capability: (8, 0) for an A100
    compute_mode: str = DEFAULT
    is_mig: bool = False  # MIG is enabled, so only the slices can be used
    slices: tuple[MigSlice, ...] = ()
    slice_of: str = ""  # for a slice: uuid of the GPU
    tiles: int = 0  # tiles of an Intel card, for masks; 0 if each tile is a GPU
    use: GpuUse | None = None  # None: not queried, or a slice, for which nvidia-smi reports none
    claimed_by: str = ""  # the launch that has claimed this GPU as idle
    ecc_errors: int | None = None  # uncorrected errors since the driver was loaded; None: unknown
    local_cpus: str = ""  # cores of its NUMA node, as Linux lists them: 0-31,64-95; empty: unknown
    shares_memory: bool = False  # uses the host's memory
    unknown: Mapping[str, str] = {}  # reasons for unknown fields, by name

    @property
    def is_disabled(self) -> bool:
        """Whether this GPU is permanently unusable."""
        has_none = self.is_mig and not self.slices and "slices" not in self.unknown
        return self.compute_mode == PROHIBITED or has_none

    @property
    def obstacle(self) -> str | None:
        """The reason why this GPU is currently unusable; None if it is usable."""
        if self.compute_mode == PROHIBITED:
            return "its compute mode is prohibited"
        if self.compute_mode == EXCLUSIVE and self.use and self.use.pids:
            return f"its compute mode is exclusive-process, and process {self.use.pids[0]} uses it"
        if self.is_disabled:
            return "it is in MIG mode without slices"
        return None

    def parts(self) -> "tuple[Gpu, ...]":
        """Return the devices that CUDA shows for this GPU: itself, or its MIG slices."""
        if not self.slices:
            return (self,)
        whole = self._replace(is_mig=False, slices=(), slice_of=self.uuid, use=None)
        return tuple(whole._replace(**part._asdict()) for part in self.slices)


class Torch(NamedTuple):
    """The installed torch version and build, read from torch's version.py."""

    version: str
    cuda: str | None = None  # CUDA version of the build
    hip: str | None = None
    xpu: str | None = None  # release of Intel's compiler


class HostFacts(NamedTuple):
    """Facts for diagnosis, not needed for planning; `reasons` contains the source of each fact."""

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
    memory_limit_bytes: int | None  # the cgroup's limit
    shm_bytes: int | None  # the size of /dev/shm; 0 if it is missing or read-only
    open_files: int | None  # soft limit, like the next two fields; -1: unlimited
    processes: int | None
    locked_bytes: int | None
    container: str | None
    interfaces: tuple[str, ...]
    infiniband: tuple[str, ...]
    variables: Mapping[str, str]  # environment variables that affect training
    reasons: Mapping[str, str]


class Machine(NamedTuple):
    """The snapshot of a machine, on which all decisions are based."""

    system: str = "Linux"  # Linux or Darwin
    macos: str = ""  # version, such as 14.5
    architecture: str = "x86_64"  # of this Python, not of the CPU
    cores: int = 1  # usable by this process
    cores_reason: str = "one core"
    gpus: tuple[Gpu, ...] = ()
    gpu_kind: str = CUDA.name  # kind of all `gpus`, because torch is built for one kind
    listed_kinds: tuple[str, ...] = ()  # kinds of GPUs that the kernel lists
    gpus_reason: str = "no NVIDIA driver on this machine"
    driver: str | None = None  # version of the GPU driver
    has_driver: bool = False  # a driver for this kind is loaded, and torch may support it
    driver_fault: str = ""  # error from the driver's tool
    unused_card: str = ""  # a note on a card without a loaded driver
    is_by_torch: bool = False  # the GPUs were detected by torch
    torch_refusal: str = ""  # why torch found no device when queried
    is_rocm: bool = False  # AMD GPUs, which torch also calls cuda
    mps: bool = False
    mps_reason: str = "not a Mac"
    mps_fix: str = ""  # how to make MPS available, if possible
    torch: Torch | None = None
    torch_reason: str = "not read: planning does not need it here"
    architectures: tuple[str, ...] = ()  # with CUDA kernels in torch; empty: not queried
    mask: str | None = None  # value of `mask_variable`, which selects the visible GPUs
    mask_variable: str = CUDA.mask
    host: HostFacts | None = None

    @property
    def named_gpus(self) -> list[tuple[str, Gpu]]:
        """The GPUs visible to torch, in torch's order, each with its name in a mask."""
        if not self.is_by_torch and (self.mismatch or self.torch_refusal):
            return []
        if self.mask is None or (self.is_by_torch and not self.mask):
            parts = [part for gpu in self.gpus for part in gpu.parts()]
            return [(str(index), part) for index, part in enumerate(parts)]
        if self.is_by_torch:
            return list(zip(self.mask.split(","), self.gpus, strict=False))
        is_set = not kind_of(self.gpu_kind).mask_is_ordered
        read = apply_level_zero_mask if is_set else apply_cuda_mask
        return read(self.mask, self.gpus)

    @property
    def visible_gpus(self) -> tuple[Gpu, ...]:
        """The GPUs visible to torch, in torch's order, with masks applied."""
        return tuple(gpu for _, gpu in self.named_gpus)

    def gpus_of(self, device: str) -> tuple[Gpu, ...]:
        return self.visible_gpus if device == self.gpu_kind else ()

    @property
    def is_hidden(self) -> bool:
        """Whether a mask intentionally hides all GPUs."""
        if self.mask is None or not kind_of(self.gpu_kind).mask_is_ordered:
            return False
        return not _entries(self.mask.split(",")[0])  # "", -1, NoDevFiles

    @property
    def mismatch(self) -> str | None:
        """Why the installed torch does not match the GPUs' driver; None if it matches."""
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

    def missing_kernels(self, gpus: Sequence[Gpu]) -> str:
        """Describe a GPU without kernels in torch; empty if there is none.

        Until torch was queried, its kernels are those of the official build.
        """
        cuda = self.torch and self.torch.cuda
        builds = [row for row in WHEELS if cuda and row[1] <= numbers(cuda)]
        for gpu in gpus if builds else ():
            _, _, first, last = builds[-1]
            if gpu.capability is None or first <= gpu.capability <= last:
                continue
            what = f"PyTorch's builds for CUDA {cuda} have kernels for {sm(first)} "
            what += f"to {sm(last)}" if last < (99,) else "and up"
            if self.architectures:
                what = f"torch has kernels for {', '.join(self.architectures)}"
            if not any(_runs_on(gpu.capability, name) for name in self.architectures):
                return f"{gpu.name} is {sm(gpu.capability)}, but {what}"
        return ""

    @property
    def no_gpu_reason(self) -> str:
        """Why `visible_gpus` is empty."""
        if self.mismatch is not None and not self.is_hidden:
            return self.mismatch
        reason = "" if self.gpus else self.gpus_reason
        if self.mask is not None and (self.gpus or (self.has_driver and self.is_hidden)):
            reason = f"{self.mask_variable}={self.mask!r} hides all GPUs"
            if not self.is_hidden:
                names_any = _entries(self.mask)
                twice = "CUDA shows no GPU if the list contains duplicates"
                reason += f": {'it lists no existing GPU' if names_any else twice}"
        return "; ".join(filter(None, (reason, self.torch_refusal)))

    def unavailable_reason(self, device: str) -> str | None:
        if device == self.gpu_kind:
            return None if self.visible_gpus else self.no_gpu_reason
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
    def mask_error(self) -> str | None:
        """Why only some of the GPUs in CUDA_VISIBLE_DEVICES are visible; None if all are."""
        if self.mask is None or self.is_by_torch or not kind_of(self.gpu_kind).mask_is_ordered:
            return None
        names = [name for name, _ in self.named_gpus]
        texts = [text.strip() for text in self.mask.split(",")]
        ignored, value = texts[len(names) :], f"{self.mask_variable}={self.mask}"
        if names and {*ignored} - {*_END_OF_MASK}:
            stop = "CUDA stops at the first entry that is not an existing GPU"
            return f"{value} is ignored from {ignored[0] or 'the empty entry'} on: {stop}"
        for text, name in zip(texts, names, strict=False):
            if name.isdecimal() and not re.fullmatch(r"[+-]?\d+", text):
                return f"{value}: CUDA reads {text} as index {name}"
        return None

    def best_device(self) -> tuple[str, str]:
        """Return the device for `auto` (possibly a GPU that torch cannot use) and the reason."""
        visible = self.visible_gpus
        if any(gpu.obstacle is None for gpu in visible):
            return self.gpu_kind, self.describe_gpus()
        if self.mps:
            return MPS.name, self.mps_reason
        reason = self.mps_reason if self.system == "Darwin" else self.no_gpu_reason
        if visible:
            reason = f"{self.describe_gpus()}, not usable: {visible[0].obstacle}"
        return self.gpu_kind if self.has_driver and not self.is_hidden else CPU.name, reason

    def describe_gpus(self) -> str:
        """Describe the visible GPUs, for example as "8 GPUs (NVIDIA H100)"."""
        names = sorted({gpu.name for gpu in self.visible_gpus})
        count = len(self.visible_gpus)
        return f"{count} GPU{'s' * (count != 1)} ({', '.join(names)})" if count else "no GPU"


def _runs_on(capability: tuple[int, int], architecture: str) -> bool:
    """Whether a GPU runs kernels for an architecture, such as sm_86 or compute_86.

    Kernels for compute_86 are compiled at run time. Source: NVIDIA's CUDA guide, compatibility.
    """
    digits = "".join(filter(str.isdigit, architecture))  # not the letters of sm_90a
    built = int(digits[:-1]), int(digits[-1])
    is_portable = architecture.startswith("compute")
    return built <= capability and (is_portable or built[0] == capability[0])


# Masks such as CUDA_VISIBLE_DEVICES, parsed as the vendors' runtimes do: the visible GPUs in
# torch's order, with their names in the mask


def _entries(mask: str) -> list[int | str]:
    """Parse CUDA_VISIBLE_DEVICES into indices or prefixes of UUIDs, as torch does.

    An invalid entry ends the list, and a duplicate empties it.
    Source: `_parse_visible_devices` in torch/cuda/__init__.py.
    """
    found: list[int | str] = []
    prefix = mask[:4] if mask.startswith(("GPU-", "MIG-")) else ""
    for text in mask.split(","):
        number = re.match(r"[+-]?\d{1,4000}", text.strip())  # int() fails for more digits
        entry = text if prefix else int(number[0]) if number else -1
        if entry in found:
            return []
        if not text.startswith(prefix) or (isinstance(entry, int) and entry < 0):
            break
        found.append(entry)
    return found


def apply_cuda_mask(mask: str, gpus: Sequence[Gpu]) -> list[tuple[str, Gpu]]:
    """Apply CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES; an index selects a GPU's first slice."""
    shown: dict[tuple[int, int], str] = {}
    for entry in _entries(mask):
        if isinstance(entry, int):
            places = [(entry, 0)] if entry < len(gpus) else []
        else:
            places = [
                (index, max(0, part - 1))
                for index, gpu in enumerate(gpus)
                for part, uuid in enumerate((gpu.uuid, *(slice_.uuid for slice_ in gpu.slices)))
                if uuid.startswith(entry)
            ]
        if len(places) != 1:
            break
        if places[0] in shown:
            return []
        shown[places[0]] = str(entry)
    return [(name, gpus[i].parts()[j]) for (i, j), name in shown.items()]


def apply_level_zero_mask(mask: str, gpus: Sequence[Gpu]) -> list[tuple[str, Gpu]]:
    """Apply ZE_AFFINITY_MASK, a set of cards (1) and tiles (1.0), or of tiles only (3).

    Other entries are ignored. Source: compute-runtime, execution_environment.cpp.
    """
    if mask in ("", "default"):
        return [(str(index), gpu) for index, gpu in enumerate(gpus)]
    shown: dict[int, list[str]] = {}
    for entry in mask.split(","):
        found = re.fullmatch(r"\s*(\d{1,9})(?:\.(\d{1,9}))?\s*", entry)
        if found is None or int(found[1]) >= len(gpus):
            continue
        if found[2] is None or int(found[2]) < gpus[int(found[1])].tiles:
            shown.setdefault(int(found[1]), []).append(found[0].strip())
    return [(",".join(names), gpus[index]) for index, names in sorted(shown.items())]


# Snapshots as JSON


def as_data(machine: Machine) -> dict[str, Any]:
    return {"version": _FORMAT, **plain(machine)}


def load_machine(path: str) -> Machine:
    """Load the machine from a file written by `headway env --json`."""
    where = f"flag --machine, {path}"
    try:
        with open(path, encoding="utf-8") as file:
            return _machine_in(json.loads(file.read(_MAX_BYTES)))
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
    except (ValueError, RecursionError) as error:
        reason = f"is not a valid machine snapshot: {error}"
        if isinstance(error, SchemaError) and error.place:
            where += f", key {error.place}"
    raise ConfigError(
        f"{path!r} {reason}",
        where=where,
        fix="create one with `headway env --json > machine.json` on that machine",
        code=Code.UNREADABLE,
    )


def _machine_in(data: Any) -> Machine:
    version = data.pop("version", None) if isinstance(data, dict) else None
    if type(version) is not int or version != _FORMAT:
        what = f"is {version!r}, but this version of Headway reads format {_FORMAT}"
        raise SchemaError("version", what)
    return read(Machine, data)
