"""PartialState, AcceleratorState and GradientState in one process."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator
from headway.distributed import world
from headway.distributed.process import part_of
from headway.distributed.world import World
from headway.errors import MachineError, UsageError
from headway.ipc.origin import Layer, Origin
from headway.ipc.run_contract import VARIABLE, Ranks, RunContract, encode
from headway.state import AcceleratorState, GradientState, PartialState, is_initialized
from headway.utils import GradientAccumulationPlugin, PrecisionType
from tests.machines.recorded import load

TWO = World(torch.device("cpu"), Ranks(rank=1, local_rank=1, world_size=2, local_world_size=2))


def test_every_instance_sees_the_same_state_until_it_is_reset() -> None:
    first, second = PartialState(cpu=True), PartialState()
    assert first.__dict__ is second.__dict__
    seen = [first.initialized]
    PartialState._reset_state()
    assert [*seen, first.initialized] == [True, False]
    with pytest.raises(AttributeError, match="reset"):
        first.device  # noqa: B018


def test_the_launcher_s_device_and_precision_are_the_states(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = RunContract("cpu", "bf16", 1, origins={"device": Origin(Layer.FLAG, flag="--cpu")})
    monkeypatch.setenv(VARIABLE, encode(run))
    assert PartialState().device == torch.device("cpu")
    assert not is_initialized()
    assert AcceleratorState().mixed_precision == "bf16"
    assert is_initialized()


def test_a_process_that_srun_counts_as_one_of_several_does_not_train_alone_unasked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
    for name, text in step.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(UsageError, match="srun has started several") as caught:
        Accelerator(cpu=True)
    (problem,) = caught.value.problems
    assert "SLURM_STEP_NUM_TASKS, SLURM_PROCID" in problem.where
    assert "`headway launch`" in problem.fix
    assert "`export HEADWAY_CLUSTER=none`" in problem.fix
    with monkeypatch.context() as of_torchrun:  # one process in each task
        of_torchrun.setenv("RANK", "0")
        of_torchrun.setenv("WORLD_SIZE", "1")
        Accelerator(cpu=True)
        PartialState._reset_state()
    assert capsys.readouterr().err.count("note: srun has started several") == 1
    monkeypatch.setenv("HEADWAY_CLUSTER", "none")
    assert Accelerator(cpu=True).num_processes == 1
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("HEADWAY_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("HEADWAY_PROFILE", "nosuch")
    Accelerator(cpu=True)
    assert "reads HEADWAY_MIXED_PRECISION, HEADWAY_PROFILE: start" in capsys.readouterr().err
    monkeypatch.setenv("HEADWAY_RUN", encode(RunContract("cpu", "no", 1, {})))
    Accelerator()
    assert capsys.readouterr().err == ""


def test_an_accelerator_uses_the_device_and_precision_of_the_state() -> None:
    AcceleratorState(mixed_precision="bf16", cpu=True)
    accelerator = Accelerator()
    assert accelerator.mixed_precision == "bf16"
    assert accelerator.device == PartialState().device == torch.device("cpu")


def test_an_accelerator_s_own_arguments_are_obeyed_and_shared() -> None:
    before = AcceleratorState(mixed_precision="bf16", cpu=True)
    first = Accelerator(mixed_precision="no")
    assert before.mixed_precision == AcceleratorState().mixed_precision == "no"
    assert Accelerator(mixed_precision=PrecisionType.BF16).mixed_precision == "bf16"
    assert first.state.mixed_precision == first.mixed_precision == "no"


def test_a_state_that_contradicts_the_process_is_refused() -> None:
    AcceleratorState(mixed_precision="bf16", cpu=True)
    with pytest.raises(UsageError, match="mixed_precision='no'"):
        AcceleratorState(mixed_precision="no")
    with pytest.raises(UsageError, match="must be one of no, fp16, bf16"):
        AcceleratorState(mixed_precision="fp8")
    with pytest.raises(UsageError, match="unsupported argument 'fsdp_plugin'"):
        AcceleratorState(fsdp_plugin=object())


def test_scripts_find_no_engine_in_the_state() -> None:
    accelerator = Accelerator(cpu=True)
    assert accelerator.state.deepspeed_plugin is None
    assert accelerator.state.fsdp_plugin is None
    assert not accelerator.state.is_fsdp2


def test_the_gradient_state_follows_the_loop_and_the_accumulation() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    state = GradientState()
    assert state.num_steps == 2
    assert (state.in_dataloader, state.active_dataloader, state.remainder) == (False, None, -1)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.zeros(10, 1)), batch_size=4))
    seen = []
    for _ in loader:
        assert state.active_dataloader is loader
        assert state.dataloader_references == [None, loader]
        with accelerator.accumulate():
            seen.append((state.sync_gradients, state.end_of_dataloader))
    assert seen == [(False, False), (True, False), (True, True)]
    assert accelerator.gradient_state.sync_gradients is True
    state._set_sync_gradients(False)
    assert not accelerator.sync_gradients


def test_a_plugin_changes_the_gradient_state() -> None:
    GradientState(GradientAccumulationPlugin(num_steps=3, sync_with_dataloader=False))
    assert GradientState().plugin_kwargs == {"num_steps": 3, "sync_with_dataloader": False}
    assert GradientState().adjust_scheduler


def test_a_dict_to_split_is_not_changed_and_needs_equal_lengths() -> None:
    inputs = {"x": ["a", "b", "c"]}
    assert part_of(inputs, TWO, apply_padding=False) == {"x": ["c"]}
    assert inputs == {"x": ["a", "b", "c"]}
    with pytest.raises(UsageError, match=r"different lengths: \[1, 2\]"):
        part_of({"x": [1], "y": [1, 2]}, TWO, apply_padding=False)


@pytest.mark.parametrize("inputs", ["text", 5, torch.tensor(1.0), {"x": {1, 2}}])
def test_what_cannot_be_split_is_refused(inputs: object) -> None:
    with pytest.raises(UsageError, match="cannot be split"):
        part_of(inputs, TWO, apply_padding=False)


def test_arrays_and_datasets_are_split_as_lists_are(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dataset(list[Any]):
        def select(self, indices: list[int]) -> Dataset:
            return Dataset(self[index] for index in indices)

    fake = types.SimpleNamespace(Dataset=Dataset)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    part = part_of({"d": Dataset("abc"), "n": np.arange(3)}, TWO, apply_padding=True)
    assert type(part["d"]) is Dataset
    assert part["d"] == ["c", "c"]
    assert part["n"].tolist() == [2, 2]
    assert part_of([], TWO, apply_padding=True) == []


def test_a_script_of_its_own_takes_the_cpu_only_where_no_driver_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = load("cpu_torch_on_gpu_box")
    monkeypatch.setattr(world, "detect_machine", lambda: there)
    with pytest.raises(MachineError, match="built without CUDA") as caught:
        PartialState()
    assert all(part in caught.value.problems[0].fix for part in ("whl/cu130", "cpu=True"))
    assert PartialState(cpu=True).device == torch.device("cpu")
    PartialState._reset_state()
    there = there._replace(mask="", torch_refusal="", unused_card="an NVIDIA GPU is not used")
    assert PartialState().device == torch.device("cpu")
    assert "an NVIDIA GPU is not used; fix: install the driver" in capsys.readouterr().err
