"""`headway env`: print the facts about this machine, ready to paste into an issue."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence

from headway._version import __version__
from headway.commands.flags import Parser
from headway.commands.tables import print_table
from headway.devices.kind import sm
from headway.machine.detection import detect_machine
from headway.machine.facts import Gpu, HostFacts, Machine, as_data


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        "env",
        "Print the facts about this machine, each with its source. Names and addresses of "
        "machines and people, and variables that may contain secrets, are omitted.",
    )
    parser.flag("--json", help="print one JSON object, for `--machine FILE`")
    parsed = parser.parse_flags(argv)
    machine = detect_machine(os.environ, full=True)
    if parsed.json:
        print(json.dumps(as_data(machine), indent=2))
    else:
        print_table(("fact", "value"), list(_facts(machine)))
    return 0


def _facts(machine: Machine) -> Iterator[tuple[str, str]]:
    device, reason = machine.best_device()
    torch = machine.torch
    yield "headway", __version__
    yield "torch", torch.version if torch else f"none: {machine.torch_reason}"
    yield "device", f"{device} ({reason})"
    yield "cores", f"{machine.cores} ({machine.cores_reason})"
    yield "architecture", f"{machine.architecture}, as reported by this Python"
    yield "gpus", f"{len(machine.gpus)} ({machine.gpus_reason})"
    for index, gpu in enumerate(machine.gpus):
        yield f"gpu {index}", _gpu(gpu)
    if machine.driver is not None:
        yield "driver", machine.driver
    yield "mps", f"{'yes' if machine.mps else 'no'} ({machine.mps_reason})"
    if machine.host is not None:
        yield from _host(machine.host)


def _gpu(gpu: Gpu) -> str:
    parts = [
        gpu.name,
        f"{gpu.memory_bytes / 2**30:.0f} GiB" if gpu.memory_bytes else "memory unknown",
        *(["shared with the CPU"] if gpu.shares_memory else []),
        *([sm(gpu.capability)] if gpu.capability else []),
        f"{gpu.compute_mode} mode",
    ]
    parts += [f"near cores {gpu.local_cpus}"] if gpu.local_cpus else []
    if gpu.use is not None:
        used, percent, pids = gpu.use
        parts += [] if used is None else [f"{used / 2**30:.1f} GiB in use"]
        parts += [] if percent is None else [f"{percent} % busy"]
        parts += [] if pids is None else [f"{len(pids)} processes"]
    if gpu.is_mig:
        parts.append(f"{len(gpu.slices)} MIG slices")
    parts += [f"{fact} unknown: {reason}" for fact, reason in gpu.unknown.items()]
    return ", ".join(parts)


def _host(host: HostFacts) -> Iterator[tuple[str, str]]:
    for name, value in host._asdict().items():
        if name in ("reasons", "variables"):
            continue
        if name.endswith("_bytes") and value is not None and value >= 0:
            text = f"{value / 2**30:.2f} GiB"
        elif isinstance(value, tuple):
            text = ", ".join(value) or "none"
        else:
            text = {None: "none", -1: "unlimited"}.get(value, str(value))
        yield name.removesuffix("_bytes"), f"{text} ({host.reasons[name]})"
    for name, text in sorted(host.variables.items()):
        yield name, repr(text)
