"""`headway doctor`: check this machine, and print how to fix each problem.

`machine_problems` checks a snapshot of any machine; the other checks run on this machine.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from headway.commands.flags import Parser, machine_from_flags
from headway.commands.tables import print_table
from headway.devices.kind import numbers
from headway.devices.table import MPS, kind_of
from headway.errors import HeadwayError
from headway.ipc.paths import installer_of
from headway.launcher.clusters.cluster_settings import cluster_layer
from headway.machine.facts import NEWEST_TORCH, OLDEST_TORCH, HostFacts, Machine, as_data
from headway.machine.gpus import admin_fix, availability_fixes, gpu_fixes, kernel_fixes
from headway.machine.host import without_home
from headway.machine.source import Source
from headway.machine.torch_query import TorchDevices, query_torch
from headway.settings.problems import problems
from headway.settings.resolve import launch_layers, omp_threads, profile_layers, resolve

OK, WARNING, ERROR, SKIPPED = "ok", "warning", "error", "skipped"
"""The statuses of a check."""


class Check(NamedTuple):
    """The result of one check; any one of the remedies fixes the problem."""

    check: str
    status: str
    what: str
    remedies: Sequence[str] = ()

    @property
    def fix(self) -> str:
        """The remedies as one string; empty if there is no problem."""
        return "; or ".join(self.remedies)


LIVE = ("torch runs", "profile")
_UPDATE = "`pip install -U torch`"

MIN_SHM_BYTES = 2**30  # data loader workers pass batches through it; Docker's default is 64 MiB
LAUNCH_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def main(argv: Sequence[str]) -> int:
    """Run `headway doctor`; return 1 if a check failed."""
    parser = Parser("doctor", "Check this machine, and print how to fix each problem.")
    parser.flag("--json", help="print one JSON object: {machine, checks}")
    parser.shared_flags("--machine")
    parsed = parser.parse_flags(argv)
    machine, _ = machine_from_flags(parsed, os.environ, full=True)
    checks = machine_problems(machine)
    install = "pip install"
    if parsed.machine is None:
        checks += _live_checks(machine)
        install = installer_of(sys.executable)  # not the pip that is first on PATH
    else:
        checks += [Check(name, SKIPPED, "not possible for a recorded machine") for name in LIVE]
    found = [
        {
            "check": check.check,
            "status": check.status,
            "what": without_home(check.what, os.environ),
            "fix": check.fix.replace("`pip install", f"`{install}"),
        }
        for check in checks
    ]
    if parsed.json:
        print(json.dumps({"machine": as_data(machine), "checks": found}, indent=2))
    else:
        rows = [
            (row["status"], row["check"], row["what"] + f"\nfix: {row['fix']}" * bool(row["fix"]))
            for row in found
        ]
        print_table(("", "check", "finding"), rows)
    return int(any(check.status == ERROR for check in checks))


def machine_problems(machine: Machine) -> list[Check]:
    """Return the results of all checks, including those that passed."""
    checks = [*_torch(machine), *_device(machine), *_gpus(machine)]
    if machine.host is not None:
        checks += [
            _cores(machine, machine.host),
            *_shared_memory(machine.host),
            _variables(machine.host),
        ]
    return checks


def _torch(machine: Machine) -> Iterator[Check]:
    torch = machine.torch
    if torch is None:
        yield Check("torch", ERROR, machine.torch_reason, ["`pip install torch`"])
    elif numbers(torch.version) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        what = f"torch {torch.version} is older than {oldest}, which Headway requires"
        yield Check("torch", ERROR, what, [_UPDATE])
    else:
        builds = {"CUDA": torch.cuda, "ROCm": torch.hip, "XPU": torch.xpu}
        build = next((f"{name} {text}" for name, text in builds.items() if text), "")
        newest = ".".join(map(str, NEWEST_TORCH))
        what = f"torch {torch.version}" + f", built for {build}" * bool(build)
        if numbers(torch.version) > (*NEWEST_TORCH, 999):
            what += f"; Headway is tested with torch up to {newest}"
        yield Check("torch", OK, what)


def _device(machine: Machine) -> Iterator[Check]:
    device, reason = machine.best_device()
    if (machine.gpus or machine.has_driver) and all(gpu.obstacle for gpu in machine.visible_gpus):
        status = ERROR if machine.has_driver and not machine.is_hidden else WARNING
        yield Check("device", status, reason, gpu_fixes(machine))
    elif machine.mask_error is not None:
        fixes = ["`unset CUDA_VISIBLE_DEVICES`", "correct CUDA_VISIBLE_DEVICES"]
        yield Check("device", WARNING, f"{machine.mask_error}: {machine.describe_gpus()}", fixes)
    elif machine.system == "Darwin" and not machine.mps:
        status = ERROR if machine.mps_fix else WARNING
        fix = machine.mps_fix or "none needed: training runs on the CPU"
        yield Check("device", status, f"MPS is not available: {machine.mps_reason}", [fix])
    elif machine.unused_card:
        yield Check("device", WARNING, machine.unused_card, ["install the driver"])
    else:
        yield Check("device", OK, f"{device}: {reason}")


def _gpus(machine: Machine) -> Iterator[Check]:
    visible = {gpu.slice_of or gpu.uuid for gpu in machine.visible_gpus}
    is_hidden = machine.mismatch is None and machine.mask is not None
    if machine.driver_fault and machine.gpus:
        tool = kind_of(machine.gpu_kind).tool
        yield Check("driver", WARNING, f"{tool} reports: {machine.driver_fault}", [f"run `{tool}`"])
    if kernels := machine.missing_kernels(machine.visible_gpus):
        yield Check("kernels", ERROR, kernels, kernel_fixes(machine))
    for index, gpu in enumerate(machine.gpus):
        if is_hidden and gpu.uuid not in visible:  # not used by training on this machine
            continue
        # by UUID: indices of --devices are relative to CUDA_VISIBLE_DEVICES, nvidia-smi's are not
        others = [part.uuid for other in machine.gpus if other is not gpu for part in other.parts()]
        without = f"`--devices {','.join(others)}`" if others else "`--device cpu`"
        name = f"GPU {index} ({gpu.name})"
        if gpu.ecc_errors:
            what = f"{name} has {gpu.ecc_errors} uncorrected ECC memory errors"
            replace = f"if they recur, replace the GPU and pass {without} until then"
            yield Check(
                "ECC", ERROR, what, [admin_fix(f"nvidia-smi -i {index} --gpu-reset"), replace]
            )
        if gpu.obstacle is not None:
            remedies = [*(availability_fixes(gpu) if gpu.is_disabled else []), without]
            yield Check("compute mode", WARNING, f"{name}: {gpu.obstacle}", remedies)
    if machine.gpus and not any(gpu.ecc_errors or gpu.obstacle for gpu in machine.gpus):
        yield Check("GPUs", OK, f"{len(machine.gpus)}, driver {machine.driver or 'unknown'}")


def _cores(machine: Machine, host: HostFacts) -> Check:
    text = host.variables.get("OMP_NUM_THREADS")
    threads = omp_threads(host.variables)
    export = f"`export OMP_NUM_THREADS={machine.cores}`"
    remedies = [export, "`unset OMP_NUM_THREADS`"]
    what = ""
    if text is not None and threads is None:
        what = f"OMP_NUM_THREADS={text!r} is not a number of threads and is ignored"
    elif threads is not None and threads > machine.cores:
        what = (
            f"OMP_NUM_THREADS={text} is more than the {machine.cores_reason}: the CPU is "
            "oversubscribed"
        )
    elif host.cpu_quota is not None and host.cpu_quota < host.affinity and threads is None:
        what = f"{machine.cores_reason}, but torch starts {host.affinity} threads by default"
        remedies = ["use `headway launch`, which respects the quota", export]
    if what:
        return Check("threads", WARNING, what, remedies)
    return Check("threads", OK, machine.cores_reason)


def _shared_memory(host: HostFacts) -> Iterator[Check]:
    if host.shm_bytes is None:
        return
    if host.shm_bytes >= MIN_SHM_BYTES:
        yield Check("/dev/shm", OK, f"{host.shm_bytes / 2**30:.1f} GiB")
        return
    what = "missing or read-only, but data loader workers pass batches through it"
    if host.shm_bytes:
        what = f"{host.shm_bytes // 2**20} MiB, too small for the batches of data loader workers"
    mount = "in Kubernetes, mount an emptyDir with medium Memory at /dev/shm"
    yield Check("/dev/shm", WARNING, what, ["`docker run --shm-size=8g`", mount])


def _variables(host: HostFacts) -> Check:
    is_rank = "RANK" in host.variables
    stale = [name for name in LAUNCH_VARIABLES if is_rank and name in host.variables]
    if not stale:
        return Check(
            "variables", OK, "affecting training: " + (", ".join(sorted(host.variables)) or "none")
        )
    what = (
        f"{', '.join(stale)}: left over from another launch; a script run with plain python would "
        "wait for that launch's ranks"
    )
    return Check("variables", WARNING, what, [f"`unset {' '.join(stale)}`"])


def _live_checks(machine: Machine) -> Iterator[Check]:
    yield _ask_torch(machine)
    try:
        layers = launch_layers(profile_layers(), os.environ)
        settings = resolve(layers, machine, cluster=cluster_layer(os.environ, layers))
        found = problems(settings, machine)
    except HeadwayError as error:
        found = [*error.problems]
    for problem in found:
        # includes where each setting was set
        yield Check("profile", ERROR, f"{problem.title} ({problem.where})", [problem.fix])
    if not found:
        yield Check("profile", OK, "profiles and HEADWAY_* variables are valid on this machine")


def _ask_torch(machine: Machine) -> Check:
    """Import torch in a child process, and compare the devices it finds with those detected."""
    try:
        os.getcwd()
    except OSError as error:
        what = f"the working directory is not available: {error.strerror}"
        return Check("torch runs", ERROR, what, ["`cd` to an existing directory"])
    device = MPS.name if machine.system == "Darwin" else machine.gpu_kind
    try:
        answer = query_torch(Source(), device, "try")
    except FileNotFoundError as error:
        remedies = ["reinstall Python"]
        what = f"cannot start a child Python process: {error.strerror}"
    except OSError as error:
        what = f"cannot import torch in a child process: {error.strerror or error}"
        remedies = ["`pip install --force-reinstall torch`", "`ulimit -n 65536; ulimit -u 65536`"]
    else:
        what, remedies = _compared(answer, machine)
        if not what:
            what = f"torch {answer.version} was imported by {sys.executable}"
            return Check("torch runs", OK, what)
    return Check("torch runs", ERROR, what, remedies)


def _compared(answer: TorchDevices, machine: Machine) -> tuple[str, list[str]]:
    """Return a description of how torch's devices differ from the detected ones, and remedies."""
    visible, count = machine.visible_gpus, len(answer.gpus)
    expected = 1 if any(gpu.slice_of for gpu in visible) else len(visible)
    if count and answer.error:
        what = f"torch sees {count} GPUs, but the first fails: {answer.error}"
        tool = kind_of(machine.gpu_kind).tool
        return what, [f"run `{tool}` to see its processes and compute mode"]
    if count < expected:
        what = f"torch sees {count} of {expected} GPUs"
        return what, ["reboot", "reinstall the driver"]
    if machine.mps and not count:
        what = f"torch cannot use MPS on this Mac: {answer.error}"
        return what, [_UPDATE]
    return "", []
