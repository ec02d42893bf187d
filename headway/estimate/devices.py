"""The devices that a script is to be trained on: how many, of which kind, with how much memory."""

from __future__ import annotations

import re
from typing import NamedTuple

from headway.errors import ConfigError
from headway.machine.facts import Machine

_UNITS = {"GB": 10**9, "GIB": 2**30}

_FORM = re.compile(
    r"(?:(?:(?P<machines>\d+)x)?(?P<count>\d+)x)?(?P<name>[a-z][a-z0-9]*)?"
    r"-?(?P<memory>\d+(?:\.\d+)?(?:GB|GiB))?",
    re.IGNORECASE,
)


class Devices(NamedTuple):
    """Equal devices on one machine or more."""

    kind: str  # cuda or cpu: those whose memory is estimated
    name: str  # as it is printed, and for a GPU what `torch.cuda.get_device_name()` gives
    memory_bytes: int  # of each; for CPUs of each machine
    per_machine: int = 1  # as many ranks
    machines: int = 1

    @property
    def world_size(self) -> int:
        return self.per_machine * self.machines

    @property
    def bytes_per_rank(self) -> int:
        """A device's memory, or a rank's share of its machine's."""
        return self.memory_bytes // (self.per_machine if self.kind == "cpu" else 1)

    def __str__(self) -> str:
        machines = f"{self.machines} x " if self.machines > 1 else ""
        size = self.memory_bytes / 2**30
        return f"{machines}{self.per_machine} x {self.name} ({size:.1f} GiB)"


def parse_devices(text: str, this_machine: Machine) -> Devices:
    """Return the devices that `--devices` means: 8xH100-80GB, 2x8xA100-40GB, 24GB, 4xcpu."""
    found = _FORM.fullmatch(text.strip().replace(" ", ""))
    if found is None or not (found["name"] or found["memory"]):
        raise ConfigError(
            f"devices are {text!r}, which is not of the form [MACHINESx][COUNTx]NAME[-MEMORY]",
            where="--devices",
            fix="pass such as --devices 8xH100-80GB, 2x8xA100-40GB, 24GB or 4xcpu",
        )
    count, machines = int(found["count"] or 1), int(found["machines"] or 1)
    if not count * machines:
        raise ConfigError(
            f"devices are {text!r}, which is none", where="--devices", fix="pass a count above 0"
        )
    memory = _bytes(found["memory"]) if found["memory"] else None
    name = found["name"] or "GPU"
    if name.lower() == "cpu":
        return Devices("cpu", "CPU", memory or _host_bytes(this_machine), count, machines)
    if memory is None:
        raise ConfigError(
            f"the memory of {name!r} is not given",
            where="--devices",
            fix=f"write it after the name: {name}-40GB",
        )
    return Devices("cuda", f"{name}-{found['memory']}", memory, count, machines)


def devices_of(machine: Machine) -> Devices:
    """Return the devices of a machine: its CUDA GPUs, the smallest memory of them, or its CPU."""
    if gpus := machine.gpus_of("cuda"):
        smallest = min(gpus, key=lambda gpu: gpu.memory_bytes or 0)
        if smallest.memory_bytes:
            return Devices("cuda", smallest.name, smallest.memory_bytes, len(gpus))
        why = smallest.unknown.get("memory_bytes", "not reported")
        what = f"the memory of {smallest.name} is not known: {why}"
        raise ConfigError(what, where="the machine", fix=f"pass --devices {len(gpus)}x24GB")
    return Devices("cpu", "CPU", _host_bytes(machine))


def _bytes(text: str) -> int:
    number = text.rstrip("GBgbiI")
    return int(float(number) * _UNITS[text[len(number) :].upper()])


def _host_bytes(machine: Machine) -> int:
    host = machine.host
    limits = (host.memory_bytes, host.memory_limit_bytes) if host else ()
    known = [one for one in limits if one]
    if not known:
        raise ConfigError(
            "the memory of this machine is not known",
            where="the machine's snapshot",
            fix="say it with the devices: --devices cpu-64GB",
        )
    return min(known)
