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
    from headway.world import DistributedType as DistributedType

_HOMES = {
    "Accelerator": "headway.accelerator",
    "DistributedType": "headway.world",
    "HeadwayError": "headway.errors",
}

__all__ = ["Accelerator", "DistributedType", "HeadwayError", "__version__"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        from headway.migration.missing import raise_missing  # only for names that are not here

        raise_missing("", name, __name__)
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
