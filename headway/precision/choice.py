"""Which precision a run uses, and whether its device has it."""

from __future__ import annotations

from enum import Enum

import torch

from headway.errors import MachineError, UsageError
from headway.machine.apple import why_no_precision
from headway.machine.detection import detect_machine
from headway.precision.bf16 import Bf16
from headway.precision.fp16 import Fp16
from headway.precision.precision import DEFAULTS, Precision, PrecisionSettings


class PrecisionType(str, Enum):
    """The choices of `mixed_precision`; compares equal to its value."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"

    def __str__(self) -> str:
        return self.value

    @classmethod
    def list(cls) -> list[str]:
        """Return the values of all members."""
        return [one.value for one in cls]


PRECISIONS = {"no": Precision, "bf16": Bf16, "fp16": Fp16}


def precision_for(
    name: str,
    device: torch.device,
    settings: PrecisionSettings = DEFAULTS,
    *,
    where: str,
) -> Precision:
    """Return the precision called `name` (no, fp16, bf16) for `device`.

    Args:
        settings: of autocast and the loss scale, for the precisions that have them.
        where: where the name came from, for messages.

    Raises:
        UsageError: fp16 on a CPU.
        MachineError: a precision that this GPU, or torch's MPS, does not have.
    """
    if name == "fp16" and device.type == "cpu":
        raise UsageError(
            "mixed_precision is 'fp16', but the device is the CPU, where fp16 gains nothing",
            where=where,
            fix="use bf16, which CPUs can compute with, or no",
        )
    if name == "bf16" and device.type == "cuda":  # pragma: needs a GPU
        _require_bf16(device, where)
    if device.type == "mps":
        _require_on_mps(name, where)
    return PRECISIONS[name](device, settings)


def _require_bf16(device: torch.device, where: str) -> None:  # pragma: needs a GPU
    major, minor = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and major < 8:
        raise MachineError(
            f"mixed_precision is 'bf16', but this GPU ({torch.cuda.get_device_name(device)},"
            f" sm_{major}{minor}) has no bf16",
            where=where,
            fix="use fp16, or no",
        )


def _require_on_mps(name: str, where: str) -> None:
    reason = why_no_precision(name, detect_machine())
    if reason is not None:
        raise MachineError(
            f"mixed_precision is {name!r}, but {reason}", where=where, fix="use no, or update"
        )
