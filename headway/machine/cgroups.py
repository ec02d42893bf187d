"""CPU and memory limits of this process's cgroup, and its OOM kills; cgroup v1 and v2.

Sources: the kernel's cgroup-v2.rst; sched-bwc.rst and cgroup-v1/memory.rst.
"""

from __future__ import annotations

from collections.abc import Iterator

from headway.machine.source import Source


def cpu_quota(source: Source) -> float | None:
    """Return the smallest CPU quota, in cores, of this process's cgroup and its ancestors."""
    quotas = []
    for version, folder in _folders(source, "cpu"):
        if version == 2:
            limit, _, period = source.read(f"{folder}/cpu.max").strip().partition(" ")
        else:
            limit = source.read(f"{folder}/cpu.cfs_quota_us").strip()
            period = source.read(f"{folder}/cpu.cfs_period_us").strip()
        if limit.isdecimal() and period.isdecimal():
            quotas.append(int(limit) / int(period))
    return min(quotas, default=None)


def memory_limit(source: Source) -> int | None:
    """Return the smallest memory limit, in bytes, of this process's cgroup and its ancestors."""
    limits = []
    for version, folder in _folders(source, "memory"):
        name = "memory.max" if version == 2 else "memory.limit_in_bytes"
        limit = source.read(f"{folder}/{name}").strip()
        if limit.isdecimal() and int(limit) < 2**60:  # v1 writes "no limit" as a huge number
            limits.append(int(limit))
    return min(limits, default=None)


def count_memory_kills(root: str = "/") -> int:
    """Return how many processes of this process's cgroup the kernel's OOM killer has killed."""
    source = Source(root)
    counts = [0]
    for version, folder in _folders(source, "memory"):
        name = "memory.events" if version == 2 else "memory.oom_control"
        words = source.read(f"{folder}/{name}").split()
        if "oom_kill" in words[:-1]:
            counts.append(int(words[words.index("oom_kill") + 1]))
    return max(counts)


def _folders(source: Source, controller: str) -> Iterator[tuple[int, str]]:
    """Yield (cgroup version, folder) for this process's cgroups and their ancestors.

    In a container only the mount point exists.
    """
    for line in source.read("proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            version, mount = 2, "sys/fs/cgroup"
        elif controller in controllers.split(","):
            version, mount = 1, f"sys/fs/cgroup/{controller}"
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for end in range(len(parts), -1, -1):
            yield version, "/".join([mount, *parts[:end]])
