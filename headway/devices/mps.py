"""The GPU of an Apple chip, by MPS."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from headway.devices.kind import DeviceKind

if TYPE_CHECKING:
    import torch


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
