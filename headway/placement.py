"""Selects the GPU of this process for `Accelerator(devices=...)`."""

from __future__ import annotations

from collections.abc import Sequence

from headway.contract.run import Ranks
from headway.errors import MachineError, UsageError
from headway.machine.detection import detect_machine
from headway.machine.devices import ALL, DeviceSpec, parse_devices

Devices = int | str | Sequence[int | str]

CALL = "the script's Accelerator(...)"


def gpu_named_by(devices: Devices, device: str, ranks: Ranks | None) -> int | None:
    """Return the index of the GPU that `devices` selects, or None if it leaves it open.

    Does not claim an idle GPU; only the launcher claims GPUs.

    Args:
        devices: as the setting of the same name; a number is a count.
        device: auto, cpu, cuda, gpu or mps.
        ranks: those of this process, if a launcher started it.

    Raises:
        UsageError: it selects no GPU, contradicts the launcher, or selects several GPUs.
        MachineError: the GPU does not exist, or cannot be used.
    """
    spec = _spec(devices)
    if spec == ALL:
        return None
    if ranks is not None:
        if spec.size not in (None, ranks.local_world_size):
            raise UsageError(
                f"Accelerator(devices={devices!r}) means {spec.reading()}, but the launcher "
                f"started {ranks.local_world_size} process(es) on this machine",
                where=CALL,
                fix=f"remove the argument, and pass `--devices {spec}` to headway launch",
            )
        return None
    if device in ("cpu", "mps"):
        if spec.size == 1 and spec.first == 1:
            return None
        raise UsageError(
            f"Accelerator(devices={devices!r}) selects GPUs, but device is {device!r}",
            where=CALL,
            fix="remove devices; for several CPU ranks: `headway launch --cpu --num-processes N`",
        )
    visible = detect_machine(full=spec.idle is not None).visible_gpus
    selection = spec.select(visible)
    if (spec.size or len(selection.indices)) > 1:
        raise UsageError(
            f"Accelerator(devices={devices!r}) means {spec.reading()}, but this is one process",
            where=CALL,
            fix=f"start the script with `headway launch --devices {spec} script.py`",
        )
    if selection.problems or not selection.indices:
        raise MachineError(
            f"Accelerator(devices={devices!r}) means {spec.reading()}, but "
            f"{'; '.join(selection.problems) or 'no GPU can be used'}",
            where=CALL,
            fix="select a GPU that exists; `headway env` lists them",
        )
    return selection.indices[0]


def _spec(devices: object) -> DeviceSpec:
    items = list(devices) if isinstance(devices, (list, tuple)) else [devices]
    try:
        if any(isinstance(one, bool) or not isinstance(one, (int, str)) for one in items):
            raise ValueError("which is not a count, a list of indices or a string")
        texts = [str(one) for one in items]
        return parse_devices(texts if isinstance(devices, (list, tuple)) else texts[0])
    except ValueError as error:
        raise UsageError(
            f"devices is {devices!r}, {error}",
            where=CALL,
            fix="pass a count (1), a list ([0]) or a string ('0,', 'idle:1')",
        ) from None
