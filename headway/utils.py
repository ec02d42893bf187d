"""Re-exports the names that scripts import from `accelerate.utils`."""

from __future__ import annotations

import typing

from headway.checkpoint.files import (
    SAFE_WEIGHTS_INDEX_NAME as SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME as WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME as WEIGHTS_NAME,
    convert_file_size_to_int as convert_file_size_to_int,
    load as load,
    save as save,
)
from headway.data.configuration import DataLoaderConfiguration as DataLoaderConfiguration
from headway.distributed.collectives import (
    broadcast as broadcast,
    broadcast_object_list as broadcast_object_list,
    gather as gather,
    gather_object as gather_object,
    pad_across_processes as pad_across_processes,
    reduce as reduce,
    wait_for_everyone as wait_for_everyone,
)
from headway.distributed.handler import KwargsHandler as KwargsHandler
from headway.distributed.nested import (
    concatenate as concatenate,
    find_batch_size as find_batch_size,
    honor_type as honor_type,
    listify as listify,
    send_to_device as send_to_device,
    slice_tensors as slice_tensors,
)
from headway.distributed.process import (
    clear_environment as clear_environment,
    patch_environment as patch_environment,
    tqdm as tqdm,
)
from headway.distributed.rng import (
    RNGType as RNGType,
    set_seed as set_seed,
    synchronize_rng_states as synchronize_rng_states,
)
from headway.distributed.world import (
    DistributedType as DistributedType,
    InitProcessGroupKwargs as InitProcessGroupKwargs,
)
from headway.memory import (
    clear_device_cache as clear_device_cache,
    find_executable_batch_size as find_executable_batch_size,
    release_memory as release_memory,
)
from headway.precision.precision import (
    AutocastKwargs as AutocastKwargs,
    ConvertOutputsToFp32 as ConvertOutputsToFp32,
    GradScalerKwargs as GradScalerKwargs,
    PrecisionType as PrecisionType,
    convert_outputs_to_fp32 as convert_outputs_to_fp32,
    convert_to_fp32 as convert_to_fp32,
)
from headway.settings.profile_edit import write_basic_config as write_basic_config
from headway.strategies.compilation import (
    DynamoBackend as DynamoBackend,
    TorchDynamoPlugin as TorchDynamoPlugin,
    extract_model_from_parallel as extract_model_from_parallel,
    has_compiled_regions as has_compiled_regions,
    is_compiled_module as is_compiled_module,
    is_peft_model as is_peft_model,
    model_has_dtensor as model_has_dtensor,
)
from headway.strategies.ddp_settings import (
    DDPCommunicationHookType as DDPCommunicationHookType,
    DistributedDataParallelKwargs as DistributedDataParallelKwargs,
)
from headway.strategies.sharding import (
    FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin,
)
from headway.trackers.choice import LoggerType as LoggerType
from headway.trackers.project import ProjectConfiguration as ProjectConfiguration
from headway.training.accumulation import GradientAccumulationPlugin as GradientAccumulationPlugin
from headway.training.availability import *  # noqa: F403  generated functions
from headway.training.profiling import ProfileKwargs as ProfileKwargs

_OWN = ("annotations", "typing")
__all__ = [name for name in dir() if not name.startswith("_") and name not in _OWN]

if not typing.TYPE_CHECKING:  # type checkers must report missing names

    def __getattr__(name: str) -> typing.NoReturn:
        from headway.migration.missing import raise_missing

        raise_missing("utils", name, __name__)
