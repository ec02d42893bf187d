"""Base classes of device kinds; `DeviceKind` itself represents CPUs.

Detection and planning use the same objects as the ranks, so only methods import torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

    from headway.ipc.choices import NumberFormat
    from headway.machine.facts import Gpu, Torch
    from headway.machine.source import Source


Unsupported = NamedTuple("Unsupported", [("reason", str), ("instead", str)])  # noqa: UP014  compiles no text
"""The reason why a precision is unsupported, and the precision to use instead."""


class DeviceKind:
    """A kind of device, with the CPU's values as defaults.

    Other packages can add a kind with an entry point in the group `headway.devices`, which maps the
    kind's name to a subclass of this class or of `GpuKind`: `hpu = "its.module:Hpu"`.
    """

    name = "cpu"  # torch's, as in `torch.device(name)`
    module = ""  # registers the kind with torch; imported first in ranks and in the fork server
    label = "CPU"  # for messages
    maker = ""  # the GPUs' vendor, for messages
    is_numbered = False  # machines may have several, one per rank, selected by `devices`
    most_ranks: int | None = None  # maximum world size on this kind; None is unlimited
    distributed_type = "MULTI_CPU"  # Accelerate's name for several ranks
    backend = "gloo"  # of process groups, for tensors on the device
    lacking: tuple[str, ...] = ("fp16",)  # precisions that no device of this kind supports
    recommended = "no"  # default precision of `headway config`, if the device supports it
    has_fp64 = True  # all devices support float64
    can_pin = True  # supports copies from pinned memory
    copies_ahead = False  # supports asynchronous copies to the device
    mask = ""  # the variable that lists visible devices
    mask_is_ordered = True  # the mask also sets the order; otherwise it is a set of indices
    empty_mask: str | None = None  # the value that hides all devices; None if unknown
    variables: Mapping[str, tuple[str, str]] = {}
    """Variables, with values and reasons, that a launch sets unless they or `mask` are set."""
    debug_variables: Mapping[str, str] = {}  # keep ranks waiting while one is in a debugger
    interfaces: Mapping[str, str] = {"GLOO_SOCKET_IFNAME": ""}
    """Variables that select the network interface, each with a prefix for the interface's name."""
    resource = ""  # the name of the Kubernetes resource
    tool = ""  # the vendor's monitoring command
    wheels = ""  # torch's index below https://download.pytorch.org/whl; empty for PyPI

    # of a machine, without torch

    def found_in(self, files: Source) -> list[dict[str, Any]]:
        """Return the fields of a `Gpu` for each GPU that the kernel lists, except NVIDIA GPUs."""
        return []

    def counted(self, found: list[dict[str, Any]], environ: Mapping[str, str]) -> list[Any]:
        """Return the GPUs that torch would enumerate with these environment variables."""
        return found

    def is_supported_by(self, torch: Torch) -> bool:
        """Return whether the installed torch, or the extension `module`, supports this kind."""
        if self.module:
            from importlib.util import find_spec

            return find_spec(self.module.partition(".")[0]) is not None
        return getattr(torch, self.name, None) is not None

    def unsupported(
        self, precision: str, row: NumberFormat, gpus: Sequence[Gpu]
    ) -> Unsupported | None:
        """Return why a selected GPU does not support a precision; None if all GPUs support it."""
        return None

    # of this process

    def load(self) -> None:
        """Import `module`, if there is one."""
        if self.module and self.module not in sys.modules:
            import_module(self.module)

    def is_available(self) -> bool:
        """Return whether torch can use a device of this kind."""
        return True

    def count(self) -> int:
        """Return the number of devices that torch detects."""
        return 1

    def is_in_use(self) -> bool:
        """Return whether this process has initialized a device; its forks then cannot use one."""
        return False

    def current(self) -> torch.device:
        """Return the device on which this process computes."""
        import torch

        return torch.device(self.name)

    def make_current(self, device: torch.device) -> None:
        """Make `device` torch's current device."""

    def synchronize(self) -> None:
        """Wait for all work on the current device."""

    def empty_cache(self) -> None:
        """Release the device memory that torch caches."""

    def held_bytes(self, device: torch.device) -> int | None:
        """Return how many bytes this process has reserved on `device`; None if unsupported."""
        return None

    def event_recorder(self, device: torch.device) -> Callable[[Any], Any] | None:
        """Return a function that records a timed event in the current stream of `device`.

        The function takes an event to reuse, or None to create one. It returns the event, or None
        while events cannot be recorded. If the device has no timed events, the result is None.
        """
        return None

    def rng_state(self, device: torch.device | None = None) -> torch.Tensor | None:
        """Return the state of the device's generator; None if the device has no generator."""
        return None

    def set_rng_state(self, state: torch.Tensor, device: torch.device | None = None) -> None:
        """Restore a state returned by `rng_state`."""

    def unsupported_on(
        self, device: torch.device, precision: str, row: NumberFormat
    ) -> Unsupported | None:
        """Return why `device` does not support a precision; None if it does."""
        return None


class GpuKind(DeviceKind):
    """GPUs with a torch module, such as `torch.xpu`, that mirrors `torch.cuda`."""

    is_numbered = True
    distributed_type = "MULTI_GPU"
    lacking = ()
    recommended = "bf16"

    @property
    def _part(self) -> Any:
        import torch

        self.load()
        return getattr(torch, self.name)

    def is_available(self) -> bool:
        return bool(self._part.is_available())

    def count(self) -> int:
        return int(self._part.device_count())

    def is_in_use(self) -> bool:
        part = getattr(sys.modules.get("torch"), self.name, None)
        return part is not None and bool(part.is_initialized())

    def current(self) -> torch.device:  # pragma: needs a GPU
        import torch

        return torch.device(self.name, self._part.current_device())

    def make_current(self, device: torch.device) -> None:  # pragma: needs a GPU
        self._part.set_device(device)

    def synchronize(self) -> None:  # pragma: needs a GPU
        self._part.synchronize()

    def empty_cache(self) -> None:
        if self.is_in_use():  # pragma: needs a GPU
            self._part.empty_cache()

    def held_bytes(self, device: torch.device) -> int | None:
        return int(self._part.memory_reserved(device))

    def rng_state(
        self, device: torch.device | None = None
    ) -> torch.Tensor | None:  # pragma: needs a GPU
        state: torch.Tensor = self._part.get_rng_state(device or self.name)
        return state

    def set_rng_state(
        self, state: torch.Tensor, device: torch.device | None = None
    ) -> None:  # pragma: needs a GPU
        self._part.set_rng_state(state, device or self.name)


def numbers(version: str) -> tuple[int, ...]:
    """Return the numeric parts of a version, such as (2, 13, 0) for 2.13.0+cpu."""
    found: list[int] = []
    for part in version.partition("+")[0].split("."):
        if not part.isdecimal() or len(part) > DIGITS:
            break
        found.append(int(part))
    return tuple(found) or (0,)


def sm(capability: tuple[int, int]) -> str:
    """Return NVIDIA's name for a compute capability, such as sm_90."""
    return "sm_" + "".join(map(str, capability))


DIGITS = 9  # maximum for indices and versions; int() fails for thousands of digits
