"""Detection of MPS on Apple silicon, with the reason and a fix if MPS is unavailable."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from headway.devices.kind import numbers
from headway.machine.facts import Machine
from headway.machine.source import Source

OLDEST_MACOS = "14.0"
"""Minimum macOS for MPS in every supported torch version. Source: pytorch pull request 163515."""

SYSCTL = (
    *("kern.osproductversion", "hw.optional.arm64", "sysctl.proc_translated"),
    *("kern.hv_vmm_present", "machdep.cpu.brand_string", "hw.memsize"),
    *("hw.physicalcpu", "hw.logicalcpu"),
)

_REINSTALL = (
    "install an arm64 Python, then reinstall torch. conda: `CONDA_SUBDIR=osx-arm64 conda "
    "create -n arm python`; pyenv: `arch -arm64 pyenv install 3.12`; uv: `uv python install "
    "cpython-3.12-macos-aarch64`"
)


def with_mps(machine: Machine, source: Source) -> Machine:
    answers = query_sysctl(source)
    version = answers.get("kern.osproductversion", "")
    machine = machine._replace(macos=version, gpus_reason="a Mac has no CUDA")
    obstacle, fix = _obstacle(machine, answers)
    chip = answers.get("machdep.cpu.brand_string", "chip unknown")
    reason = obstacle or f"Apple silicon ({chip})"
    return machine._replace(mps=not obstacle, mps_reason=reason, mps_fix=fix)


def query_sysctl(source: Source) -> dict[str, str]:
    """Return sysctl's values for the names in SYSCTL that exist."""
    command = ["/usr/sbin/sysctl", "-i", *SYSCTL]  # -i: skip unknown names
    with suppress(OSError):
        return dict(line.partition(": ")[::2] for line in source.output_of(command).splitlines())
    return {}


def _obstacle(machine: Machine, answers: Mapping[str, str]) -> tuple[str, str]:
    """Return the reason why MPS is unavailable, and the fix; both are empty if MPS is available."""
    if machine.architecture != "arm64":
        if answers.get("sysctl.proc_translated") == "1":
            return "this Python is an Intel build, emulated by Rosetta on this Mac", _REINSTALL
        if answers.get("hw.optional.arm64") == "1":
            return "this Python is an Intel build on Apple silicon", _REINSTALL
        return "this Mac has an Intel CPU", ""
    if machine.macos and numbers(machine.macos) < numbers(OLDEST_MACOS):
        reason = f"macOS {machine.macos} is older than {OLDEST_MACOS}, which torch needs for MPS"
        return reason, f"update macOS to {OLDEST_MACOS} or newer"
    if answers.get("kern.hv_vmm_present") == "1":
        return "torch cannot use the Apple GPU in a virtual machine", ""
    return "", ""
