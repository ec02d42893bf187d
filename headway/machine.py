"""One snapshot of this machine's facts, each with its reason. No torch, no CUDA context."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import NamedTuple


class Gpu(NamedTuple):
    """One CUDA device as the driver names it, whatever CUDA_VISIBLE_DEVICES says."""

    name: str
    uuid: str
    memory_bytes: int
    capability: tuple[int, int]  # compute capability: (8, 0) for an A100


class Machine(NamedTuple):
    """What this machine is; everything that decides takes one of these."""

    system: str = "Linux"  # Linux, Darwin, Windows
    cores: int = 1  # those this process may use
    cores_reason: str = "one core"
    gpus: tuple[Gpu, ...] = ()
    gpus_reason: str = "no NVIDIA driver on this machine"
    mps: bool = False
    mps_reason: str = "not a Mac"
    cuda_visible_devices: str | None = None

    @property
    def visible_gpus(self) -> tuple[Gpu, ...]:
        """The GPUs that a process sees, in its order, as CUDA reads CUDA_VISIBLE_DEVICES."""
        if self.cuda_visible_devices is None:
            return self.gpus
        visible: list[Gpu] = []
        for token in self.cuda_visible_devices.split(","):
            gpu = self._named(token.strip())
            if gpu is None:  # CUDA ignores an unknown name and all that follows
                break
            if gpu in visible:  # CUDA then shows none at all
                return ()
            visible.append(gpu)
        return tuple(visible)

    def _named(self, token: str) -> Gpu | None:
        if token.isdecimal():
            return self.gpus[int(token)] if int(token) < len(self.gpus) else None
        matches = [gpu for gpu in self.gpus if token and gpu.uuid.startswith(token)]
        return matches[0] if len(matches) == 1 else None

    def best_device(self) -> tuple[str, str]:
        """Return the device to use when nobody says which, and why."""
        if self.visible_gpus:
            return "cuda", self.describe_gpus()
        if self.gpus:
            return "cpu", f"CUDA_VISIBLE_DEVICES={self.cuda_visible_devices!r} hides the GPUs"
        if self.mps:
            return "mps", self.mps_reason
        return "cpu", self.gpus_reason

    def describe_gpus(self) -> str:
        """Return the visible GPUs in words: "8 GPUs (NVIDIA H100)"."""
        names = sorted({gpu.name for gpu in self.visible_gpus})
        count = len(self.visible_gpus)
        return f"{count} GPU{'s' * (count != 1)} ({', '.join(names)})" if count else "no GPU"


def detect_machine(environ: Mapping[str, str] = os.environ, root: str = "/") -> Machine:
    """Look at this machine.

    Args:
        environ: read for CUDA_VISIBLE_DEVICES.
        root: where /proc and /sys are found, for tests.
    """
    system = {"linux": "Linux", "darwin": "Darwin", "win32": "Windows"}.get(
        sys.platform, sys.platform
    )
    cores, cores_reason = _usable_cores(root)
    gpus, gpus_reason = _gpus(system, root)
    mps, mps_reason = _mps(system)
    return Machine(
        system=system,
        cores=cores,
        cores_reason=cores_reason,
        gpus=gpus,
        gpus_reason=gpus_reason,
        mps=mps,
        mps_reason=mps_reason,
        cuda_visible_devices=environ.get("CUDA_VISIBLE_DEVICES"),
    )


def _usable_cores(root: str) -> tuple[int, str]:
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = _cgroup_quota(root)
    if quota is not None and quota < cores:
        return max(1, int(quota)), f"cgroup quota of {quota:g} cores"
    return cores, f"{cores} usable core{'s' * (cores != 1)}"


def _cgroup_quota(root: str) -> float | None:
    """Return the smallest CPU quota, in cores, of this process's cgroup and those above it.

    Source: the kernel's cgroup-v2.rst (cpu.max) and sched-bwc.rst (cpu.cfs_quota_us).
    """
    quotas = []
    for line in _read(root, "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            for folder in _upward("sys/fs/cgroup", path):
                limit, _, period = _read(root, f"{folder}/cpu.max").strip().partition(" ")
                if limit.isdecimal() and period.isdecimal():
                    quotas.append(int(limit) / int(period))
        elif "cpu" in controllers.split(","):
            for folder in _upward("sys/fs/cgroup/cpu", path):
                limit = _read(root, f"{folder}/cpu.cfs_quota_us").strip()
                period = _read(root, f"{folder}/cpu.cfs_period_us").strip()
                if limit.isdecimal() and period.isdecimal():
                    quotas.append(int(limit) / int(period))
    return min(quotas, default=None)


def count_memory_kills(root: str = "/") -> int:
    """Return how often the kernel's memory killer has struck in this process's cgroup.

    Source: the kernel's cgroup-v2.rst (memory.events), cgroup-v1/memory.rst (memory.oom_control).
    """
    counts = [0]
    for line in _read(root, "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            files = [f"{folder}/memory.events" for folder in _upward("sys/fs/cgroup", path)]
        elif "memory" in controllers.split(","):
            mount = "sys/fs/cgroup/memory"
            files = [f"{folder}/memory.oom_control" for folder in _upward(mount, path)]
        else:
            continue
        for file in files:
            words = _read(root, file).split()
            if "oom_kill" in words[:-1]:
                counts.append(int(words[words.index("oom_kill") + 1]))
    return max(counts)


def _upward(mount: str, path: str) -> list[str]:
    """Return the folder of the cgroup `path` and all above it; in a container only the mount is."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return ["/".join([mount, *parts[:end]]) for end in range(len(parts), -1, -1)]


def _gpus(system: str, root: str) -> tuple[tuple[Gpu, ...], str]:
    if system == "Darwin":
        return (), "a Mac has no CUDA"
    driver = "proc/driver/nvidia/version"
    if system == "Linux" and not (_read(root, driver) or os.path.exists(f"{root}dev/dxg")):
        return (), "no NVIDIA driver on this machine"
    gpus, reason = _ask_nvml()
    if gpus is None:
        gpus, reason = _ask_nvidia_smi()
    if not gpus:
        return (), reason
    torch_version = _torch_without_cuda()
    if torch_version:
        return (), f"this torch ({torch_version}) is built without CUDA"
    return gpus, reason


def _ask_nvml() -> tuple[tuple[Gpu, ...] | None, str]:
    try:
        import pynvml
    except ImportError:
        return None, "nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
        gpus = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
            gpus.append(
                Gpu(
                    name=pynvml.nvmlDeviceGetName(handle),
                    uuid=pynvml.nvmlDeviceGetUUID(handle),
                    memory_bytes=pynvml.nvmlDeviceGetMemoryInfo(handle).total,
                    capability=(major, minor),
                )
            )
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return None, f"the NVIDIA driver does not answer: {error}"
    return tuple(gpus), "found by NVML"


def _ask_nvidia_smi() -> tuple[tuple[Gpu, ...], str]:
    """Ask the tool of the driver; NVML, which `headway[nvidia]` brings, answers faster."""
    import subprocess

    query = "name,uuid,memory.total,compute_cap"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        gpus = []
        for line in done.stdout.splitlines():
            name, uuid, mebibytes, capability = (part.strip() for part in line.split(","))
            major, _, minor = capability.partition(".")
            gpus.append(Gpu(name, uuid, int(mebibytes) * 2**20, (int(major), int(minor))))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return (), f"nvidia-smi does not answer: {error}"
    return tuple(gpus), "found by nvidia-smi"


def _torch_without_cuda() -> str | None:
    """Return the version of the installed torch if it is a CPU-only build; read, not imported."""
    from importlib.util import find_spec

    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    text = _read("", os.path.join(spec.submodule_search_locations[0], "version.py"))
    facts = dict(line.partition("=")[::2] for line in text.splitlines() if "=" in line)
    named = {key.split(":")[0].strip(): value.strip().strip("'\"") for key, value in facts.items()}
    built_for = {named.get("cuda", "None"), named.get("hip", "None")}
    return named.get("__version__", "unknown") if text and built_for == {"None"} else None


def _mps(system: str) -> tuple[bool, str]:
    if system != "Darwin":
        return False, "not a Mac"
    if os.uname().machine != "arm64":
        return False, "this Python or this Mac is not Apple silicon"
    return True, "Apple silicon"


def _read(root: str, path: str) -> str:
    try:
        with open(os.path.join(root, path), encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
