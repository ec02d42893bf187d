"""Handlers and plugins in one process: each is obeyed or refused."""

from __future__ import annotations

import dataclasses
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator
from headway.checkpoint.loading import weights_in
from headway.distributed.handler import handlers_by_kind
from headway.errors import UsageError
from headway.precision.precision import Fp16, PrecisionSettings
from headway.utils import (
    AutocastKwargs,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DynamoBackend,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    TorchDynamoPlugin,
)

CPU = torch.device("cpu")
ONES = torch.ones(1, 1)
HANDLERS = [
    *(AutocastKwargs, DistributedDataParallelKwargs, GradScalerKwargs, InitProcessGroupKwargs),
    *(ProfileKwargs, GradientAccumulationPlugin, TorchDynamoPlugin),
]


@pytest.mark.parametrize("kind", HANDLERS)
def test_fields_their_order_and_their_defaults_are_accelerate_s(kind: type[Any]) -> None:
    theirs = getattr(pytest.importorskip("accelerate.utils"), kind.__name__)
    names = [[field.name for field in dataclasses.fields(of)] for of in (kind, theirs)]
    assert names[0][: len(names[1])] == names[1]  # compare_weights is our own
    assert kind().to_kwargs() == theirs().to_kwargs() == {}
    defaults, expected = kind().to_dict(), theirs().to_dict()
    differ = {name for name in defaults if str(defaults[name]) != str(expected[name])}
    assert differ == {
        InitProcessGroupKwargs: {"timeout"},  # None is torch's, which depends on the device
        TorchDynamoPlugin: {"mode", "fullgraph", "use_regional_compilation"},  # None is torch's
    }.get(kind, set())


def test_a_handler_derived_from_another_counts_as_that() -> None:
    class Own(AutocastKwargs):
        pass

    handlers = handlers_by_kind([Own(enabled=False)], [AutocastKwargs])
    assert not handlers[AutocastKwargs].enabled


def test_handlers_for_several_ranks_have_nothing_to_do_with_one() -> None:
    ddp = DistributedDataParallelKwargs(find_unused_parameters=True, comm_hook="bf16")
    group = InitProcessGroupKwargs(timeout=timedelta(seconds=5), init_method="tcp://nowhere:1")
    accelerator = Accelerator(cpu=True, kwargs_handlers=[ddp, group, GradScalerKwargs()])
    model = torch.nn.Linear(1, 1)
    assert accelerator.prepare(model) is model


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"comm_hook": "bf15"}, "'bf15' for comm_hook: must be one of no, fp16, bf16, power_sgd"),
        ({"comm_wrapper": "power_sgd", "comm_hook": "fp16"}, "must be one of no, fp16, bf16"),
        ({"comm_hook": DDPCommunicationHookType.BATCHED_POWER_SGD}, "must be one of no, fp16"),
        ({"comm_wrapper": DDPCommunicationHookType.FP16}, "no comm_hook to wrap"),
        ({"comm_hook": "fp16", "comm_state_option": {"start_powerSGD_iter": 2}}, "for PowerSGD"),
    ],
)
def test_hooks_that_do_not_go_together_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        DistributedDataParallelKwargs(**fields)


def test_torch_s_batched_power_sgd_still_fails() -> None:
    """Once it does not, DistributedDataParallelKwargs need not refuse it."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    with pytest.raises((AssertionError, IndexError)):
        powerSGD_hook._orthogonalize(torch.ones(2, 1))  # type: ignore[no-untyped-call]


def test_the_loss_scale_is_the_handler_s() -> None:
    scaling = Fp16().set_up(CPU, PrecisionSettings(scaler=GradScalerKwargs(init_scale=8.0)))
    assert scaling.loss_scale() == 8
    off = Fp16().set_up(CPU, PrecisionSettings(scaler=GradScalerKwargs(enabled=False)))
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    off.backward(weight * 1.0)
    assert (off.loss_scale(), off.step(optimizer, None), weight.item()) == (1, False, 0)


def test_gradients_are_unscaled_once() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.parts.training.precision = Fp16().set_up(CPU)  # refused by name on CPUs
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = accelerator.prepare(torch.optim.SGD([weight], lr=1.0))
    accelerator.backward(weight * 3.0)
    for given in (None, optimizer, [optimizer]):
        accelerator.unscale_gradients(given)
        assert weight.grad is not None
        assert weight.grad.item() == 3
    optimizer.step()
    assert weight.item() == -3
    assert accelerator.scaler is not None
    assert Accelerator(cpu=True).scaler is None


def rounds(model: torch.nn.Module) -> bool:
    """Return whether `model` computes in bf16, which has no 1.001."""
    torch.nn.init.constant_(model.weight, 1.001)  # type: ignore[arg-type]
    return bool(model(ONES).item() != torch.tensor(1.001).item())


def test_autocast_is_the_handler_s() -> None:
    def linear() -> torch.nn.Module:
        return torch.nn.Linear(1, 1, bias=False)

    off = AutocastKwargs(enabled=False)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    assert rounds(accelerator.prepare(linear()))
    with accelerator.autocast(autocast_handler=off):
        assert not rounds(linear())
    with accelerator.autocast():
        assert rounds(linear())
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=[off])
    assert not rounds(accelerator.prepare(linear()))
    with accelerator.autocast(AutocastKwargs(cache_enabled=False)):
        assert rounds(linear())
        assert not torch.is_autocast_cache_enabled()


def steps_due(accelerator: Any) -> list[bool]:
    """Return when gradients are due in two epochs of five batches."""
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.zeros(5, 1))))
    due = []
    for _ in range(2):
        for _ in loader:
            with accelerator.accumulate():
                due.append(accelerator.sync_gradients)
    return due


@pytest.mark.parametrize("with_loader", [True, False])
def test_the_count_ends_with_the_loader_or_goes_on(with_loader: bool) -> None:
    fields: dict[str, Any] = {"num_steps": 3, "sync_with_dataloader": with_loader}
    ours = Accelerator(cpu=True, gradient_accumulation_plugin=GradientAccumulationPlugin(**fields))
    epoch = [False, False, True, False, True]
    expected = epoch * 2 if with_loader else [step % 3 == 0 for step in range(1, 11)]
    assert steps_due(ours) == expected
    assert ours.gradient_accumulation_steps == 3
    accelerate = pytest.importorskip("accelerate")
    plugin = accelerate.utils.GradientAccumulationPlugin(**fields)
    theirs = accelerate.Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    assert steps_due(theirs) == expected


class Blocks(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(4))
        self.head = torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = block(x).relu()
        return self.head(x)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo
@pytest.mark.parametrize("regional", [True, False])
def test_models_are_compiled_whole_or_block_by_block(regional: bool) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Any:
        graphs.append(sum(node.op == "placeholder" for node in graph.graph.nodes))
        return graph.forward

    torch.compiler.reset()
    plugin = TorchDynamoPlugin(backend=backend, use_regional_compilation=regional)
    accelerator = Accelerator(cpu=True, dynamo_plugin=plugin)
    plain = Blocks()
    expected = plain(torch.ones(1, 2))
    model = accelerator.prepare(plain)
    assert torch.allclose(model(torch.ones(1, 2)), expected)
    # weight, bias and input of a block, whose first input needs no gradient; ten and one in all
    assert graphs == ([3, 3] if regional else [11])
    assert list(accelerator.get_state_dict(model)) == list(plain.state_dict())
    assert ("_orig_mod" in str([*accelerator.get_state_dict(model, unwrap=False)])) != regional
    assert accelerator.unwrap_model(model, keep_torch_compile=False) is plain
    assert accelerator.prepare(model) is model
    torch.compiler.reset()


def test_weights_of_a_partly_compiled_model_have_their_own_names(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    names = list(model.state_dict())
    assert Accelerator(cpu=True).get_state_dict(model)._metadata  # type: ignore[attr-defined]
    model[0] = torch.compile(model[0], backend="eager")  # type: ignore[assignment]
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(model)
    assert list(accelerator.get_state_dict(model)) == names
    accelerator.save_model(model, tmp_path, safe_serialization=False)
    assert list(torch.load(tmp_path / "pytorch_model.bin")) == names
    assert list(weights_in(Path(accelerator.save_state(tmp_path / "saved")))[0]) == names


def test_a_model_without_repeated_blocks_is_compiled_whole() -> None:
    plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=True)
    model = Accelerator(cpu=True, dynamo_plugin=plugin).prepare(torch.nn.Linear(1, 1))
    assert hasattr(model, "_orig_mod")


def test_a_model_that_the_script_compiled_is_not_compiled_again() -> None:
    compiled: Any = torch.compile(torch.nn.Linear(1, 1), backend="eager")
    assert Accelerator(cpu=True, dynamo_backend="eager").prepare(compiled) is compiled


def test_no_and_unknown_backends() -> None:
    model = torch.nn.Linear(1, 1)
    for none in ("no", "NO", DynamoBackend.NO, None):
        assert Accelerator(cpu=True, dynamo_backend=none).prepare(model) is model
    with pytest.raises(UsageError, match="did you mean 'inductor'"):
        Accelerator(cpu=True, dynamo_backend="Inducter").prepare(model)
    assert TorchDynamoPlugin(backend="Inductor").backend is DynamoBackend.INDUCTOR


# torch 2.11 warns of every schedule
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")
def test_the_profiler_records_what_its_handler_says(tmp_path: Path) -> None:
    cycles = []
    handler = ProfileKwargs(
        activities=["cpu"],
        schedule_option={"wait": 0, "warmup": 1, "active": 2, "repeat": 1},
        on_trace_ready=lambda profiler: cycles.append(profiler.step_num),
        record_shapes=True,
        output_trace_dir=str(tmp_path / "new" / "folder"),
    )
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
    with accelerator.profile() as profiler:
        for size in range(1, 6):
            torch.ones(size, size).mm(torch.ones(size, size))
            profiler.step()
    assert cycles == [3]
    trace = json.loads((tmp_path / "new" / "folder" / "profile_0.json").read_text())
    products = [op for op in trace["traceEvents"] if op["name"] == "aten::mm"]
    assert [op["args"]["Input Dims"][0] for op in products] == [[2, 2], [3, 3]]


def test_a_handler_given_to_profile_goes_first() -> None:
    accelerator = Accelerator(cpu=True, kwargs_handlers=[ProfileKwargs(activities=["nothing"])])
    with accelerator.profile(ProfileKwargs(activities=["cpu"])) as profiler:
        ONES.exp()
    assert "aten::exp" in {row.key for row in profiler.key_averages()}
    with pytest.raises(UsageError, match="'nothing' for activity"), accelerator.profile():
        pass


def test_a_schedule_that_recorded_nothing_says_so(tmp_path: Path) -> None:
    handler = ProfileKwargs(
        activities=["cpu"],
        schedule_option={"wait": 5, "warmup": 1, "active": 1},
        output_trace_dir=str(tmp_path),
    )
    with pytest.warns(UserWarning, match="recorded nothing"):  # noqa: SIM117
        with Accelerator(cpu=True).profile(handler):
            ONES.exp()
    with pytest.raises(UsageError, match="schedule_option"):
        ProfileKwargs(schedule_option={"activ": 1}).build()
    with pytest.raises(UsageError, match="schedule_option"):
        ProfileKwargs(schedule_option={"wait": 0, "warmup": 1, "active": 0}).build()
