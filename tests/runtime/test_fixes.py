"""The fix of each error of the runtime and of the commands is applied literally, and helps."""

from __future__ import annotations

import re
import shlex
from contextlib import redirect_stderr, suppress
from io import StringIO
from typing import Any

import pytest
import torch

import headway
from headway import utils
from headway.commands.main import main
from headway.errors import HeadwayError
from headway.logging import get_logger

# What is wrong -> what the fix makes of it; `so` are words of the fix.
MENDED = """
Accelerator(mixed_precision="bf32") -> Accelerator(`mixed_precision='bf16'`)
Accelerator(precision="bf16") -> Accelerator(`mixed_precision=`"bf16")
Accelerator(even_batches=0) \
-> Accelerator(`dataloader_config=DataLoaderConfiguration(even_batches=`0))
Accelerator(logging_dir="x") -> Accelerator(`project_config=ProjectConfiguration(logging_dir=`"x"))
Accelerator(deepspeed_plugin=1) -> Accelerator()  # `remove it`
Accelerator(gradient_accumulation_steps=0) -> Accelerator(gradient_accumulation_steps=1) # `number`
Accelerator(gradient_accumulation_steps=4, gradient_accumulation_plugin=PLUGIN) \
-> Accelerator(gradient_accumulation_plugin=`GradientAccumulationPlugin(num_steps=4`))
Accelerator(dynamo_backend="eager", dynamo_plugin=TorchDynamoPlugin()) \
-> Accelerator(dynamo_plugin=`TorchDynamoPlugin(backend='eager'`))
Accelerator(split_batches=True, dataloader_config=DataLoaderConfiguration()) \
-> Accelerator(`dataloader_config`=DataLoaderConfiguration(`split_batches`=True))
GradientAccumulationPlugin(num_steps=0) -> GradientAccumulationPlugin(num_steps=1)  # `number`
Accelerator(strategy="zero3") -> Accelerator(`strategy='fsdp'`)
Accelerator(wrap={"Block": 1}) -> Accelerator(wrap=["Block"])  # `a list of class names`
Accelerator(seed="x") -> Accelerator(`seed=42`)
Accelerator(global_batch_size=0) -> Accelerator(global_batch_size=4)  # `how many samples`
Accelerator(global_batch_size=4, split_batches=True) -> Accelerator(`global_batch_size`=4)
Accelerator(kwargs_handlers=AutocastKwargs()) -> Accelerator(`kwargs_handlers=[AutocastKwargs(`)])
Accelerator(kwargs_handlers=[{}]) -> Accelerator(kwargs_handlers=[`AutocastKwargs`()])
Accelerator(kwargs_handlers=[AutocastKwargs()] * 2) \
-> Accelerator(kwargs_handlers=[AutocastKwargs()])  # `one of them`
Accelerator(log_with="wandbb") -> Accelerator(log_with=`'jsonl'`, project_dir="x")
Accelerator(project_dir=None).checkpoint() -> `Accelerator(project_dir="runs/my_run")`.checkpoint()
accelerator.save_state() -> accelerator.`save_state(`"folder")
accelerator.load_state() -> accelerator.save_state("f"); accelerator.`load_state(`"f")
accelerator.save_state("f", state_dict={}) -> accelerator.save_state("f")  # `remove it`
accelerator.save_model(model, "f", max_shard_size="5 B!") \
-> accelerator.save_model(model, "f", max_shard_size=`"5GB"`)
accelerator.register_for_checkpointing({}) \
-> accelerator.register_for_checkpointing(scheduler)  # `these two methods`
accelerator.checkpoint(every=5) \
-> accelerator.prepare(optimizer); accelerator.checkpoint(every=5)  # `prepare the optimizer`
accelerator.prepare(scheduler) -> accelerator.prepare(scheduler, optimizer)  # `together`
accelerator.prepare(model, device_placement=[]) \
-> accelerator.prepare(model, device_placement=[True])  # `one entry for each object`
accelerator.prepare_model([model]) -> accelerator.prepare_model(model)  # `torch's own class`
accelerator.gather("text") -> accelerator.gather(`torch.tensor(`1.0))
accelerator.backward(loss, num_tokens=1, gradient=one) \
-> accelerator.backward(loss * one, num_tokens=1)  # `num_tokens alone`
skip_first_batches(loader, -1) -> skip_first_batches(loader, 1)  # `how many batches`
synchronize_rng_states(["cudaa"]) -> synchronize_rng_states([])  # `leave it out`
find_batch_size([]) -> find_batch_size([one])  # `at least one tensor`
find_executable_batch_size(lambda: 1)() -> find_executable_batch_size(lambda `batch_size`: 1)()
notebook_launcher(print, num_processes=0) -> notebook_launcher(print, num_processes=1)  # `least 1`
get_logger("x", "LOUD") -> get_logger("x", "`DEBUG`")
is_torch_version("=>", "2") -> is_torch_version(`'>='`, "2")
ProjectConfiguration(total_limit=0) -> ProjectConfiguration(total_limit=1)  # `1 or more`
ProjectConfiguration(total_limit=1.5) -> ProjectConfiguration(total_limit=1)  # `1 or more`
ProjectConfiguration(total_limit=True) -> ProjectConfiguration(total_limit=1)  # `1 or more`
ProjectConfiguration(total_limit="2") -> ProjectConfiguration(total_limit=2)  # `how many`
ProjectConfiguration(logging_dir=5) -> ProjectConfiguration(logging_dir=`"runs/my_run"`)
ProjectConfiguration(b"bb") -> ProjectConfiguration(`"runs/my_run"`)
Accelerator(project_dir=5) -> Accelerator(project_dir=`"runs/my_run"`)
Accelerator(resume_from=5) -> Accelerator(resume_from=`"runs/my_run"`)
accelerator.save_state(5) -> accelerator.save_state(`"runs/my_run"`)
ProjectConfiguration(save_on_each_node=True) -> ProjectConfiguration()  # `remove it`
DataLoaderConfiguration(data_seed=3) \
-> DataLoaderConfiguration(data_seed=3, `use_seedable_sampler=True`)
DataLoaderConfiguration(split_batches=True, already_sharded=True) \
-> DataLoaderConfiguration(already_sharded=True)  # `remove one of the two`
DistributedDataParallelKwargs(comm_hook="fp17") \
-> DistributedDataParallelKwargs(`comm_hook=DDPCommunicationHookType.BF16`)
FullyShardedDataParallelPlugin(sharding_strategy="x") \
-> FullyShardedDataParallelPlugin(sharding_strategy="`FULL_SHARD`")
"""


@pytest.mark.parametrize("row", MENDED.strip().splitlines())
def test_code_changed_as_the_fix_says_is_no_error_any_more(row: str) -> None:
    code, mended = row.split(" -> ")
    with pytest.raises(HeadwayError) as refused:
        exec(code, names())  # noqa: S102
    marks = re.findall("`([^`]+)`", mended)
    assert marks
    assert all(mark in refused.value.problems[0].fix for mark in marks), refused.value
    exec(mended.replace("`", ""), names())  # noqa: S102


def names() -> dict[str, Any]:
    model, one = torch.nn.Linear(1, 1), torch.ones(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {
        **{name: getattr(module, name) for module in (headway, utils) for name in module.__all__},
        "torch": torch,
        "get_logger": get_logger,
        "model": model,
        "one": one,
        "loss": model(one),
        "accelerator": headway.Accelerator(cpu=True, project_dir="runs"),
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        "loader": torch.utils.data.DataLoader(range(8)),  # type: ignore[arg-type]
        "PLUGIN": utils.GradientAccumulationPlugin(),
    }


@pytest.mark.parametrize(
    "words",
    ["nosuch", "config nosuch", "config get nosuch", "why nosuch", "logs nosuch", "stack 999999"],
)
def test_a_command_that_a_fix_names_runs(words: str) -> None:
    with redirect_stderr(StringIO()) as text:
        assert main(words.split()) == 2
    named = re.findall("`headway ([^`]+)`", text.getvalue().partition("fix:")[2])
    for command in named:
        with suppress(SystemExit):  # after --help
            assert main(shlex.split(command)) == 0
    assert named
