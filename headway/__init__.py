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
    from headway.data.configuration import DataLoaderConfiguration as DataLoaderConfiguration
    from headway.data.loader import skip_first_batches as skip_first_batches
    from headway.distributed.rng import synchronize_rng_states as synchronize_rng_states
    from headway.distributed.world import (
        DistributedType as DistributedType,
        InitProcessGroupKwargs as InitProcessGroupKwargs,
    )
    from headway.errors import HeadwayError as HeadwayError
    from headway.memory import find_executable_batch_size as find_executable_batch_size
    from headway.notebook import (
        debug_launcher as debug_launcher,
        notebook_launcher as notebook_launcher,
    )
    from headway.precision.precision import (
        AutocastKwargs as AutocastKwargs,
        GradScalerKwargs as GradScalerKwargs,
    )
    from headway.state import PartialState as PartialState
    from headway.strategies.ddp_settings import (
        DDPCommunicationHookType as DDPCommunicationHookType,
        DistributedDataParallelKwargs as DistributedDataParallelKwargs,
    )
    from headway.strategies.sharding import (
        FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin,
    )
    from headway.training.profiling import ProfileKwargs as ProfileKwargs

_HOMES = {
    "Accelerator": "headway.accelerator",
    "AutocastKwargs": "headway.precision.precision",
    "DDPCommunicationHookType": "headway.strategies.ddp_settings",
    "DataLoaderConfiguration": "headway.data.configuration",
    "DistributedDataParallelKwargs": "headway.strategies.ddp_settings",
    "DistributedType": "headway.distributed.world",
    "FullyShardedDataParallelPlugin": "headway.strategies.sharding",
    "GradScalerKwargs": "headway.precision.precision",
    "HeadwayError": "headway.errors",
    "InitProcessGroupKwargs": "headway.distributed.world",
    "PartialState": "headway.state",
    "ProfileKwargs": "headway.training.profiling",
    "debug_launcher": "headway.notebook",
    "find_executable_batch_size": "headway.memory",
    "notebook_launcher": "headway.notebook",
    "replace_accelerate": "headway.compat.forwarding",
    "skip_first_batches": "headway.data.loader",
    "synchronize_rng_states": "headway.distributed.rng",
}

__all__ = sorted([*_HOMES, "__version__"])


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        from headway.migration.missing import raise_missing  # imported only for missing names

        raise_missing("", name, __name__)
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
