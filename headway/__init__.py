"""Headway: run one PyTorch training script on any machine.

Scripts use `from headway import Accelerator`; `headway launch script.py` runs them. The names below
are imported on first use (PEP 562), so that the command line starts without torch.
"""

from __future__ import annotations

from importlib import import_module

from headway._version import __version__ as __version__

TYPE_CHECKING = False  # importing it from typing would take longer than all imports here
if TYPE_CHECKING:
    from headway.accelerator import Accelerator as Accelerator
    from headway.compat.forwarding import replace_accelerate as replace_accelerate
    from headway.data.loader import skip_first_batches as skip_first_batches
    from headway.errors import HeadwayError as HeadwayError
    from headway.notebook import (
        debug_launcher as debug_launcher,
        notebook_launcher as notebook_launcher,
    )
    from headway.state import PartialState as PartialState
    from headway.utils import (
        AutocastKwargs as AutocastKwargs,
        DataLoaderConfiguration as DataLoaderConfiguration,
        DDPCommunicationHookType as DDPCommunicationHookType,
        DistributedDataParallelKwargs as DistributedDataParallelKwargs,
        DistributedType as DistributedType,
        FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin,
        GradScalerKwargs as GradScalerKwargs,
        InitProcessGroupKwargs as InitProcessGroupKwargs,
        ProfileKwargs as ProfileKwargs,
        find_executable_batch_size as find_executable_batch_size,
        synchronize_rng_states as synchronize_rng_states,
    )

_IN_UTILS = (
    *("AutocastKwargs", "DDPCommunicationHookType", "DataLoaderConfiguration"),
    *("DistributedDataParallelKwargs", "DistributedType", "FullyShardedDataParallelPlugin"),
    *("GradScalerKwargs", "InitProcessGroupKwargs", "ProfileKwargs"),
    *("find_executable_batch_size", "synchronize_rng_states"),
)
_HOMES = {
    "Accelerator": "headway.accelerator",
    "HeadwayError": "headway.errors",
    "PartialState": "headway.state",
    "debug_launcher": "headway.notebook",
    "notebook_launcher": "headway.notebook",
    "replace_accelerate": "headway.compat.forwarding",
    "skip_first_batches": "headway.data.loader",
    **dict.fromkeys(_IN_UTILS, "headway.utils"),
}

__all__ = sorted([*_HOMES, "__version__"])


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        from headway.migration.missing import raise_missing  # imported only for missing names

        raise_missing("", name, __name__)
    try:
        return getattr(import_module(_HOMES[name]), name)
    except AttributeError as error:  # Python would replace its message
        raise ImportError(f"cannot import headway.{name}: {error}", name=__name__) from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
