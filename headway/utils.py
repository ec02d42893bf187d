"""The names that scripts import from `accelerate.utils`; nothing is defined here."""

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
    CannotPadNestedTensorWarning as CannotPadNestedTensorWarning,
    broadcast as broadcast,
    broadcast_object_list as broadcast_object_list,
    copy_tensor_to_devices as copy_tensor_to_devices,
    gather as gather,
    gather_object as gather_object,
    pad_across_processes as pad_across_processes,
    reduce as reduce,
    wait_for_everyone as wait_for_everyone,
)
from headway.distributed.environment import (
    clear_environment as clear_environment,
    get_int_from_env as get_int_from_env,
    parse_choice_from_env as parse_choice_from_env,
    parse_flag_from_env as parse_flag_from_env,
    patch_environment as patch_environment,
    str_to_bool as str_to_bool,
)
from headway.distributed.nested import (
    concatenate as concatenate,
    find_batch_size as find_batch_size,
    find_device as find_device,
    honor_type as honor_type,
    is_namedtuple as is_namedtuple,
    is_torch_tensor as is_torch_tensor,
    listify as listify,
    recursively_apply as recursively_apply,
    send_to_device as send_to_device,
    slice_tensors as slice_tensors,
)
from headway.distributed.process import tqdm as tqdm
from headway.distributed.rng import (
    RNGType as RNGType,
    set_seed as set_seed,
    synchronize_rng_state as synchronize_rng_state,
    synchronize_rng_states as synchronize_rng_states,
)
from headway.distributed.world import DistributedType as DistributedType
from headway.memory.oom import find_executable_batch_size as find_executable_batch_size
from headway.memory.device import (
    clear_device_cache as clear_device_cache,
    release_memory as release_memory,
)
from headway.precision.precision import AutocastKwargs as AutocastKwargs
from headway.precision.precision import GradScalerKwargs as GradScalerKwargs
from headway.strategies.ddp_settings import DDPCommunicationHookType as DDPCommunicationHookType
from headway.strategies.ddp_settings import (
    DistributedDataParallelKwargs as DistributedDataParallelKwargs,
)
from headway.strategies.sharding import (
    FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin,
)
from headway.distributed.world import InitProcessGroupKwargs as InitProcessGroupKwargs
from headway.training.profiling import ProfileKwargs as ProfileKwargs
from headway.strategies.compilation import DynamoBackend as DynamoBackend
from headway.strategies.compilation import TorchDynamoPlugin as TorchDynamoPlugin
from headway.training.accumulation import GradientAccumulationPlugin as GradientAccumulationPlugin
from headway.distributed.handler import KwargsHandler as KwargsHandler
from headway.trackers.project import ProjectConfiguration as ProjectConfiguration
from headway.precision.precision import PrecisionType as PrecisionType
from headway.precision.precision import (
    ConvertOutputsToFp32 as ConvertOutputsToFp32,
    convert_outputs_to_fp32 as convert_outputs_to_fp32,
    convert_to_fp32 as convert_to_fp32,
)
from headway.settings.profile_edit import write_basic_config as write_basic_config
from headway.trackers.choice import LoggerType as LoggerType
from headway.training.availability import (
    compare_versions as compare_versions,
    is_4bit_bnb_available as is_4bit_bnb_available,
    is_8bit_bnb_available as is_8bit_bnb_available,
    is_aim_available as is_aim_available,
    is_amdsmi_available as is_amdsmi_available,
    is_bf16_available as is_bf16_available,
    is_bitsandbytes_multi_backend_available as is_bitsandbytes_multi_backend_available,
    is_bnb_available as is_bnb_available,
    is_boto3_available as is_boto3_available,
    is_clearml_available as is_clearml_available,
    is_comet_ml_available as is_comet_ml_available,
    is_cuda_available as is_cuda_available,
    is_datasets_available as is_datasets_available,
    is_deepspeed_available as is_deepspeed_available,
    is_dvclive_available as is_dvclive_available,
    is_fp16_available as is_fp16_available,
    is_fp8_available as is_fp8_available,
    is_hpu_available as is_hpu_available,
    is_lomo_available as is_lomo_available,
    is_matplotlib_available as is_matplotlib_available,
    is_megatron_lm_available as is_megatron_lm_available,
    is_mlflow_available as is_mlflow_available,
    is_mlu_available as is_mlu_available,
    is_mps_available as is_mps_available,
    is_msamp_available as is_msamp_available,
    is_musa_available as is_musa_available,
    is_neuron_available as is_neuron_available,
    is_npu_available as is_npu_available,
    is_numpy_available as is_numpy_available,
    is_pandas_available as is_pandas_available,
    is_peft_available as is_peft_available,
    is_pippy_available as is_pippy_available,
    is_pynvml_available as is_pynvml_available,
    is_pytest_available as is_pytest_available,
    is_rich_available as is_rich_available,
    is_rocm_available as is_rocm_available,
    is_sagemaker_available as is_sagemaker_available,
    is_schedulefree_available as is_schedulefree_available,
    is_sdaa_available as is_sdaa_available,
    is_swanlab_available as is_swanlab_available,
    is_tensorboard_available as is_tensorboard_available,
    is_timm_available as is_timm_available,
    is_torch_distributed_available as is_torch_distributed_available,
    is_torch_version as is_torch_version,
    is_torch_xla_available as is_torch_xla_available,
    is_torchao_available as is_torchao_available,
    is_torchdata_available as is_torchdata_available,
    is_torchdata_stateful_dataloader_available as is_torchdata_stateful_dataloader_available,
    is_torchvision_available as is_torchvision_available,
    is_tqdm_available as is_tqdm_available,
    is_trackio_available as is_trackio_available,
    is_transformer_engine_available as is_transformer_engine_available,
    is_transformer_engine_mxfp8_available as is_transformer_engine_mxfp8_available,
    is_transformers_available as is_transformers_available,
    is_triton_available as is_triton_available,
    is_wandb_available as is_wandb_available,
    is_weights_only_available as is_weights_only_available,
    is_xccl_available as is_xccl_available,
    is_xpu_available as is_xpu_available,
)
from headway.training.models import (
    extract_model_from_parallel as extract_model_from_parallel,
    get_pretty_name as get_pretty_name,
    has_compiled_regions as has_compiled_regions,
    is_compiled_module as is_compiled_module,
    is_peft_model as is_peft_model,
    model_has_dtensor as model_has_dtensor,
    recursive_getattr as recursive_getattr,
)

_OWN = ("annotations", "typing")
__all__ = [name for name in dir() if not name.startswith("_") and name not in _OWN]

if not typing.TYPE_CHECKING:  # a type checker knows every name that is here

    def __getattr__(name: str) -> typing.NoReturn:
        from headway.migration.topics import raise_missing

        raise_missing("utils", name, __name__)
