"""What public scripts take from Accelerate most often is here, but for checkpoints and sharding;
benchmarks/names.py counts what scripts need and which of it is there.
"""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

pytest.importorskip("torch")

from headway.migration.judging import Status, verdicts
from headway.migration.reading import Script

HERE = """
import accelerate
from accelerate import Accelerator, DataLoaderConfiguration, DDPCommunicationHookType, PartialState
from accelerate import DistributedDataParallelKwargs, DistributedType, debug_launcher
from accelerate import InitProcessGroupKwargs, notebook_launcher, skip_first_batches
from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher, DataLoaderShard
from accelerate.data_loader import IterableDatasetShard, prepare_data_loader
from accelerate.logging import get_logger
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState, GradientState, is_initialized
from accelerate.test_utils import torch_device
from accelerate.tracking import CometMLTracker, GeneralTracker, MLflowTracker, TensorBoardTracker
from accelerate.tracking import TrackioTracker, WandBTracker, on_main_process
from accelerate.utils import AutocastKwargs, GradientAccumulationPlugin, GradScalerKwargs
from accelerate.utils import LoggerType
from accelerate.utils import ProfileKwargs, TorchDynamoPlugin, broadcast, broadcast_object_list
from accelerate.utils import concatenate, convert_outputs_to_fp32, extract_model_from_parallel
from accelerate.utils import find_batch_size, find_executable_batch_size, gather, gather_object
from accelerate.utils import honor_type, is_peft_model, pad_across_processes, patch_environment
from accelerate.utils import recursively_apply, reduce, release_memory, send_to_device, set_seed
from accelerate.utils import synchronize_rng_states, tqdm, wait_for_everyone, write_basic_config

get_logger(__name__, log_level="INFO").info(accelerate.__version__)
accelerator = Accelerator(
    device_placement=True,
    split_batches=False,
    mixed_precision="bf16",
    gradient_accumulation_steps=2,
    cpu=True,
    dataloader_config=DataLoaderConfiguration(
        split_batches=False, dispatch_batches=None, even_batches=True, use_seedable_sampler=True,
        data_seed=1, non_blocking=True, use_stateful_dataloader=False,
    ),
    rng_types=["generator"],
    log_with="all",
    project_dir=".",
    gradient_accumulation_plugin=GradientAccumulationPlugin(
        num_steps=2, adjust_scheduler=True, sync_with_dataloader=True, sync_each_batch=False
    ),
    step_scheduler_with_optimizer=True,
    kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
    dynamo_backend="no",
    dynamo_plugin=TorchDynamoPlugin(backend="inductor", use_regional_compilation=True),
)
accelerator.state.deepspeed_plugin, accelerate.state.is_initialized(), accelerator.native_amp
accelerator.init_trackers("run", config={}, init_kwargs={})
accelerator.log({}, step=1)
accelerator.get_tracker("jsonl", unwrap=True), accelerator.trackers, accelerator.end_training()
accelerator.prepare(), accelerator.prepare_model(0, evaluation_mode=True)
accelerator.prepare_optimizer(0), accelerator.prepare_data_loader(0)
accelerator.prepare_scheduler(0)
accelerator.join_uneven_inputs([], even_batches=False), accelerator.trigger_sync_in_backward(0)
accelerator.set_trigger(), accelerator.check_trigger(), accelerator.skip_first_batches(0, 1)
accelerator.get_state_dict(0), accelerator.save(0, ""), accelerator.save_model(0, "")
accelerator.unscale_gradients(), accelerator.optimizer_step_was_skipped, accelerator.profile()
accelerator.verify_device_map(0), accelerator.clear(), accelerator.free_memory()
accelerator.use_distributed, accelerator.split_between_processes([], apply_padding=True)
accelerator.on_process(process_index=1), accelerator.on_last_process(0)
accelerator.on_local_process(local_process_index=1), accelerator.is_last_process
accelerator.local_main_process_first(), accelerator.unwrap_model(0)
accelerator.gather_for_metrics(0)
accelerator.ddp_handler, accelerator.scaler_handler, accelerator.dataloader_config
state = PartialState()
state.default_device, state.set_device(), state.destroy_process_group()
"""

LATER = """
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import ProjectConfiguration
accelerator = Accelerator(project_config=0, fsdp_plugin=0)
accelerator.save_state(""), accelerator.load_state(""), accelerator.register_for_checkpointing(0)
accelerator.register_save_state_pre_hook(0), accelerator.register_load_state_pre_hook(0)
"""

REFUSED = """
from accelerate import Accelerator, DeepSpeedPlugin, init_empty_weights, prepare_pippy
from accelerate.utils import BnbQuantizationConfig, MegatronLMPlugin, SageMakerDistributedType
accelerator = Accelerator(deepspeed_plugin=0, megatron_lm_plugin=0)
"""


@pytest.mark.parametrize("compat", [False, True])
def test_the_names_that_scripts_want_are_here(compat: bool) -> None:
    found = verdicts(Script(HERE), compat=compat)
    assert len(found) > 120
    assert {str(need): one for need, one in found.items() if not one.status.is_there} == {}


def test_each_name_that_is_not_here_says_why_and_what_to_use() -> None:
    own = {"Accelerator"}
    for source, statuses in ((LATER, {Status.PLANNED}), (REFUSED, {Status.REFUSED})):
        for need, one in verdicts(Script(source)).items():
            if need.name not in own:
                assert one.status.is_there or (one.status in statuses and one.instead), need


BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "names.py"

SCRIPTS = {
    "a.py": "from accelerate import Accelerator, DeepSpeedPlugin\nAccelerator().print()\n",
    "b.py": "from accelerate import Accelerator\nAccelerator().lomo_backward(1, 2)\n",
    "c.py": "from accelerate import Accelerator\nAccelerator(cpu=True).print()\n",
    "sub/d.py": "from accelerate import DeepSpeedPlugin, Accelerator\nAccelerator().unheard_of\n",
    "other.py": "import torch\n",
    ".hidden/e.py": "import accelerate\n",
    "broken.py": "import accelerate\nprint 'Python 2'\n",
}


def test_the_most_wanted_missing_name_comes_first_with_what_it_would_complete(
    tmp_path: Path,
) -> None:
    for name, text in SCRIPTS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = runpy.run_path(str(BENCHMARK))["count"]([str(tmp_path)])
    assert (found.num_files, found.num_complete) == (4, 1)
    missing = [tuple(row) for row in found.rows if row.status in ("refused", "not there")]
    assert missing == [
        ("accelerate.DeepSpeedPlugin", "refused", 2, 2),
        ("Accelerator.lomo_backward", "refused", 1, 3),
        ("Accelerator.unheard_of", "not there", 1, 4),
    ]
    assert [row.need for row in found.rows[:1]] == ["accelerate.Accelerator"]
    assert [text for text in found.unread if "broken.py, line 2" in text]
