"""Headway: run one PyTorch training script on any machine.

`from headway import Accelerator` in the script, `headway launch script.py` in the shell. The names
below are imported on first use (PEP 562), so that the command line starts without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from headway._version import __version__

if TYPE_CHECKING:
    from headway.accelerator import Accelerator as Accelerator
    from headway.errors import HeadwayError as HeadwayError
    from headway.notebook import debug_launcher as debug_launcher
    from headway.notebook import notebook_launcher as notebook_launcher
    from headway.state import PartialState as PartialState
    from headway.world import DistributedType as DistributedType

_HOMES = {
    "Accelerator": "headway.accelerator",
    "DistributedType": "headway.world",
    "HeadwayError": "headway.errors",
    "PartialState": "headway.state",
    "debug_launcher": "headway.notebook",
    "notebook_launcher": "headway.notebook",
}

__all__ = [
    "Accelerator",
    "DistributedType",
    "HeadwayError",
    "PartialState",
    "__version__",
    "debug_launcher",
    "notebook_launcher",
]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
