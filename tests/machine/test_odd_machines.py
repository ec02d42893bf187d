"""Machines on which tools and files are odd in any way: no GPU that torch can use is left out."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from random import Random
from typing import NamedTuple

from headway.errors import MachineError
from headway.machine.detection import detect_machine
from headway.machine.facts import Machine
from headway.machine.gpus import FIELDS
from tests.launcher.plan.planning import plan
from tests.machines.recorded import (
    RECORDINGS,
    Recorded,
    Recording,
    h100s,
    intel,
    nvidia_smi,
    server,
    torch,
    with_torch,
)

ODD = ["[N/A]", "[Unknown Error]", "[Insufficient Permissions]", "", "ERR!", "-1", "9" * 30, "é"]
WARNING = "WARNING: infoROM is corrupted at gpu 0000:02:00.0"
LOST = "Unable to determine the device handle for GPU 0000:3B:00.0: GPU is lost"
FAILURES = [FileNotFoundError(2, "absent"), OSError("no answer"), PermissionError(13, "denied")]
MASKS = [None] * 6 + ["", "-1", "0", "0,1", "1gpu", "0;1", "99", "1,1", "GPU-0f", "all"]


class Odd(NamedTuple):
    """A machine whose tools and files are odd, and what torch finds on it."""

    recording: Recording
    usable: int  # of GPUs, by torch
    failures: Mapping[str, OSError] = {}  # by the tool
    absent: str = "none"  # a field that nvidia-smi does not have


class Tools(Recorded):
    def __init__(self, odd: Odd) -> None:
        super().__init__(odd.recording)
        self.odd = odd

    def output_of(self, command: Sequence[str], limit_s: float | None = None) -> str:
        tool = "python" if command[0] == sys.executable else command[0]
        if tool in self.odd.failures:
            raise self.odd.failures[tool]
        if self.odd.absent in command[1]:
            return f'Field "{self.odd.absent}" is not a valid field to query.\n'
        return super().output_of(command)


def nvidia(random: Random) -> Odd:
    count = usable = random.choice((1, 2, 8))
    cards = h100s(count)
    machine, tools = server(cards), nvidia_smi("580.82.07", cards)
    absent = random.choice(FIELDS[2:]) if random.random() < 0.15 else "none"
    rows = []
    for row in tools["nvidia-smi --query-gpu"].splitlines():
        cells = dict(zip(FIELDS, row.split(", "), strict=True))
        odd = random.sample(FIELDS, random.choice((0, 0, 1, 2, 11)))
        cells |= {field: random.choice(ODD) for field in odd}
        rows.append(", ".join(cell for field, cell in cells.items() if field != absent))
    match random.randrange(8):
        case 0:
            rows[random.randrange(count)] = LOST
            usable -= 1
        case 1:
            rows.insert(random.choice((0, count)), WARNING)
        case 2:
            rows = ["Failed to initialize NVML: Driver/library version mismatch"]
        case 3:
            del rows[random.randrange(count)]
    bus = [card["bus"] for card in cards] * random.randrange(2)
    files = {**machine.files, **{f"proc/driver/nvidia/gpus/{place}/x": "" for place in bus}}
    tools["nvidia-smi --query-gpu"] = "\n".join(rows)
    tools["nvidia-smi --query-compute-apps"] = random.choice(("", WARNING, "GPU-1, x, y"))
    tools["nvidia-smi -L"] = random.choice((tools["nvidia-smi -L"], "", LOST))
    failures = {"nvidia-smi": random.choice(FAILURES)} if random.random() < 0.15 else {}
    return Odd(machine._replace(files=files, tools=tools), usable, failures, absent)


def amd(random: Random) -> Odd:
    machine = RECORDINGS["amd_2"]
    files = dict(machine.files)
    usable = 2
    for name, text in machine.files.items():
        if "/kfd/" in name and not name.endswith("nodes/0/properties") and random.random() < 0.3:
            odd = random.choice(("", "[N/A]", str(2**63), "x y z"))
            line = random.choice(text.splitlines())
            files[name] = text.replace(line, f"{line.split()[0]} {odd}")
    if random.random() < 0.2:
        files["sys/class/kfd/kfd/topology/nodes/1/properties"] = ""  # no permission
        usable = 1
    return Odd(machine._replace(files=files), usable)


def xpu(random: Random) -> Odd:
    machine = RECORDINGS["intel_4"]
    files = dict(intel("0000:18:00.0", "0000:4d:00.0", "0000:9a:00.0"))
    for node in range(128, 131):
        name = f"sys/class/drm/renderD{node}/device/uevent"
        if random.random() < 0.4:
            lines = files[name].splitlines()
            del lines[random.randrange(len(lines))]
            files |= {name: "\n".join(lines), name.replace("uevent", "vendor"): "0x8086\n"}
    return Odd(machine._replace(files=files), 3)


def odd_machine(random: Random) -> Odd:
    maker = random.choice((nvidia, nvidia, nvidia, nvidia, amd, xpu))
    odd = maker(random)
    recording, usable, failures, _ = odd
    mask = random.choice(MASKS)
    name = "HIP_VISIBLE_DEVICES" if maker is amd else "CUDA_VISIBLE_DEVICES"
    if mask is not None and maker in (amd, nvidia):
        recording = recording._replace(environ={name: mask})
        shown = {"0": 1, "1gpu": usable > 1, "0;1": 1, "0,1": min(usable, 2), "GPU-0f": 1}
        usable = min(usable, int(shown.get(mask, 0)))
    match random.randrange(14):
        case 0:
            usable = 0  # a driver that does not fit
        case 1:
            failures = {**failures, "python": random.choice(FAILURES)}
        case 2 if maker in (amd, nvidia):
            recording, usable = recording._replace(torch=torch("2.13.0+cpu")), 0
    found = [{"name": "GPU", "uuid": f"GPU-{index}"} for index in range(usable)]
    error = "" if usable else "CUDA unknown error"
    recording = with_torch(recording, *found, error=error)
    return odd._replace(recording=recording, usable=usable, failures=failures)


def outcome(machine: Machine, environ: Mapping[str, str]) -> str:
    try:
        launch = plan(machine, environ)
    except MachineError:
        return "refused"
    if launch.settings.device == "cpu":
        return "CPU, and why" if launch.notes else "CPU, silently"
    return "GPUs"


def test_of_500_odd_machines_none_trains_on_the_cpu_silently() -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(500):
        odd = odd_machine(Random(seed))
        machine = detect_machine(odd.recording.environ, Tools(odd), full=bool(seed % 2))
        result = outcome(machine, odd.recording.environ)
        outcomes[result] += 1
        assert result != "CPU, silently", seed
        if odd.usable and "python" not in odd.failures:
            assert result == "GPUs", (seed, machine.no_gpu_reason)
        assert odd.absent not in machine.driver_fault  # it is asked for the others
        if machine.gpus_reason == "found by nvidia-smi":
            facts = ("uuid", "memory_bytes", "capability")
            assert all(getattr(g, fact) or g.unknown[fact] for g in machine.gpus for fact in facts)
    assert outcomes["GPUs"] >= 300, outcomes
