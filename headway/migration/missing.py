"""Accelerate's names without a counterpart in Headway: their purposes, alternatives and errors."""

from __future__ import annotations

import dis
import re
import sys
from typing import Any, NamedTuple, NoReturn

from headway.errors import Code, UsageError
from headway.migration.mapping import import_source

_WORD_START = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|\.")
_IMPORT_FROM = dis.opmap["IMPORT_FROM"]


class Feature(NamedTuple):
    """A feature of Accelerate that Headway does not support."""

    what: str  # the feature
    fix: str  # the alternative
    words: tuple[str, ...]  # snake_case words in names and modules of this feature
    names: frozenset[str] = frozenset()  # further names in any module


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ARGUMENTS = _names("""
    ddp_handler scaler_handler init_handler autocast_handler profile_handler native_amp
    dispatch_batches use_seedable_sampler non_blocking use_stateful_dataloader
""")

FEATURES = (
    Feature(
        "training with DeepSpeed, Megatron-LM, or tensor, context and sequence parallelism",
        "train with DistributedDataParallel, which prepare() sets up for several ranks, or with"
        " strategy='fsdp'",
        (
            *("deepspeed", "deep_speed", "megatron", "parallelism", "context_parallel"),
            *("tensor_parallel", "pipeline_parallel", "data_parallel", "train_step", "torch_tp"),
        ),
        _names("GatheredParameters DummyOptim DummyScheduler torch_device_mesh should_save_model"),
    ),
    Feature(
        "models split over devices or offloaded to memory and disk",
        "load the model on one device, or use transformers' from_pretrained(device_map=...) without"
        " prepare()",
        ("big_modeling", "hook", "hooks", "offload", "offloaded", "device_map", "load_checkpoint"),
        _names("""
            align_module_device compute_module_sizes dispatch_model find_tied_parameters
            get_balanced_memory get_max_memory init_empty_weights init_on_device
            set_module_tensor_to_device
        """),
    ),
    Feature(
        "pipeline parallelism for inference",
        "use torch.distributed.pipelining",
        ("pippy", "inference"),
    ),
    Feature(
        "models quantized by bitsandbytes",
        "quantize with transformers' BitsAndBytesConfig and prepare the loaded model",
        ("bnb", "quantize"),
    ),
    Feature(
        "training in 8-bit floating point",
        "use mixed_precision='bf16'",
        ("fp8", "recipe", "utils_ao", "torchao", "transformer_engine"),
    ),
    Feature("training on TPUs", "train on CUDA, on MPS or on the CPU", ("tpu", "xla")),
    Feature(
        "training on Amazon SageMaker",
        "run `headway launch` in a container, as on any other machine",
        ("sagemaker", "sage_maker"),
        _names("ComputeEnvironment"),
    ),
    Feature(
        "local SGD, in which ranks average their weights every few steps",
        "average them with torch.distributed.algorithms.model_averaging, or train with its"
        " PostLocalSGDOptimizer",
        ("local_sgd",),
    ),
    Feature(
        "the LOMO optimizer, which steps in the backward pass", "use another optimizer", ("lomo",)
    ),
    Feature(
        "logging to Aim, ClearML, Comet, DVCLive and SwanLab",
        "implement a GeneralTracker and pass it in log_with=[...]",
        (),
        _names("AimTracker ClearMLTracker CometMLTracker DVCLiveTracker SwanLabTracker"),
    ),
    Feature(
        "Accelerate's command line",
        "use `headway launch`, `headway config`, `headway env` and `headway test`",
        ("commands", "utils_launch"),
        _names("PrepareForLaunch"),
    ),
    Feature(
        "compiling a model's repeated blocks",
        "pass Accelerator(dynamo_plugin=TorchDynamoPlugin(backend='inductor',"
        " use_regional_compilation=True))",
        (),
        _names("compile_regions"),
    ),
    Feature(
        "placing processes on CPU cores",
        "use `headway launch --numa-binding node`",
        ("numa_affinity",),
    ),
    Feature(
        "attributes that repeat the script's arguments",
        "keep the handler in a variable; use accelerator.dataloader_config, and"
        " accelerator.autocast(AutocastKwargs(enabled=False)) to disable autocast",
        (),
        _ARGUMENTS,
    ),
    Feature(
        "checks for rarely used packages or parts of torch",
        "use importlib.util.find_spec('NAME') or torch.distributed.is_available()",
        ("available",),
    ),
    Feature(
        "internal use in Accelerate",
        "copy the function or value from Accelerate into the script if needed",
        ("test_utils", "utils_constants", "utils_rich", "utils_versions"),
        _names("""
            BaseEnum CPUInformation CustomDtype EnumWithContains PrefixedDataset TensorInformation
            ThreadLocalSharedDict CUDA_DISTRIBUTED_TYPES TENSOR_INT_TO_DTYPE TENSOR_TYPE_TO_INT
            TORCH_DISTRIBUTED_OPERATION_TYPES PROFILE_PATTERN_NAME WEIGHTS_PATTERN_NAME
            SAFE_WEIGHTS_PATTERN_NAME DTENSOR_PYTORCH_VERSION
            ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION chained_operation
            copy_tensor_to_devices do_nothing filter_trackers gather_tensor_shape
            get_data_structure get_shape ignorant_find_batch_size initialize_tensors
            is_tensor_information is_torch_xpu_tensor move_to_device pad_input_tensors
            patch_optimizer_step test_launch verify_operation
            CannotPadNestedTensorWarning find_device get_int_from_env get_pretty_name is_namedtuple
            is_torch_tensor parse_choice_from_env parse_flag_from_env
            recursive_getattr recursively_apply str_to_bool synchronize_rng_state
        """),
    ),
    Feature(
        "the files of Accelerate's checkpoints",
        "use accelerator.save_state() and load_state(), which have a different format",
        ("checkpointing",),
        _names("MODEL_NAME SAFE_MODEL_NAME SCALER_NAME"),
    ),
    Feature(
        "the parts of Accelerate's own sharding",
        "shard models with Accelerator(strategy='fsdp'); prepare() and save_state() do the rest",
        ("fsdp", "fsdp2"),
    ),
)

_MEMBERS = _ARGUMENTS | _names("""
    ao_recipe_handler context_parallel_rank data_parallel_rank data_parallel_shard_rank
    deepspeed_engine_wrapped deepspeed_plugins deepspeed_ulysses_dl_adapter delayed_fp8_autocast
    fp8_recipe_handler get_deepspeed_plugin has_fp8_handler lomo_backward maybe_context_parallel
    megatron_lm_plugin msamp_recipe_handler parallelism_config pipeline_parallel_rank
    select_deepspeed_plugin should_save_model te_recipe_handler tensor_parallel_rank
    torch_device_mesh torch_tp_plugin verify_device_map
""")
"""Members of Accelerate's Accelerator and state classes that are missing from Headway's."""


def feature_of_name(module: str, name: str) -> Feature | None:
    """Return the feature that a missing name of Accelerate's `module` belongs to."""
    named = (feature for feature in FEATURES if name in feature.names)
    return next(named, None) or feature_of_module(name) or feature_of_module(module)


def feature_of_member(name: str) -> Feature | None:
    """Return the feature that a missing member or argument of an Accelerator belongs to."""
    return feature_of_name("", name) if name in _MEMBERS else None


def feature_of_module(module: str) -> Feature | None:
    words = f"_{_WORD_START.sub('_', module).lower()}_"
    return next((t for t in FEATURES if any(f"_{word}_" in words for word in t.words)), None)


class MissingAttributeError(UsageError, AttributeError):
    """A name in Accelerate has no counterpart in Headway; `hasattr` returns False for the name."""


class MissingImportError(UsageError, ImportError):
    """A name imported from Accelerate has no counterpart in Headway."""


def raise_missing(module: str, name: str, asked: str) -> NoReturn:
    """Raise the error for a missing name; called from a module's `__getattr__`.

    `module` is Accelerate's module, relative to `accelerate`; `asked` is Headway's module.

    Raises:
        MissingImportError: The name exists in Accelerate and is imported with `from ... import`.
        MissingAttributeError: The name exists in Accelerate and is accessed as an attribute.
        AttributeError: The name does not exist in Accelerate.
    """
    feature = None if name.startswith("__") else feature_of_name(module, name)
    frame = sys._getframe(2)
    if frame.f_code.co_code[frame.f_lasti] == _IMPORT_FROM:  # `from ... import`
        # Python replaces the message of an AttributeError here
        found = import_source(name)
        where = f"from {asked} import {name}"
        if found is not None:
            what, fix = f"{name} is in {found}", f"`from {found} import {name}`"
            raise MissingImportError(what, where=where, fix=fix, code=Code.NO_COUNTERPART)
        if feature is not None:
            raise _missing(MissingImportError, name, feature, where)
    elif feature is not None:
        raise _missing(MissingAttributeError, name, feature, f"{asked}.{name}")
    raise AttributeError(f"module {asked!r} has no attribute {name!r}")


def raise_if_missing(name: str, asked: object) -> None:
    """Raise MissingAttributeError if Accelerate's version of the object has a member `name`."""
    feature = feature_of_member(name)
    if feature is not None:
        raise _missing(MissingAttributeError, name, feature, f"{type(asked).__name__}.{name}")


def placeholder_class(name: str, feature: Feature, asked: str) -> type:
    """Return a placeholder for a class of Accelerate that Headway does not have.

    Libraries import names that they may never use. `isinstance` with the class returns False, and
    calling it or accessing an attribute raises MissingAttributeError. The errors name `asked`.
    """

    def refuse() -> NoReturn:
        or_else = "; or run the script without --replace-accelerate"
        raise _missing(MissingAttributeError, name, feature, asked, or_else)

    class Refusing(type):
        def __call__(cls, *_: object, **__: object) -> NoReturn:
            refuse()

        def __getattr__(cls, attribute: str) -> Any:
            if attribute.startswith("__"):
                raise AttributeError(attribute)
            refuse()

    return Refusing(name, (), {"__module__": asked.rpartition(".")[0]})


def _missing(
    kind: type[UsageError], name: str, feature: Feature, where: str, or_else: str = ""
) -> UsageError:
    what = f"{name}, for {feature.what}, has no counterpart in Headway"
    return kind(what, where=where, fix=feature.fix + or_else, code=Code.NO_COUNTERPART)
