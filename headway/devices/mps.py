"""The GPU of an Apple chip, by MPS."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from headway.devices.kind import DeviceKind, Lack, numbers

if TYPE_CHECKING:
    import torch

    from headway.contract.choices import NumberFormat
    from headway.machine.facts import Gpu, Machine

OLDEST = {name: needed for name, *needed in (("fp16", (2, 5), ()), ("bf16", (2, 6), (14,)))}
"""The first torch with autocast to a precision on MPS, and the first macOS with it in Metal.

Source: torch's release notes; bf16 is in Metal since macOS 14."""


class Mps(DeviceKind):
    """One GPU, for one process: torch has no collectives for it."""

    name = "mps"
    label = "MPS"
    maker = "Apple"
    most_ranks = 1
    lacking = ()
    has_fp64 = False
    can_pin = False  # torch warns in every epoch
    variables: Mapping[str, tuple[str, str]] = {
        "PYTORCH_ENABLE_MPS_FALLBACK": ("1", "operators that MPS lacks run on the CPU")
    }

    def lack(
        self, precision: str, row: NumberFormat, machine: Machine, gpus: Sequence[Gpu]
    ) -> Lack | None:
        torch, (of_torch, of_macos) = machine.torch, OLDEST.get(precision, ((), ()))
        reason = ""
        if torch is not None and not torch.is_at_least(*of_torch):
            needed = ".".join(map(str, of_torch))
            reason = f"torch {torch.version} does not support it on MPS; {needed} does"
        elif machine.macos and numbers(machine.macos) < of_macos:
            needed = ".".join(map(str, of_macos))
            reason = f"macOS {machine.macos} does not support it; macOS {needed} does"
        return Lack(reason, "no", "update torch or macOS") if reason else None

    def is_available(self) -> bool:
        import torch

        return torch.backends.mps.is_available()

    def count(self) -> int:
        return int(self.is_available())

    def empty_cache(self) -> None:
        if self.is_available():  # pragma: needs a Mac
            import torch

            torch.mps.empty_cache()

    def rng_state(
        self, device: torch.device | None = None
    ) -> torch.Tensor | None:  # pragma: needs a Mac
        import torch

        return torch.mps.get_rng_state()

    def set_rng_state(
        self, state: torch.Tensor, device: torch.device | None = None
    ) -> None:  # pragma: needs a Mac
        import torch

        torch.mps.set_rng_state(state)

    def lack_of(
        self, device: torch.device, precision: str, row: NumberFormat, look: Callable[[], Machine]
    ) -> Lack | None:
        return self.lack(precision, row, look(), ())
