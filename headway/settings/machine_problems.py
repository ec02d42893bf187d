"""Checks of a machine, from its snapshot alone; each problem has a fix."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import NamedTuple

from headway.errors import Remedy, advice, described, run
from headway.machine.apple import OLDEST_CORRECT_TORCH, how_to_update_torch
from headway.machine.facts import Host, Machine
from headway.machine.fixes import how_to_free, how_to_use_gpus, of_machine
from headway.settings.resolve import threads_given_by

MIN_SHM_BYTES = 2**30  # data loader workers pass batches through it; Docker's default is 64 MiB
MIN_OPEN_FILES = 4096  # workers and the tensors that they share need descriptors
MIN_PROCESSES = 1024
TEMPORARY_FIX = "`export TMPDIR=FOLDER`, with one that you may write to"

SLOW_VARIABLES = {
    "CUDA_LAUNCH_BLOCKING": "kernel launches are synchronous",
    "NCCL_P2P_DISABLE": "GPUs communicate through host memory",
    "NCCL_SHM_DISABLE": "ranks on this machine communicate over the network",
    "NCCL_IB_DISABLE": "InfiniBand is not used",
}
RENAMED_VARIABLES = {
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
}
LAUNCH_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Severity(str, Enum):
    """The status of a check; the values are part of `headway doctor --json`."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"
    SKIPPED = "skipped"


OK, WARNING, ERROR, SKIPPED = Severity


class Check(NamedTuple):
    """The result of one check; each of the remedies by itself solves the problem it found."""

    check: str
    status: Severity
    what: str
    remedies: Sequence[Remedy] = ()

    @property
    def fix(self) -> str:
        """The remedies in words; empty if there is no problem."""
        return described(self.remedies)

    def as_data(self) -> dict[str, str]:
        """Return the check for programs."""
        return {
            "check": self.check,
            "status": self.status.value,
            "what": self.what,
            "fix": self.fix,
        }


def machine_problems(machine: Machine) -> list[Check]:
    """Return the results of all checks, including those that passed."""
    checks = [*_torch(machine), *_device(machine), *_gpus(machine)]
    if machine.host is not None:
        checks += [
            *_cores(machine, machine.host),
            *_shared_memory(machine.host),
            *_limits(machine.host),
            *_variables(machine, machine.host),
        ]
    return checks


def _torch(machine: Machine) -> Iterator[Check]:
    torch = machine.torch
    if torch is None:
        yield Check("torch", ERROR, machine.torch_reason, [run("pip install torch")])
    elif machine.mps and not torch.is_at_least(
        *OLDEST_CORRECT_TORCH
    ):  # without MPS, _device has the fix
        yield Check(
            "torch",
            WARNING,
            f"torch {torch.version}: MPS gives wrong results with versions before "
            f"{'.'.join(map(str, OLDEST_CORRECT_TORCH))}",
            [how_to_update_torch(machine.macos)],
        )
    else:
        builds = {"CUDA": torch.cuda, "ROCm": torch.hip, "XPU": torch.xpu}
        build = next((f"{name} {text}" for name, text in builds.items() if text), "")
        yield Check("torch", OK, f"torch {torch.version}" + (f", built for {build}" * bool(build)))


def _device(machine: Machine) -> Iterator[Check]:
    device, reason = machine.best_device()
    if machine.gpus and not machine.visible_gpus:
        status = WARNING if machine.torch_obstacle is None else ERROR
        yield Check("device", status, machine.why_no_gpu, how_to_use_gpus(machine))
    elif machine.mask_fault is not None:
        yield Check(
            "device",
            WARNING,
            f"{machine.mask_fault}: {machine.describe_gpus()}",
            [run("unset CUDA_VISIBLE_DEVICES"), advice("correct CUDA_VISIBLE_DEVICES")],
        )
    elif machine.system == "Darwin" and not machine.mps:
        is_broken = bool(machine.mps_fix) and not machine.mps_is_disabled
        status = ERROR if is_broken else WARNING
        fix = advice(machine.mps_fix or "none needed: training runs on the CPU")
        yield Check("device", status, f"MPS is not available: {machine.mps_reason}", [fix])
    elif machine.driver_is_silent:
        yield Check("device", ERROR, machine.gpus_reason, how_to_use_gpus(machine))
    else:
        yield Check("device", OK, f"{device}: {reason}")


def _gpus(machine: Machine) -> Iterator[Check]:
    visible = {gpu.slice_of or gpu.uuid for gpu in machine.visible_gpus}
    is_hidden = machine.torch_obstacle is None and machine.mask is not None
    for index, gpu in enumerate(machine.gpus):
        if is_hidden and gpu.uuid not in visible:  # not used by training on this machine
            continue
        # by UUID: indices of --devices are relative to CUDA_VISIBLE_DEVICES, nvidia-smi's are not
        without = advice(f"`--devices {','.join('^' + part.uuid for part in gpu.parts())}`")
        if gpu.ecc_errors:
            yield Check(
                "ECC",
                ERROR,
                f"GPU {index} ({gpu.name}) has {gpu.ecc_errors} uncorrected ECC memory errors",
                [
                    of_machine(f"nvidia-smi -i {index} --gpu-reset"),
                    advice(f"if they recur, replace the GPU, and until then pass {without[0]}"),
                ],
            )
        if gpu.obstacle is not None:
            yield Check(
                "compute mode",
                WARNING,
                f"GPU {index} ({gpu.name}): {gpu.obstacle}",
                [*(how_to_free(gpu) if gpu.is_disabled else []), without],
            )
    if machine.gpus and not any(gpu.ecc_errors or gpu.obstacle for gpu in machine.gpus):
        yield Check("GPUs", OK, f"{len(machine.gpus)}, driver {machine.driver or 'unknown'}")


def _cores(machine: Machine, host: Host) -> Iterator[Check]:
    text = host.variables.get("OMP_NUM_THREADS")
    threads = threads_given_by(host.variables)
    export = run(f"export OMP_NUM_THREADS={machine.cores}")
    fix = [export, run("unset OMP_NUM_THREADS")]
    if text is not None and threads is None:
        what = f"OMP_NUM_THREADS={text!r} is not a number of threads, and is ignored"
        yield Check("threads", WARNING, what, fix)
    elif threads is not None and threads > machine.cores:
        yield Check(
            "threads",
            WARNING,
            f"OMP_NUM_THREADS={text}, more than the {machine.cores_reason}: the CPU is "
            "oversubscribed",
            fix,
        )
    elif host.cpu_quota is not None and host.cpu_quota < host.affinity and threads is None:
        yield Check(
            "threads",
            WARNING,
            f"{machine.cores_reason}, but torch by default starts {host.affinity} threads",
            [advice("nothing under `headway launch`, which respects the quota"), export],
        )
    else:
        yield Check("threads", OK, machine.cores_reason)


def _shared_memory(host: Host) -> Iterator[Check]:
    if host.shm_bytes is not None and host.shm_bytes < MIN_SHM_BYTES:
        yield Check(
            "/dev/shm",
            WARNING,
            f"{host.shm_bytes // 2**20} MiB, too small for the batches of data loader workers",
            [
                run("docker run --shm-size=8g"),
                advice("in Kubernetes mount an emptyDir of medium Memory at /dev/shm"),
            ],
        )
    elif host.shm_bytes is not None:
        yield Check("/dev/shm", OK, f"{host.shm_bytes / 2**30:.1f} GiB")


def _limits(host: Host) -> Iterator[Check]:
    low = []
    for name, limit, least, flag in (
        ("open files", host.open_files, MIN_OPEN_FILES, "-n 65536"),
        ("processes", host.processes, MIN_PROCESSES, "-u 65536"),
    ):
        if limit is not None and 0 <= limit < least:
            low.append((f"{limit} {name}", f"ulimit {flag}"))
    if host.infiniband and host.locked_bytes is not None and host.locked_bytes >= 0:
        low.append((f"{host.locked_bytes // 1024} KiB of locked memory", "ulimit -l unlimited"))
    for what, command in low:
        yield Check("limits", WARNING, f"the limit is only {what}", [run(command)])
    if not low:
        yield Check("limits", OK, "open files, processes, locked memory")


def _variables(machine: Machine, host: Host) -> Iterator[Check]:
    found = [*_stale(host), *_wrong_interfaces(host)]
    for name, effect in SLOW_VARIABLES.items():
        if host.variables.get(name, "0") not in ("", "0"):
            what = f"{name}={host.variables[name]}: {effect}"
            found.append((WARNING, what, run(f"unset {name}")))
    for old, new in RENAMED_VARIABLES.items():
        if old in host.variables:
            command = run(f"export {new}={shlex.quote(host.variables[old])}; unset {old}")
            found.append((WARNING, f"{old} is no longer read by torch", command))
    for status, what, remedy in found:
        yield Check("variables", status, what, [remedy])
    if not found:
        yield Check("variables", OK, f"{len(host.variables)} that affect training")


def _stale(host: Host) -> Iterator[tuple[Severity, str, Remedy]]:
    stale = [name for name in LAUNCH_VARIABLES if name in host.variables]
    if stale:
        yield (
            WARNING,
            f"{', '.join(stale)}: left over from another launch; plain python would "
            "wait for its ranks",
            run(f"unset {' '.join(stale)}"),
        )


def _wrong_interfaces(host: Host) -> Iterator[tuple[Severity, str, Remedy]]:
    """Check names of network interfaces; NCCL takes prefixes, "=" exact names, "^" exclusions."""
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        text = host.variables.get(variable, "")
        if not text or text.startswith("^") or not host.interfaces:
            continue
        is_exact = variable.startswith("GLOO") or text.startswith("=")
        names = text.removeprefix("=").split(",")
        there = [
            one
            for one in host.interfaces
            if one in names or (not is_exact and one.startswith(tuple(names)))
        ]
        if not there:
            yield (
                ERROR,
                f"{variable}={text}: no such network interface; there are "
                f"{', '.join(host.interfaces)}",
                run(f"unset {variable}"),
            )
