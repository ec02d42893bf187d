"""Accelerate's names that Headway does not have: what they are for, what to use instead, and the
errors that say so, for `__getattr__` of its modules.
"""

from __future__ import annotations

import dis
import sys
from types import FrameType
from typing import Any, NamedTuple, NoReturn

from headway.errors import UsageError
from headway.migration.homes import module_with

_IMPORT_FROM = dis.opmap["IMPORT_FROM"]


class Topic(NamedTuple):
    """Names of Accelerate that are missing for the same reason."""

    what: str  # they are for
    instead: str  # what to do
    names: frozenset[str]  # in whichever module they are imported from
    modules: tuple[str, ...] = ()  # whose names all belong to this topic, below `accelerate.`
    members: frozenset[str] = frozenset()  # of an Accelerator, its state, or its constructor


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


TOPICS = (
    Topic(
        "training with DeepSpeed, Megatron-LM, or tensor, context and sequence parallelism",
        "train with DistributedDataParallel, which prepare() sets up where there are several ranks,"
        " or with strategy='fsdp'",
        _names("""
            DeepSpeedPlugin DeepSpeedSequenceParallelConfig GatheredParameters deepspeed_required
            compile_regions_deepspeed prepare_deepspeed_cmd_env DEEPSPEED_MULTINODE_LAUNCHERS
            BETA_SP_AVAILABLE_DEEPSPEED_VERSION DeepSpeedEngineWrapper DeepSpeedOptimizerWrapper
            DeepSpeedSchedulerWrapper DummyOptim DummyScheduler HfDeepSpeedConfig
            get_active_deepspeed_plugin map_pytorch_optim_to_deepspeed
            MegatronLMPlugin MegatronLMDummyDataLoader MegatronLMDummyScheduler AbstractTrainStep
            BertTrainStep GPTTrainStep T5TrainStep add_model_config_to_megatron_parser
            avg_losses_across_data_parallel_group gather_across_data_parallel_groups
            MODEL_CONFIGS_TO_MEGATRON_PARSERS parse_bert_config parse_glm4_moe_config
            parse_gpt2_config parse_llama_config parse_t5_config MegatronEngine
            MegatronLMOptimizerWrapper MegatronLMSchedulerWrapper megatron_lm_initialize
            megatron_lm_prepare_data_loader megatron_lm_prepare_model_optimizer_scheduler
            megatron_lm_prepare_optimizer megatron_lm_prepare_scheduler
            ParallelismConfig TorchContextParallelConfig TorchTensorParallelConfig
            TorchTensorParallelPlugin get_model_tp_size prepare_extend_env_parallelism_config
            DTENSOR_PYTORCH_VERSION BETA_CP_AVAILABLE_PYTORCH_VERSION
            BETA_TP_AVAILABLE_PYTORCH_VERSION BETA_TP_AVAILABLE_TRANSFORMERS_VERSION
        """),
        modules=("utils.deepspeed", "utils.megatron_lm", "parallelism_config"),
        members=_names("""
            deepspeed_plugins deepspeed_ulysses_dl_adapter get_deepspeed_plugin
            select_deepspeed_plugin deepspeed_engine_wrapped megatron_lm_plugin
            torch_tp_plugin parallelism_config torch_device_mesh maybe_context_parallel
            tensor_parallel_rank pipeline_parallel_rank context_parallel_rank data_parallel_rank
            data_parallel_shard_rank should_save_model
        """),
    ),
    Topic(
        "models split over devices or offloaded to memory and disk",
        "load the model on one device, or use transformers' from_pretrained(device_map=...) without"
        " prepare()",
        _names("""
            OffloadedWeightsLoader PrefixedDataset align_module_device calculate_maximum_sizes
            check_device_map check_tied_parameters_in_config check_tied_parameters_on_same_device
            compute_module_sizes cpu_offload cpu_offload_with_hook disk_offload dispatch_model
            dtype_byte_size extract_submodules_state_dict find_tied_parameters get_balanced_memory
            get_max_layer_size get_max_memory has_offloaded_params id_tensor_storage
            infer_auto_device_map init_empty_weights init_on_device load_checkpoint_and_dispatch
            load_checkpoint_in_model load_offloaded_weight load_offloaded_weights load_state_dict
            named_module_tensors offload_state_dict offload_weight retie_parameters
            save_offload_index set_module_tensor_to_device check_device_same clean_device_map
            compute_module_total_buffer_size fallback_allocate get_module_leaves
            get_module_size_with_ties get_non_persistent_buffers get_state_dict_from_offload
            get_state_dict_offloaded_model get_module_children_bottom_up
            SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING
        """),
        modules=("big_modeling", "hooks", "utils.offload"),
    ),
    Topic(
        "pipeline parallelism for inference",
        "use torch.distributed.pipelining",
        _names("prepare_pippy"),
        modules=("inference",),
    ),
    Topic(
        "models quantized by bitsandbytes",
        "quantize with transformers' BitsAndBytesConfig, and prepare the model that it loads",
        _names("BnbQuantizationConfig has_4bit_bnb_layers load_and_quantize_model"),
        modules=("utils.bnb",),
    ),
    Topic(
        "training in 8-bit floating point",
        "use mixed_precision='bf16'",
        _names("""
            AORecipeKwargs FP8RecipeKwargs MSAMPRecipeKwargs TERecipeKwargs FP8BackendType
            apply_fp8_autowrap contextual_fp8_autocast convert_model convert_model_to_fp8_ao
            filter_first_and_last_linear_layers has_ao_layers has_transformer_engine_layers
            torchao_required check_cuda_fp8_capability setup_fp8_env
        """),
        modules=("utils.ao", "utils.transformer_engine"),
        members=_names("""
            ao_recipe_handler delayed_fp8_autocast fp8_recipe_handler has_fp8_handler
            msamp_recipe_handler te_recipe_handler
        """),
    ),
    Topic(
        "training on TPUs",
        "train on CUDA, on MPS or on the CPU",
        _names("install_xla prepare_tpu tpu_launcher USE_TORCH_XLA"),
        modules=("utils.torch_xla", "commands.tpu"),
    ),
    Topic(
        "training on Amazon SageMaker",
        "start `headway launch` in a container, as on any other machine",
        _names("""
            SageMakerDistributedType ComputeEnvironment prepare_sagemager_args_inputs
            SAGEMAKER_PARALLEL_EC2_INSTANCES SAGEMAKER_PYTHON_VERSION SAGEMAKER_PYTORCH_VERSION
            SAGEMAKER_TRANSFORMERS_VERSION
        """),
        modules=("commands.config.sagemaker",),
    ),
    Topic(
        "local SGD, in which ranks average their weights every few steps",
        "average them with torch.distributed.algorithms.model_averaging, or train with its"
        " PostLocalSGDOptimizer",
        _names("LocalSGD"),
        modules=("local_sgd",),
    ),
    Topic(
        "the LOMO optimizer, which steps in the backward pass",
        "use another optimizer",
        frozenset(),
        members=_names("lomo_backward"),
    ),
    Topic(
        "logging to Aim, ClearML, DVCLive and SwanLab",
        "write a GeneralTracker of your own, and pass it in log_with=[...]",
        _names("AimTracker ClearMLTracker DVCLiveTracker SwanLabTracker"),
    ),
    Topic(
        "Accelerate's command line",
        "use `headway launch`, `headway config`, `headway env` and `headway test`",
        _names("""
            PrepareForLaunch prepare_multi_gpu_env prepare_simple_launcher_cmd_env env_var_path_add
            TORCH_LAUNCH_PARAMS purge_accelerate_environment test_launch
            convert_dict_to_env_variables ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION
        """),
        modules=("commands", "utils.launch"),
    ),
    Topic(
        "compiling a model's repeated blocks",
        "pass Accelerator(dynamo_plugin=TorchDynamoPlugin(backend='inductor',"
        " use_regional_compilation=True))",
        _names("compile_regions"),
    ),
    Topic(
        "placing processes on CPU cores",
        "start the ranks under numactl, or set OMP_NUM_THREADS",
        _names("""
            CPUInformation get_cpu_distributed_information override_numa_affinity set_numa_affinity
        """),
    ),
    Topic(
        "asking what this machine has",
        "ask torch.cuda, or run `headway env`",
        _names("""
            check_cuda_p2p_ib_support check_os_kernel get_current_device_type get_driver_version
            get_gpu_info get_free_port is_port_in_use are_libraries_initialized is_habana_gaudi1
        """),
    ),
    Topic(
        "Accelerate's own use",
        "copy the function or the value from Accelerate into the script, if it needs it",
        _names("""
            BaseEnum CustomDtype EnumWithContains CUDA_DISTRIBUTED_TYPES STR_OPERATION_TO_FUNC
            TENSOR_INT_TO_DTYPE TENSOR_TYPE_TO_INT TORCH_DISTRIBUTED_OPERATION_TYPES
            TORCH_DYNAMO_MODES TORCH_SAFE_GLOBALS MITA_PROFILING_AVAILABLE_PYTORCH_VERSION
            XPU_PROFILING_AVAILABLE_PYTORCH_VERSION PROFILE_PATTERN_NAME WEIGHTS_PATTERN_NAME
            SAFE_WEIGHTS_PATTERN_NAME
            TensorInformation ThreadLocalSharedDict filter_trackers chained_operation
            clean_state_dict_for_safetensors convert_bytes copy_tensor_to_devices do_nothing
            gather_tensor_shape get_data_structure get_grad_scaler
            get_mixed_precision_context_manager get_module_class_from_name get_shape
            has_repeated_blocks ignorant_find_batch_size
            initialize_tensors is_import_timer_available is_repeated_blocks is_tensor_information
            is_torch_xpu_tensor merge_dicts move_to_device pad_input_tensors patch_optimizer_step
            verify_operation
        """),
        modules=("test_utils", "utils.constants", "utils.rich", "utils.versions"),
    ),
    Topic(
        "the files of Accelerate's checkpoints",
        "save and load with accelerator.save_state() and load_state(), which have a format of"
        " their own",
        _names("""
            MODEL_NAME OPTIMIZER_NAME RNG_STATE_NAME SAFE_MODEL_NAME SAMPLER_NAME SCALER_NAME
            SCHEDULER_NAME
        """),
        modules=("checkpointing",),
    ),
    Topic(
        "the parts of Accelerate's own sharding",
        "shard models with Accelerator(strategy='fsdp'); prepare() and save_state() do the rest",
        _names("""
            compile_regions_fsdp2 FSDP2_PYTORCH_VERSION FSDP2_STATE_DICT_TYPE FSDP_AUTO_WRAP_POLICY
            FSDP_BACKWARD_PREFETCH FSDP_MODEL_NAME FSDP_PYTORCH_VERSION FSDP_SHARDING_STRATEGY
            FSDP_STATE_DICT_TYPE disable_fsdp_ram_efficient_loading
            enable_fsdp_ram_efficient_loading ensure_weights_retied fsdp2_apply_ac
            fsdp2_canonicalize_names fsdp2_load_full_state_dict fsdp2_prepare_model
            fsdp2_switch_optimizer_parameters get_fsdp2_grad_scaler merge_fsdp_weights
        """),
        modules=("utils.fsdp_utils",),
    ),
)


def topic_of_name(module: str, name: str) -> Topic | None:
    """Return why `name` of Accelerate's module (`utils`, the package itself: ``) is missing."""
    for topic in TOPICS:  # a name says more than its module
        if name in topic.names:
            return topic
    return topic_of_module(f"{module}.{name}") or topic_of_module(module)


def topic_of_module(module: str) -> Topic | None:
    """Return why Headway has no counterpart of Accelerate's module."""
    for topic in TOPICS:
        if any(module == one or module.startswith(f"{one}.") for one in topic.modules):
            return topic
    return None


def topic_of_member(name: str) -> Topic | None:
    """Return why an Accelerator or its state has no `name`, or its constructor no such argument."""
    found = (topic for topic in TOPICS if name in topic.members)
    return next(found, None)


class MissingAttributeError(UsageError, AttributeError):
    """Headway has no counterpart of a name of Accelerate; `hasattr` is False as usual."""


class MissingImportError(UsageError, ImportError):
    """A script imports a name of Accelerate that has no counterpart in Headway."""


def raise_missing(module: str, name: str, asked: str) -> NoReturn:
    """Raise the error about a name that a module of Headway does not have, in its `__getattr__`.

    `module` is Accelerate's of that purpose, below `accelerate`; `asked` is Headway's.

    Raises:
        MissingImportError: `from asked import name`, and Accelerate has such a name.
        MissingAttributeError: the same without an import statement.
        AttributeError: Accelerate has no such name, either.
    """
    topic = None if name.startswith("__") else topic_of_name(module, name)
    if _is_import(sys._getframe(2)):
        # Python replaces the text of an AttributeError here by its own
        found = module_with(name)
        where = f"from {asked} import {name}"
        if found is not None:
            raise MissingImportError(
                f"{name} is in {found}", where=where, fix=f"from {found} import {name}"
            )
        if topic is not None:
            raise MissingImportError(_said(name, topic), where=where, fix=topic.instead)
    elif topic is not None:
        raise MissingAttributeError(_said(name, topic), where=f"{asked}.{name}", fix=topic.instead)
    raise AttributeError(f"module {asked!r} has no attribute {name!r}")


def refuse_member(name: str, asked: object) -> None:
    """Raise the error about a member of Accelerate's that an object of Headway does not have.

    Returns without one where Accelerate has no such member, either.

    Raises:
        MissingAttributeError: with what to use instead.
    """
    topic = topic_of_member(name)
    if topic is not None:
        where = f"{type(asked).__name__}.{name}"
        raise MissingAttributeError(_said(name, topic), where=where, fix=topic.instead)


def refused_when_called(name: str, topic: Topic, asked: str) -> type:
    """Return what stands for a name of Accelerate's: a class without objects.

    Libraries import names that they may never use: `isinstance` of such a class is False. To call
    it, or to use an attribute, raises MissingAttributeError. `asked` is the name with its module.
    """

    def refuse() -> NoReturn:
        raise MissingAttributeError(
            _said(name, topic),
            where=asked,
            fix=f"{topic.instead}; or run the script without --replace-accelerate",
        )

    class Refusing(type):
        def __call__(cls, *_: object, **__: object) -> NoReturn:
            refuse()

        def __getattr__(cls, attribute: str) -> Any:
            if attribute.startswith("__"):
                raise AttributeError(attribute)
            refuse()

    return Refusing(name, (), {"__module__": asked.rpartition(".")[0]})


def _said(name: str, topic: Topic) -> str:
    return f"{name}, for {topic.what}, has no counterpart in Headway"


def _is_import(frame: FrameType) -> bool:
    """Return whether the frame is executing the `import name` of a `from` statement."""
    return frame.f_code.co_code[frame.f_lasti] == _IMPORT_FROM
