"""System access for the probes: files, drivers, tools and cgroup limits.

Sources for cgroup v1 and v2: the kernel's cgroup-v2.rst, sched-bwc.rst and cgroup-v1/memory.rst.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from headway.ipc.signals import STOP_SIGNALS, collect_signals


class Source:
    """Accesses a machine's files, tools and limits; recordings in tests override the methods."""

    platform = sys.platform

    def __init__(self, root: str = "/") -> None:
        self.root = root

    def read(self, path: str) -> str:
        """Return the text of a file below the root; empty if the file is unreadable."""
        try:
            with open(os.path.join(self.root, path), encoding="utf-8", errors="replace") as file:
                return file.read()
        except OSError:
            return ""

    def names_in(self, path: str) -> list[str]:
        """Return the sorted names in a folder below the root; empty if the folder is unreadable."""
        try:
            return sorted(os.listdir(os.path.join(self.root, path)))
        except OSError:
            return []

    def architecture(self) -> str:
        """Return the architecture of this Python; x86_64 for an x86-64 build under Rosetta."""
        return os.uname().machine

    def usable_cores(self) -> int:
        """Return the number of cores in this process's affinity mask."""
        if hasattr(os, "sched_getaffinity"):
            return len(os.sched_getaffinity(0))
        return os.cpu_count() or 1

    def torch_version_file(self) -> str:
        """Return the text of torch's version.py without importing torch."""
        from importlib.util import find_spec

        spec = find_spec("torch")
        if spec is None or not spec.submodule_search_locations:
            return ""
        return Source("/").read(os.path.join(spec.submodule_search_locations[0], "version.py"))

    def output_of(self, command: Sequence[str], limit_s: float | None = None) -> str:
        """Return a tool's output; raise OSError if the tool hangs, or fails without any output."""
        import subprocess

        limit_s = limit_s or (120 if command[0] == sys.executable else 30)  # torch's import is slow
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        own: dict[str, Any] = {"start_new_session": True}  # to kill a wrapper's children too
        with collect_signals(*STOP_SIGNALS) as stops:  # until `tool` is set
            tool = subprocess.Popen(command, text=True, errors="replace", **pipes, **own)
        with tool:
            try:
                for number in stops:
                    signal.raise_signal(number)
                output, errors = tool.communicate(timeout=limit_s)
            except BaseException as error:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(tool.pid, signal.SIGKILL)
                if isinstance(error, subprocess.TimeoutExpired):
                    raise OSError(f"timed out after {limit_s} s") from None
                raise
        if tool.returncode and not output.strip():
            last = errors.strip().splitlines() or [f"exit code {tool.returncode}"]
            raise OSError(last[-1])
        return str(output)

    def disk_size(self, path: str) -> int:
        """Return the size in bytes of the file system at `path`; 0 if missing or read-only."""
        with suppress(OSError):
            there = os.statvfs(os.path.join(self.root, path))
            return 0 if there.f_flag & os.ST_RDONLY else there.f_frsize * there.f_blocks
        return 0

    def limit(self, name: str) -> int:
        """Return this process's soft limit RLIMIT_<name>; -1 if unlimited."""
        import resource

        return int(resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[0])


def physical_cores(source: Source) -> int:
    """Return the number of physical cores that Linux lists; 0 if unknown."""
    of_a_thread = r"^(physical id.*)(?:\n.+)*?\n(core id.*)"  # a paragraph without empty lines
    return len({*re.findall(of_a_thread, source.read("proc/cpuinfo"), re.MULTILINE)})


def cpu_quota(source: Source) -> float | None:
    """Return the smallest CPU quota, in cores, of this process's cgroup and its ancestors."""
    quotas = []
    limits = _texts(source, "cpu", "cpu.max", "cpu.cfs_quota_us")
    periods = _texts(source, "cpu", "cpu.max", "cpu.cfs_period_us")
    for limit, period in zip(limits, periods, strict=True):
        words = [*limit.split()[:1], *period.split()[-1:]]
        if len(words) == 2 and all(word.isdecimal() for word in words):
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def memory_facts(source: Source) -> dict[str, int]:
    """Return the sizes in /proc/meminfo in bytes, by names such as MemTotal."""
    lines = re.findall(r"^(\w+):\s+(\d+) kB$", source.read("proc/meminfo"), re.MULTILINE)
    return {name: int(kibibytes) * 1024 for name, kibibytes in lines}


def memory_limit(source: Source) -> int | None:
    """Return the smallest memory limit, in bytes, of this process's cgroup and its ancestors."""
    texts = _texts(source, "memory", "memory.max", "memory.limit_in_bytes")
    limits = [int(text) for text in texts if text.strip().isdecimal()]
    # v1 reports no limit as a huge number
    return min((limit for limit in limits if limit < 2**60), default=None)


def count_oom_kills(root: str = "/") -> int | None:
    """Return how many processes in this cgroup the OOM killer has killed; None if unknown."""
    texts = "\n".join(_texts(Source(root), "memory", "memory.events", "memory.oom_control"))
    return max(map(int, re.findall(r"^oom_kill (\d+)$", texts, re.MULTILINE)), default=None)


def _texts(source: Source, controller: str, of_v2: str, of_v1: str) -> Iterator[str]:
    """Yield the text of a file in each of this process's cgroups, and in each of their ancestors.

    A missing file yields an empty string. In a container, the files may exist only at the mount
    point.
    """
    for line in source.read("proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            mount, name = "sys/fs/cgroup", of_v2
        elif controller in controllers.split(","):
            mount, name = f"sys/fs/cgroup/{controller}", of_v1
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for end in range(len(parts), -1, -1):
            yield source.read("/".join([mount, *parts[:end], name]))
