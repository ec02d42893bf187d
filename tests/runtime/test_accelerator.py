"""The Accelerator in one process on the CPU."""

from __future__ import annotations

import copy
import inspect
import io
import os
import pickle
import random
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, DataLoaderConfiguration
from headway.compat import Accelerator as CompatAccelerator
from headway.errors import LaunchError, MachineError, UsageError
from headway.ipc.origin import Layer, Origin
from headway.ipc.progress import Progress, process_progress
from headway.ipc.run_contract import VARIABLE, RunContract, encode
from headway.ipc.step_clock import GRADIENTS, DeviceTimer, Event, StepClock
from headway.training import steps
from headway.utils import send_to_device, set_seed
from tests.distributed.launching import execute


def make() -> tuple[torch.nn.Module, torch.optim.Optimizer, DataLoader[Any], LambdaLR]:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(10, 3)), batch_size=4)
    return model, optimizer, loader, LambdaLR(optimizer, lambda step: 1 / (1 + step))


IMPORTS = """
import sys, torch, headway.accelerator, headway.utils
assert not torch.distributed.is_initialized() and not torch.cuda.is_initialized()
headway.accelerator.Accelerator(cpu=True).prepare(torch.nn.Linear(1, 1))
names = ("headway.strategies.fsdp", "torch.distributed.fsdp._fully_shard")
print(*(name for name in names if name in sys.modules))
"""


@pytest.mark.processes
def test_importing_the_runtime_starts_nothing_and_only_sharding_imports_what_shards() -> None:
    done = execute([sys.executable, "-c", IMPORTS], code=0)
    assert (done.stdout.strip(), done.stderr) == ("", "")


def test_prepare_keeps_the_order_and_passes_strangers_through() -> None:
    model, optimizer, loader, scheduler = make()
    stranger = object()
    prepared = Accelerator(cpu=True).prepare(scheduler, stranger, loader, optimizer, model)
    assert prepared[0].scheduler is scheduler
    assert prepared[1] is stranger
    assert prepared[2].dataset is loader.dataset
    assert prepared[3].optimizer is optimizer
    assert prepared[4] is model


def test_preparing_twice_changes_nothing() -> None:
    accelerator = Accelerator(cpu=True)
    objects = make()
    once = accelerator.prepare(*objects)
    assert accelerator.prepare(*once) == once
    assert accelerator.prepare(*objects) == once


def test_prepared_optimizer_is_an_optimizer_in_all_respects(tmp_path: Path) -> None:
    model, optimizer, *_ = make()
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(optimizer)
    assert isinstance(prepared, torch.optim.Optimizer)
    scheduler = accelerator.prepare(LambdaLR(prepared, lambda step: 0.5**step))
    for _ in range(3):
        accelerator.backward(model(torch.ones(1, 3)).sum())
        prepared.step()
        scheduler.step()
        prepared.zero_grad()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**3)
    assert prepared.state is optimizer.state
    assert prepared.defaults["lr"] == 0.1
    torch.save(prepared.state_dict(), tmp_path / "o.pt")
    prepared.load_state_dict(torch.load(tmp_path / "o.pt"))
    assert prepared.param_groups is optimizer.param_groups
    assert copy.deepcopy(prepared).param_groups[0]["lr"] == prepared.param_groups[0]["lr"]
    with pytest.raises(TypeError, match="in the order of its arguments"):  # swapped results
        prepared(torch.ones(1, 3))  # type: ignore[operator]


def test_scheduler_steps_once_per_epoch_too_even_after_a_broken_off_window() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, _, scheduler = accelerator.prepare(*make())
    for _ in range(2):
        for _micro_batch in range(3):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(1, 3)).sum())
                optimizer.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                scheduler.step()
        scheduler.step()
    assert scheduler.last_epoch == 3  # as many as optimizer steps


def test_a_fresh_schedule_can_be_wound_forward_and_a_raw_optimizer_drives_it_too() -> None:
    accelerator = Accelerator(cpu=True)
    model, raw, _, plain = make()
    model, _, scheduler = accelerator.prepare(model, raw, plain)
    raw.step()  # torch warns of schedulers that step first
    for _ in range(3):
        scheduler.step()
    assert scheduler.last_epoch == 3
    raw.step()
    scheduler.step()
    assert scheduler.last_epoch == 4


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_a_copy_of_an_optimizer_with_a_scheduler_steps_its_own_weights(duplicate: Any) -> None:
    model, optimizer, *_ = make()
    prepared = Accelerator(cpu=True).prepare(optimizer)
    torch.optim.lr_scheduler.StepLR(prepared, 1)
    twin = duplicate(prepared)
    before = copy.deepcopy(model.state_dict())
    for group in (*prepared.param_groups, *twin.param_groups):
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    twin.step()
    assert all(before[name].equal(value) for name, value in model.state_dict().items())
    assert not twin.param_groups[0]["params"][0].equal(before["weight"])


def test_loaded_optimizer_state_follows_the_weights() -> None:
    model, optimizer, *_ = make()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    model.double()  # as a move to another device
    Accelerator(cpu=True).prepare(optimizer)
    assert optimizer.state[next(model.parameters())]["exp_avg"].dtype == torch.float64


@pytest.mark.parametrize("is_freed", [False, True])
def test_what_another_accelerator_prepared_follows_the_new_one(is_freed: bool) -> None:
    first = Accelerator(cpu=True)
    prepared = first.prepare(*make())
    if is_freed:
        first.free_memory()
    second = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, loader, _ = found = second.prepare(*prepared)
    assert all(after is before for after, before in zip(found, prepared, strict=True))
    changes = []
    for (x,) in loader:  # 3 batches, the last of which ends an accumulation
        before = copy.deepcopy(model.state_dict())
        with second.accumulate(model):
            second.backward(model(x).sum())
            optimizer.step()
            optimizer.zero_grad()
        changes.append(not all(before[name].equal(t) for name, t in model.state_dict().items()))
    assert changes == [False, True, True]


@pytest.mark.parametrize("words", [((True, True), {}), ((), {"split_batches": True})])
def test_compat_splits_batches_by_the_configuration_of_loaders_alone(
    words: tuple[tuple[bool, ...], dict[str, bool]], capsys: pytest.CaptureFixture[str]
) -> None:
    args, named = words
    assert not CompatAccelerator(*args, cpu=True, **named).split_batches
    assert "split_batches" in capsys.readouterr().err
    config = DataLoaderConfiguration(split_batches=True)
    assert CompatAccelerator(cpu=True, dataloader_config=config).split_batches
    assert capsys.readouterr().err == ""


def test_freeing_memory_keeps_optimizers_and_loops_in_time() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, loader, _ = accelerator.prepare(*make())  # 3 batches
    for _ in range(2):
        for (x,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).sum())
                optimizer.step()
                optimizer.zero_grad()
        accelerator.free_memory()
    assert optimizer.step_count == 4


def test_accelerate_s_variables_hold_without_our_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "3")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    accelerator = Accelerator()
    assert (accelerator.mixed_precision, accelerator.gradient_accumulation_steps) == ("bf16", 3)
    assert accelerator.device.type == "cpu"


def test_save_writes_files_open_files_and_safetensors(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    state = {"weight": torch.arange(3)}
    path = tmp_path / "model.safetensors"
    accelerator.save(state, path, safe_serialization=True)
    assert safetensors.torch.load_file(path)["weight"].tolist() == [0, 1, 2]
    for safe in (False, True):
        file = io.BytesIO()
        accelerator.save(state, file, safe_serialization=safe)
        file.seek(0)
        loaded = safetensors.torch.load(file.read()) if safe else torch.load(file)
        assert loaded["weight"].tolist() == [0, 1, 2]
    assert [entry.name for entry in tmp_path.iterdir() if entry.is_file()] == [path.name]


def test_an_optimizer_whose_step_takes_no_closure_steps() -> None:
    class Halving(torch.optim.Optimizer):
        def step(self) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for weight in group["params"]:
                    weight.data /= 2

    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = Accelerator(cpu=True).prepare(Halving([weight], {}))
    optimizer.step()
    assert weight.item() == 0.5


def test_a_closure_s_loss_is_returned_and_refused_while_gradients_accumulate() -> None:
    accelerator = Accelerator(cpu=True)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = accelerator.prepare(torch.optim.LBFGS([weight], max_iter=3))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (weight - 3).square().sum()
        accelerator.backward(loss)
        return loss

    assert optimizer.step(closure).item() == 4.0
    assert optimizer.step_count == 1
    accelerator.gradient_accumulation_steps = 2
    with accelerator.accumulate(), pytest.raises(UsageError, match="support gradient accumulation"):
        optimizer.step(closure)


def test_scheduler_may_step_on_its_own() -> None:
    accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
    _, optimizer, _, scheduler = accelerator.prepare(*make())
    optimizer.step()
    scheduler.step()
    scheduler.step()
    assert scheduler.last_epoch == 2


def test_plateau_scheduler_gets_its_metric() -> None:
    accelerator = Accelerator(cpu=True)
    _, optimizer, *_ = make()
    optimizer, scheduler = accelerator.prepare(optimizer, ReduceLROnPlateau(optimizer, patience=0))
    for loss in (1.0, 2.0):
        optimizer.step()
        scheduler.step(loss)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_accumulated_gradients_are_the_mean_and_survive_zero_grad() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = accelerator.prepare(torch.optim.SGD([weight], lr=1.0))
    for factor in (2.0, 4.0):
        with accelerator.accumulate():
            accelerator.backward(weight * factor)
            norm = accelerator.clip_grad_norm_([weight], 0.5 if factor == 2.0 else 100.0)
            assert norm.item() == (1.0 if factor == 2.0 else 3.0)
            accelerator.clip_grad_value_([weight], 0.5 if factor == 2.0 else 100.0)
            optimizer.step()
            if factor == 4.0:
                assert weight.grad is not None
                assert weight.grad.item() == 3.0
            optimizer.zero_grad()
    assert weight.item() == -3.0
    assert weight.grad is None


def test_gradients_that_zero_grad_discards_before_the_last_micro_batch_are_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    owners = (1, "optimizer", ""), (3, "", ""), (3, "optimizer", "optimizer"), (3, "model", "model")
    for num_steps, early, reported in owners:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=num_steps)
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer = accelerator.prepare(model, optimizer)
        prepared: dict[str, Any] = {"model": model, "optimizer": optimizer}
        for _ in range(6):
            with accelerator.accumulate():
                if early:
                    prepared[early].zero_grad()
                accelerator.backward(prepared["model"](torch.ones(1)))
                prepared["optimizer"].step()
                if not early:
                    prepared["optimizer"].zero_grad()
        found = capsys.readouterr().err
        note = f"zero_grad() of a prepared {reported} discarded the gradients of earlier"
        assert found.count(note) == (reported != ""), found
        assert reported or found == ""


def test_nested_and_broken_off_loops_do_not_confuse_accumulation() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, _, train, _ = accelerator.prepare(*make())  # 3 batches
    validation = accelerator.prepare(DataLoader(TensorDataset(torch.ones(2, 3)), batch_size=1))
    held = []  # loops that nobody ends
    due = []
    for _ in range(2):
        for _batch in train:
            with accelerator.accumulate(model):
                due.append(accelerator.sync_gradients)
            held.append(iter(validation))
            next(held[-1])
            for _other in validation:
                break
    assert due == [False, True, True] * 2
    for _batch in train:
        with accelerator.accumulate(model):
            due.append(accelerator.sync_gradients)
        break
    with accelerator.accumulate(model):
        due.append(accelerator.sync_gradients)  # the window that the loop left open goes on
    assert due[-2:] == [False, True]


def test_a_step_within_an_open_autocast_is_seen_by_the_next_forward_pass() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    plain = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.5))
    outputs = []
    with accelerator.autocast():
        for _ in range(2):
            outputs.append(model(torch.ones(1, 2)))
            accelerator.backward(outputs[-1].sum())
            optimizer.step()
    assert not outputs[0].equal(outputs[1])


def test_bf16_computes_in_bf16_and_returns_fp32(capsys: pytest.CaptureFixture[str]) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = torch.nn.Linear(64, 64)
    exact = model(torch.ones(1, 64))
    prepared = accelerator.prepare(model)
    outputs = prepared(torch.ones(1, 64))
    assert outputs.dtype == torch.float32
    assert outputs.equal(outputs.bfloat16().float())
    assert not outputs.equal(exact)
    with accelerator.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    assert next(prepared.parameters()).dtype == torch.float32
    assert list(inspect.signature(prepared.forward).parameters) == ["input"]
    assert accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)(torch.ones(1, 64)).equal(
        exact
    )
    accelerator.prepare(torch.nn.Linear(1, 1).bfloat16().requires_grad_(False))
    assert capsys.readouterr().err == ""
    accelerator.prepare(torch.nn.Linear(1, 1).bfloat16())
    assert "omit .to(torch.bfloat16)" in capsys.readouterr().err


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copy_of_a_bf16_model_has_its_own_weights(duplicate: Any) -> None:
    model = Accelerator(cpu=True, mixed_precision="bf16").prepare(torch.nn.Linear(4, 4))
    twin = duplicate(model)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    assert model(torch.ones(1, 4)).count_nonzero() == 0
    assert twin(torch.ones(1, 4)).count_nonzero() > 0


def test_an_accelerator_can_be_pickled() -> None:
    accelerator = Accelerator(cpu=True, project_dir="runs")
    assert pickle.loads(pickle.dumps(accelerator)).project_dir == "runs"


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_cuda_without_a_gpu_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = Origin(Layer.USER_PROFILE, "default.yaml", 7)
    monkeypatch.setenv(VARIABLE, encode(RunContract("cuda", "no", 1, {"device": profile})))
    with pytest.raises(MachineError, match="torch detects 0"):
        Accelerator()
    Accelerator(cpu=True)
    assert "Accelerator(cpu=True) overrides device='cuda'" in capsys.readouterr().err


def test_ranks_that_cannot_form_a_group_stop_and_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    waits = Mock(return_value=nullcontext())
    monkeypatch.setattr("headway.distributed.world.waiting_for", waits)
    with pytest.raises(LaunchError, match=r"not form a process group[\s\S]*MASTER_ADDR"):
        Accelerator(cpu=True)
    assert waits.call_args.args == ("the other rank at :",)
    for name, value in (("LOCAL_WORLD_SIZE", "1"), ("GLOO_SOCKET_IFNAME", "lo")):
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match=r"fix: +set GLOO_SOCKET_IFNAME \(now 'lo'\) .*torchrun"):
        Accelerator(cpu=True)
    monkeypatch.setattr(Progress, "is_connected", True)
    with pytest.raises(LaunchError, match=r"fix: +set GLOO_SOCKET_IFNAME (?!.*headway launch)"):
        Accelerator(cpu=True)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # the launcher has set the variable
    with pytest.raises(LaunchError, match=r"fix: +check the other ranks' output"):
        Accelerator(cpu=True)
    refused = Mock(side_effect=RuntimeError("can't start new thread"))
    monkeypatch.setattr(dist, "init_process_group", refused)
    with pytest.raises(LaunchError, match=r"start new thread[\s\S]*fix: .*pids.max"):
        Accelerator(cpu=True)


def test_a_rank_of_two_in_a_group_of_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(UsageError, match="rank 1 of 2, but rank 0 of 1"):
            Accelerator(cpu=True)
    finally:
        dist.destroy_process_group()


def test_a_save_that_fails_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    path = tmp_path / "model.pt"
    accelerator.save(accelerator.get_state_dict(torch.nn.Linear(1, 1)), path)
    whole = path.read_bytes()
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
        accelerator.save({"weights": torch.ones(1000), "bad": lambda: None}, str(path))
    assert path.read_bytes() == whole
    assert [entry.name for entry in tmp_path.iterdir() if entry.is_file()] == ["model.pt"]


@pytest.mark.parametrize("safe", [False, True])
def test_what_is_no_file_is_written_to_and_not_replaced(safe: bool, tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    Accelerator(cpu=True).save({"weight": torch.ones(2)}, pipe, safe_serialization=safe)
    assert pipe.is_fifo()
    assert len(os.read(reading, 2**16)) > 8
    os.close(reading)


def test_free_memory_forgets_objects_and_returns_nones() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, *_ = accelerator.prepare(*make())
    assert accelerator.free_memory(model, optimizer) == [None, None]
    assert accelerator.prepare(optimizer.optimizer) is not optimizer


def test_set_seed_repeats_every_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.random()), torch.rand(1).item()

    set_seed(3)
    first = draw()
    set_seed(3)
    assert draw() == first
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    set_seed(1, device_specific=True)
    assert draw() == first


def test_batches_of_any_shape_are_moved_and_keep_their_types() -> None:
    batch = {"x": torch.ones(1), "nested": [(torch.ones(2),), "text"]}
    moved = send_to_device(batch, "meta", skip_keys="x")
    assert moved["x"].device.type == "cpu"
    assert moved["nested"][0][0].device.type == "meta"
    assert moved["nested"][1] == "text"


class LossOnGpu:
    """A loss that a GPU has yet to compute."""

    device = torch.device("cuda")

    def numel(self) -> int:
        return 1

    def detach(self) -> LossOnGpu:
        return self

    def to(self, device: str, *, non_blocking: bool) -> torch.Tensor:
        assert (device, non_blocking) == ("cpu", True)
        return torch.tensor(6.0)


class Mark:
    is_reached = False

    def query(self) -> bool:
        return self.is_reached

    def elapsed_time(self, end: Event) -> float:
        return 1.0


def test_steps_that_nobody_reads_call_nothing_of_the_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for owner, name in ((StepClock, "enter"), (Progress, "end_backward"), (Progress, "end_step")):
        monkeypatch.setattr(owner, name, lambda *_: pytest.fail("nobody reads this"))
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters()), DataLoader(TensorDataset(torch.ones(2, 1)))
    )
    progress = process_progress()
    monkeypatch.setattr(progress, "is_watched", False)  # by stats of an earlier test
    trained = progress.num_trained
    for (batch,) in loader:
        accelerator.backward(model(batch).sum())
        optimizer.step()
    assert progress.num_trained == trained + 4


def on_gpu(mark: Mark) -> Progress:
    progress = Progress()
    progress.clock.queue, progress.clock.device = DeviceTimer(lambda _: mark), LossOnGpu.device
    progress.end_step(1)
    return progress


def test_the_loss_on_a_gpu_is_known_once_the_gpu_has_done_the_step() -> None:
    mark = Mark()
    progress = on_gpu(mark)
    steps._note_loss(progress, cast("torch.Tensor", LossOnGpu()), 3)
    progress.end_step(2)
    assert progress.loss is None
    mark.is_reached = True
    progress.end_step(3)
    assert progress.loss == 2.0


def test_a_loss_that_cannot_be_told_is_left_out_and_the_training_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class NotCopied(LossOnGpu):
        def to(self, device: str, *, non_blocking: bool) -> torch.Tensor:
            raise RuntimeError("CUDA error: out of memory")

    progress = on_gpu(Mark())
    progress.loss = 0.5
    steps._note_loss(progress, cast("torch.Tensor", NotCopied()), None)
    steps._note_loss(progress, torch.tensor(1 + 2j), None)
    progress.clock.device = torch.device("cuda", 1)
    monkeypatch.setattr(NotCopied, "to", lambda *_, **__: pytest.fail("of another GPU"))
    steps._note_loss(progress, cast("torch.Tensor", NotCopied()), None)
    assert progress.loss == 0.5


def test_one_backward_pass_is_split_where_the_clock_asks_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accelerator, progress = Accelerator(cpu=True), process_progress()
    monkeypatch.setattr(progress, "is_watched", True)
    monkeypatch.setattr(progress.clock, "phase", progress.clock.phase)  # as before, at the end
    splits: list[StepClock] = []
    monkeypatch.setattr(StepClock, "begin_exchange", lambda clock: splits.append(clock))
    for is_due in (False, True):
        monkeypatch.setattr(progress.clock, "splits_backward", is_due)
        loss = torch.ones(1, requires_grad=True).sum()
        accelerator.backward(loss, retain_graph=True)
        loss.backward()  # type: ignore[no-untyped-call]  # not timed
        assert len(splits) == is_due
    accumulation = accelerator.parts.training.accumulation
    monkeypatch.setattr(accumulation, "sync_gradients", False)
    with monkeypatch.context() as context:
        context.setattr(Progress, "end_backward", lambda _: None)
        accelerator.backward(loss)
    assert (len(splits), progress.clock.phase) == (1, GRADIENTS)  # there is no exchange


def test_gradients_that_no_step_used_are_noted_at_the_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for micro_batches in (4, 6):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
        layer = torch.nn.Linear(1, 1)
        model, optimizer = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
        for _ in range(micro_batches):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(1, 1)).sum())
                optimizer.step()
                optimizer.zero_grad()
        accelerator.end_training()
        assert ("were not used" in capsys.readouterr().err) == (micro_batches == 6)
