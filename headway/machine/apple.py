"""Apple silicon: whether MPS is available, why not, and how to fix it."""

from __future__ import annotations

from collections.abc import Mapping

from headway.devices.kind import numbers
from headway.machine.facts import Machine
from headway.machine.source import Source

OLDEST_MACOS = (((1, 12), "12.3"), ((2, 5), "13.0"), ((2, 9), "14.0"))
"""Since which torch MPS needs which macOS.

Sources: torch's release notes; pytorch pull requests 133141 (13.0) and 163515 (14.0)."""

OLDEST_CORRECT_TORCH = (1, 13)
"""Older versions of torch give wrong results for some operators on MPS."""

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
    answers = ask_sysctl(source)
    machine = machine._replace(
        macos=answers.get("kern.osproductversion", ""), gpus_reason="a Mac has no CUDA"
    )
    obstacle, fix = find_obstacle(machine, answers)
    if obstacle is not None:
        return machine._replace(mps=False, mps_reason=obstacle, mps_fix=fix)
    chip = answers.get("machdep.cpu.brand_string", "chip unknown")
    return machine._replace(mps=True, mps_reason=f"Apple silicon ({chip})")


def ask_sysctl(source: Source) -> dict[str, str]:
    """Return sysctl's values for the names in SYSCTL, without unknown names."""
    command = ["/usr/sbin/sysctl", "-i", *SYSCTL]  # -i: skip unknown names
    try:
        lines = source.output_of(command).splitlines()
    except OSError:
        return {}
    return dict(line.partition(": ")[::2] for line in lines)


def find_obstacle(machine: Machine, answers: Mapping[str, str]) -> tuple[str | None, str]:
    """Return why MPS is not available, None if it is, and the fix."""
    torch = machine.torch
    if machine.architecture != "arm64":
        if answers.get("sysctl.proc_translated") == "1":
            return "this Python is an Intel build, emulated by Rosetta on this Mac", _REINSTALL
        if answers.get("hw.optional.arm64") == "1":
            return "this Python is an Intel build on Apple silicon", _REINSTALL
        return "this Mac has an Intel CPU", ""
    if torch is not None:
        update = how_to_update_torch(machine.macos)
        if torch.mps is False or not torch.is_at_least(1, 12):
            return f"this torch ({torch.version}) is built without MPS", update
        needed = [macos for since, macos in OLDEST_MACOS if torch.is_at_least(*since)][-1]
        if machine.macos and numbers(machine.macos) < numbers(needed):
            if torch.is_at_least(*OLDEST_CORRECT_TORCH):
                update = f"update macOS to {needed} or newer"
            reason = (
                f"macOS {machine.macos} is older than {needed}, which this torch "
                f"({torch.version}) needs for MPS"
            )
            return reason, update
    if answers.get("kern.hv_vmm_present") == "1":
        return "this is a virtual machine, where torch cannot use the Apple GPU", ""
    return None, ""


def how_to_update_torch(macos: str) -> str:
    """Return how to install the newest torch with MPS, with a macOS update if needed."""
    here = numbers(macos or OLDEST_MACOS[-1][1])
    too_new = [since for since, needed in OLDEST_MACOS if here < numbers(needed)]
    if not too_new:
        return "`pip install -U torch`"
    if len(too_new) == len(OLDEST_MACOS):
        return f"update macOS to {OLDEST_MACOS[-1][1]} or newer, then `pip install -U torch`"
    return f"`pip install -U 'torch<{'.'.join(map(str, too_new[0]))}'`"
