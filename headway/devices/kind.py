"""What a kind of device is and can do: the base is complete for a CPU, others override the rest.

Detection and planning ask the same objects as the ranks, so only methods import torch.
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
"""Why a device does not have a precision, and what to use instead."""


class DeviceKind:
    """A kind of device; the CPU's values, and what to override for others.

    Another package can add one: an entry point of the group `headway.devices` with the name of the
    kind, such as `hpu = "its.module:Hpu"`, which is a subclass of this class or of `GpuKind`.
    """

    name = "cpu"  # torch's, as in `torch.device(name)`
    module = ""  # imported in ranks and in the fork server first: it adds the kind to torch
    label = "CPU"  # in messages
    maker = ""  # of such GPUs, in messages
    is_numbered = False  # a machine may have several, each for one rank; `devices` selects them
    most_ranks: int | None = None  # that can train on it together; None is any number
    distributed_type = "MULTI_CPU"  # Accelerate's name for several ranks on it
    backend = "gloo"  # of process groups, for tensors that are on it
    lacking: tuple[str, ...] = ("fp16",)  # the precisions that no such device has
    recommended = "no"  # by `headway config`: the precision, where the device has it
    has_fp64 = True  # every such device computes in float64
    can_pin = True  # memory can be pinned for copies to it
    copies_ahead = False  # a copy to it need not be waited for
    mask = ""  # the variable that lists the visible ones
    mask_is_ordered = True  # it also gives their order; otherwise it is a set of indices
    empty_mask: str | None = None  # the value that hides all; None where none is known
    variables: Mapping[str, tuple[str, str]] = {}
    """What a launch sets, with its reason, unless the environment has this or `mask`."""
    debug_variables: Mapping[str, str] = {}  # that let ranks wait for one in a debugger
    interfaces: Mapping[str, str] = {"GLOO_SOCKET_IFNAME": ""}
    """Variables that name the network interface, and what they put before its name."""
    resource = ""  # Kubernetes' name for one
    tool = ""  # of the maker, which shows what uses them
    wheels = ""  # of torch, below https://download.pytorch.org/whl; empty where PyPI has them

    # of a machine, without torch

    def found_in(self, files: Source) -> list[dict[str, Any]]:
        """Return the GPUs that the kernel lists, as fields of `Gpu`, except NVIDIA's."""
        return []

    def counted(self, found: list[dict[str, Any]], environ: Mapping[str, str]) -> list[Any]:
        """Return those GPUs as torch counts them with these variables."""
        return found

    def is_supported_by(self, torch: Torch) -> bool:
        """Return whether the installed torch, or `module` for it, can use such devices."""
        if self.module:
            from importlib.util import find_spec

            return find_spec(self.module.partition(".")[0]) is not None
        return getattr(torch, self.name, None) is not None

    def unsupported(
        self, precision: str, row: NumberFormat, gpus: Sequence[Gpu]
    ) -> Unsupported | None:
        """Return why one of the selected GPUs does not have a precision."""
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
        """Return the number that torch detects."""
        return 1

    def is_in_use(self) -> bool:
        """Return whether this process has initialized one: its forks could not use it."""
        return False

    def current(self) -> torch.device:
        """Return the device on which this process computes."""
        import torch

        return torch.device(self.name)

    def make_current(self, device: torch.device) -> None:
        """Make `device` the one that torch uses where a script names none."""

    def synchronize(self) -> None:
        """Wait for all work on the current one."""

    def empty_cache(self) -> None:
        """Free the memory that torch caches on it."""

    def held_bytes(self, device: torch.device) -> int | None:
        """Return the memory of `device` that this process holds; None if it has none."""
        return None

    def event_recorder(self, device: torch.device) -> Callable[[Any], Any] | None:
        """Return a function that records a timed event in the queue of work of `device`.

        It takes an event to reuse, or None, and returns the event; None while none can be recorded.
        The function is None if events of such devices are not timed.
        """
        return None

    def rng_state(self, device: torch.device | None = None) -> torch.Tensor | None:
        """Return the state of its generator; None where the CPU's is the only one."""
        return None

    def set_rng_state(self, state: torch.Tensor, device: torch.device | None = None) -> None:
        """Restore a state that `rng_state` returned."""

    def unsupported_on(
        self, device: torch.device, precision: str, row: NumberFormat
    ) -> Unsupported | None:
        """Return why `device` does not have a precision."""
        return None


class GpuKind(DeviceKind):
    """GPUs with a module of torch's, such as `torch.xpu`, that has the names of `torch.cuda`."""

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
    """Return the numeric parts of a version: (2, 13, 0) for 2.13.0+cpu."""
    found: list[int] = []
    for part in version.partition("+")[0].split("."):
        if not part.isdecimal() or len(part) > DIGITS:
            break
        found.append(int(part))
    return tuple(found) or (0,)


def sm(capability: tuple[int, int]) -> str:
    """Return a compute capability as NVIDIA's compiler names it: sm_90."""
    return "sm_" + "".join(map(str, capability))


DIGITS = 9  # of an index or a version; int() fails for thousands of digits
