"""Which precision a run uses, and whether its device has it."""

from __future__ import annotations

from enum import Enum

import torch

from headway.devices.table import kind_of
from headway.errors import MachineError, UsageError
from headway.machine.detection import detect_machine
from headway.precision.precision import DEFAULTS, Bf16, Fp16, Precision, PrecisionSettings


class PrecisionType(str, Enum):
    """The choices of `mixed_precision`; compares equal to its value.

    Examples:
        >>> from headway.utils import PrecisionType
        >>> PrecisionType.BF16 == "bf16", PrecisionType.list()
        (True, ['no', 'fp16', 'bf16'])
    """

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
    """Return the precision called `name` (no, fp16, bf16) for `device`, if that has it.

    `where` the name came from is for messages.
    """
    kind = kind_of(device.type)
    if name in kind.lacking:
        raise UsageError(
            f"mixed_precision is {name!r}, but the device is the CPU, where {name} gains nothing",
            where=where,
            fix="use bf16, which CPUs can compute with, or no",
        )
    lack = kind.lack_of(device, name, detect_machine)
    if lack is not None:
        raise MachineError(
            f"mixed_precision is {name!r}, but {lack.reason}",
            where=where,
            fix=f"use {lack.instead}, or {lack.advice or 'no'}",
        )
    return PRECISIONS[name](device, settings)
