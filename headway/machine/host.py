"""Detection of facts for diagnosis; planning does not depend on them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from typing import Any

from headway.ipc.secrets import is_secret, masked
from headway.machine.facts import HostFacts, Machine
from headway.machine.source import Source, cpu_quota, memory_facts, memory_limit, physical_cores

_PREFIXES = (  # prefixes of names
    *("CUDA", "NVIDIA", "NCCL", "GLOO", "OMP", "MKL", "KMP", "OPENBLAS", "TORCH", "PYTORCH"),
    *("HIP", "ROCR", "HSA", "ACCELERATE", "HEADWAY", "OMPI_COMM_WORLD", "PMI_"),
    *("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"),
    *("SLURM_NNODES", "SLURM_GPUS", "SLURM_CPUS", "SLURM_STEP"),
)
_NAMES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("LD_PRELOAD", "PYTHONUNBUFFERED"),
)

_ADDRESS = "ADDR|HOST|NODELIST|ENDPOINT|UR[IL]$|^(NCCL_COMM_ID|PMI_PORT|HEADWAY_RUN)$"
_LIMITS = {"open_files": "NOFILE", "processes": "NPROC", "locked_bytes": "MEMLOCK"}
HIDDEN = "hidden"
"""Placeholder for private values. All settings accept it, so snapshots can be replayed."""

Fact = tuple[Any, str]
"""A value and its source, or None and the reason."""


def affects_training(name: str) -> bool:
    """Return whether a variable may affect training; other variables are not recorded."""
    return name.startswith(_PREFIXES) or name in _NAMES


def detect_host(machine: Machine, environ: Mapping[str, str], source: Source) -> HostFacts:
    python = ".".join(map(str, sys.version_info[:3])) + f" {sys.implementation.name}"
    facts: dict[str, Fact] = {
        "python": (python, "this interpreter"),
        "affinity": (source.usable_cores(), "the affinity mask of this process"),
        "container": _container(source),
        **{
            fact: (source.limit(name), f"RLIMIT_{name}, the soft limit")
            for fact, name in _LIMITS.items()
        },
        "variables": (_variables(environ), "the environment; only variables that affect training"),
        **(_mac(machine, source) if machine.system == "Darwin" else _linux(source)),
    }
    values = {name: value for name, (value, _) in facts.items()}
    return HostFacts(**values, reasons={name: reason for name, (_, reason) in facts.items()})


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that affect training, without secrets, addresses or user names."""
    found = {}
    for name, text in environ.items():
        is_private = is_secret(name) or name == "HEADWAY_ENV"  # may contain any variable
        if affects_training(name) and not is_private:
            is_address = re.search(_ADDRESS, name) is not None
            found[name] = HIDDEN if is_address else without_home(masked(name, text), environ)
    return found


def without_home(text: str, environ: Mapping[str, str]) -> str:
    """Replace the home folder in `text` with ~, because its path may contain the user's name."""
    home = environ.get("HOME", "").rstrip("/")
    if not os.path.isabs(home):  # a short relative name could match anywhere
        return text
    return re.sub(re.escape(home) + r"(?![\w.-])", "~", text)


def _linux(source: Source) -> dict[str, Fact]:
    release = re.search(r'^PRETTY_NAME="?(.*?)"?$', source.read("etc/os-release"), re.MULTILINE)
    processors = source.read("proc/cpuinfo")
    model = re.search(r"^model name\s*: (.*)$", processors, re.MULTILINE)
    logical = len(re.findall(r"^processor\s*:", processors, re.MULTILINE))
    memory = memory_facts(source)
    nodes = [name for name in source.names_in("sys/devices/system/node") if name[4:].isdecimal()]
    return {
        "os": (release[1] if release else "Linux", "/etc/os-release"),
        "kernel": (source.read("proc/sys/kernel/osrelease").strip(), "/proc/sys/kernel"),
        "cpu": _fact(model and model[1], "/proc/cpuinfo"),
        "logical_cores": _fact(logical, "/proc/cpuinfo"),
        "physical_cores": _fact(physical_cores(source), "/proc/cpuinfo"),
        "cpu_quota": _fact(cpu_quota(source), "the cgroup", "not limited by a cgroup"),
        "numa_nodes": _fact(len(nodes), "/sys/devices/system/node"),
        "memory_bytes": _fact(memory.get("MemTotal"), "/proc/meminfo"),
        "memory_limit_bytes": _fact(memory_limit(source), "the cgroup", "not limited by a cgroup"),
        "shm_bytes": (source.disk_size("dev/shm"), "/dev/shm"),
        "interfaces": (tuple(source.names_in("sys/class/net")), "/sys/class/net"),
        "infiniband": (tuple(source.names_in("sys/class/infiniband")), "/sys/class/infiniband"),
    }


def _mac(machine: Machine, source: Source) -> dict[str, Fact]:
    from headway.machine.apple import query_sysctl

    answers = query_sysctl(source)
    absent = ("cpu_quota", "numa_nodes", "memory_limit_bytes", "shm_bytes")
    return {
        **dict.fromkeys(absent, (None, "not available on a Mac")),
        "os": (f"macOS {machine.macos}", "sysctl"),
        "kernel": (f"Darwin, {machine.architecture}", "uname"),
        "cpu": _fact(answers.get("machdep.cpu.brand_string"), "sysctl"),
        "logical_cores": _fact(int(answers.get("hw.logicalcpu", 0)), "sysctl"),
        "physical_cores": _fact(int(answers.get("hw.physicalcpu", 0)), "sysctl"),
        "memory_bytes": _fact(int(answers.get("hw.memsize", 0)), "sysctl"),
        "interfaces": ((), "not detected on a Mac"),
        "infiniband": ((), "not available on a Mac"),
    }


def _fact(value: Any, known_from: str, cause: str | None = None) -> Fact:
    """Return `value` and its source; if `value` is None or 0, return None and the reason."""
    if value:
        return value, known_from
    return None, cause or f"not reported by {known_from}"


def _container(source: Source) -> Fact:
    for path, name in ((".dockerenv", "Docker"), ("run/.containerenv", "Podman")):
        if os.path.basename(path) in source.names_in(os.path.dirname(path)):
            return name, f"/{path}"
    for name in ("docker", "kubepods", "containerd", "lxc", "apptainer"):
        if name in source.read("proc/1/cgroup"):
            return name, "/proc/1/cgroup"
    return None, "no trace of a container found"
