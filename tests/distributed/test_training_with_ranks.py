"""What training does on one, two and three real ranks (gloo)."""

from __future__ import annotations

import runpy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator
from headway.errors import MachineError
from headway.utils import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    TorchDynamoPlugin,
    find_executable_batch_size,
    set_seed,
)
from tests.distributed.in_ranks import (
    RANK,
    WORLD,
    each_world,
    in_ranks,
    marks,
    of_all_ranks,
    with_ranks,
)
from tests.distributed.launching import launch, script

pytestmark = marks(__name__)
PARITY = runpy.run_path(str(Path(__file__).resolve().parents[2] / "benchmarks" / "parity.py"))


def values(*models: torch.nn.Module) -> list[float]:
    found: list[float] = []
    for model in models:
        found += torch.nn.utils.parameters_to_vector(model.parameters()).tolist()
    return found


def agree(accelerator: Accelerator, model: torch.nn.Module) -> bool:
    """Return whether the gradients of all ranks are the same."""
    gathered = accelerator.gather([p.grad[None] for p in model.parameters()])  # type: ignore[index]
    return all(bool((t == t[:1]).all()) for t in gathered)


def sgd(model: torch.nn.Module, lr: float = 0.1, momentum: float = 0) -> Any:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)


@with_ranks(1, 2, long=(3,))
def test_weights_are_those_of_plain_torch_on_the_same_global_batches() -> None:
    """With and without bf16 and accumulation, and where the data cannot be shared out evenly."""
    found = PARITY["compare"]()
    for (precision, *_), difference in zip(PARITY["COMBINATIONS"], found, strict=True):
        assert difference <= (1e-2 if precision == "bf16" else 1e-6)


@with_ranks(1, 2, long=(3,))
def test_one_scheduler_step_per_optimizer_step_also_in_an_incomplete_window() -> None:
    """In an epoch of 10 batches in each rank."""
    for accumulation, split, steps in ((1, False, 10), (1, True, 10), (3, False, 4)):
        accelerator = Accelerator(split_batches=split, gradient_accumulation_steps=accumulation)
        model = torch.nn.Linear(1, 1)
        optimizer = sgd(model, lr=1.0)
        scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 20)
        loader = DataLoader(TensorDataset(torch.randn(10 * WORLD, 1)), WORLD if split else 1)
        scheduler, loader, model, optimizer = accelerator.prepare(
            scheduler, loader, model, optimizer
        )
        due = []
        for (x,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).mean() * 0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            due.append(accelerator.sync_gradients)
        assert sum(due) == scheduler.last_epoch == steps
        assert scheduler.get_last_lr() == [pytest.approx(1 - steps / 20)]
        assert due[-1]


@with_ranks(2)
def test_an_optimizer_with_a_closure_sees_the_loss_of_all_ranks() -> None:
    set_seed(0)
    data, accelerator = torch.randn(8, 3), Accelerator()
    plain, model = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)
    model.load_state_dict(plain.state_dict())
    prepared = accelerator.prepare(model)

    def fit(trained: torch.nn.Module, x: torch.Tensor) -> None:
        optimizer: Any = torch.optim.LBFGS(
            trained.parameters(), line_search_fn="strong_wolfe", max_iter=5
        )
        optimizer = accelerator.prepare(optimizer) if trained is prepared else optimizer

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = (trained(x)[:, 0] - x.exp().sum(1)).square().mean()
            (accelerator.backward if trained is prepared else torch.Tensor.backward)(loss)
            return loss

        for _ in range(3):
            optimizer.step(closure)

    fit(plain, data)
    fit(prepared, data[4 * RANK :][:4])
    assert values(model) == pytest.approx(values(plain), abs=1e-4)


@with_ranks(2, long=(3,))
def test_gradients_stay_on_their_rank_until_they_are_due() -> None:
    set_seed(0)
    data = TensorDataset(torch.randn(5 * WORLD, 3))
    set_seed(RANK)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, loader = accelerator.prepare(torch.nn.Linear(3, 1), DataLoader(data, batch_size=1))
    found = []
    for (x,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x + RANK).square().mean())
        found.append(agree(accelerator, model))
        if accelerator.sync_gradients:
            model.zero_grad()
    assert found == [False, True, False, True, True]


@with_ranks(2, long=(3,))
def test_sync_each_batch_exchanges_gradients_of_every_micro_batch() -> None:
    for each, expected in ((False, [False, True, False, True]), (True, [True] * 4)):
        plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=each)
        accelerator = Accelerator(gradient_accumulation_plugin=plugin)
        model = accelerator.prepare(torch.nn.Linear(2, 1))
        found = []
        for _ in range(4):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.full((1, 2), 1.0 + RANK)).sum())
            found.append(agree(accelerator, model))
            if accelerator.sync_gradients:
                model.zero_grad()
        assert found == expected


@with_ranks(2, long=(3,))
def test_an_exchange_can_be_triggered_in_the_last_of_several_backward_passes() -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    with accelerator.no_sync(model):
        losses = [model(torch.full((1, 2), 1.0 + RANK)).sum() for _ in range(2)]
    accelerator.backward(losses[0])
    assert not agree(accelerator, model)
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(losses[1])
    assert agree(accelerator, model)


@with_ranks(2)
def test_accumulate_holds_back_the_models_it_is_given_compiled_or_not() -> None:
    set_seed(3)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    a, b, c = accelerator.prepare(*(torch.nn.Linear(2, 1) for _ in range(3)))
    compiled: Any = torch.compile(c, backend="eager")
    with accelerator.accumulate(a, compiled):
        for model in (a, b, compiled):
            accelerator.backward(model(torch.ones(1, 2) * (RANK + 1)).sum())
    assert [agree(accelerator, model) for model in (a, b, c)] == [False, True, False]


@with_ranks(1, 2)
def test_weights_are_saved_under_the_names_of_one_process() -> None:
    accelerator = Accelerator()
    plain = torch.nn.Sequential(torch.nn.Linear(2, 1))
    prepared = accelerator.prepare(plain)
    compiled: Any = torch.compile(prepared, backend="eager")
    other: Any = torch.compile(torch.nn.Sequential(torch.nn.Linear(2, 1)), backend="eager")
    for model in (prepared, compiled, accelerator.prepare(other)):
        unwrapped = accelerator.unwrap_model(model, keep_torch_compile=False)
        for state in (accelerator.get_state_dict(model), unwrapped.state_dict()):
            assert list(state) == ["0.weight", "0.bias"]
    assert accelerator.unwrap_model(prepared) is plain
    unwrapped = accelerator.unwrap_model(compiled)
    assert unwrapped(torch.ones(1, 2)).equal(plain(torch.ones(1, 2)))


@with_ranks(1, 2)
def test_compiled_models_train_alike_and_keep_the_names_of_their_weights() -> None:
    for regional in (False, True):
        plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=regional)
        accelerator = Accelerator(dynamo_plugin=plugin, mixed_precision="bf16")
        blocks = [torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh()) for _ in range(2)]
        model = accelerator.prepare(torch.nn.Sequential(*blocks))
        accelerator.backward(model(torch.full((1, 2), 1.0 + RANK)).sum())
        assert agree(accelerator, model)
        unwrapped = accelerator.unwrap_model(model, keep_torch_compile=False)
        assert [*unwrapped.state_dict()] == ["0.0.weight", "0.0.bias", "1.0.weight", "1.0.bias"]


@with_ranks(1, 2, long=(3,))
def test_a_model_for_evaluation_exchanges_nothing() -> None:
    model: Any = torch.nn.Linear(1, 1)
    prepared = Accelerator().prepare_model(model, evaluation_mode=True)
    assert type(prepared) is torch.nn.Linear


@in_ranks(1, 2, 3)
def weights_of_two_models() -> dict[str, list[float]]:
    """Generator and critic, each with its optimizer, after three steps on the same global batch."""
    result = {}
    for precision in ("no", "bf16"):
        set_seed(4)
        accelerator = Accelerator(mixed_precision=precision)
        g, d = torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)
        loader = DataLoader(TensorDataset(torch.randn(36, 3)), batch_size=12 // WORLD)
        g_steps, d_steps = (sgd(net, lr=0.5) for net in (g, d))
        g, d, g_steps, d_steps, loader = accelerator.prepare(g, d, g_steps, d_steps, loader)
        for (x,) in loader:
            fake = g(x)
            assert fake.dtype == torch.float32
            if precision == "bf16":
                assert fake.equal(fake.bfloat16().float())
            accelerator.backward(d(fake.detach()).square().mean())
            d_steps.step()
            d_steps.zero_grad()
            accelerator.backward((d(g(x)) - 1).square().mean())
            g_steps.step()
            g_steps.zero_grad()
            d_steps.zero_grad()
        result[precision] = values(g, d)
    return result


@each_world(2, long=(3,))
@pytest.mark.parametrize(("precision", "tolerance"), [("no", 1e-5), ("bf16", 0.05)])
def test_two_models_with_an_optimizer_each_train_alike_with_any_number_of_ranks(
    world: int, precision: str, tolerance: float
) -> None:
    alone = weights_of_two_models(1)[0][precision]
    ranks = [rank[precision] for rank in weights_of_two_models(world)]
    assert ranks == [ranks[0]] * world
    assert ranks[0] == pytest.approx(alone, abs=tolerance)


@with_ranks(2, long=(3,))
def test_each_rank_goes_on_with_its_own_buffers_from_a_checkpoint() -> None:
    def prepared() -> tuple[Accelerator, Any]:
        accelerator = Accelerator(cpu=True)
        model: Any = accelerator.prepare(torch.nn.BatchNorm1d(3))
        return accelerator, model

    def went_on(model: Any) -> list[list[float]]:
        own = getattr(model, "module", model)
        before = own.running_mean.tolist()  # read by this rank alone
        mine = torch.full((4, 3), 10.0 + RANK)
        return [before, [model(mine).sum().item()], own.running_mean.tolist()]

    for with_gradients in (True, False):
        accelerator, model = prepared()
        with torch.set_grad_enabled(with_gradients):
            model(torch.full((4, 3), 1.0 + RANK))
        accelerator.save_state("buffers")
        saved = went_on(model)
        accelerator, model = prepared()
        accelerator.load_state("buffers")
        assert went_on(model) == saved
    before, _, after = zip(*of_all_ranks(saved), strict=True)
    assert len({*map(tuple, before)}) == len({*map(tuple, after)}) == WORLD, "DDP leaves them"


class Partly(torch.nn.Module):
    """Leaves a layer out."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.used(x)


@with_ranks(2, long=(3,))
def test_find_unused_parameters_reaches_ddp() -> None:
    def train(finds: bool) -> None:
        handler = DistributedDataParallelKwargs(find_unused_parameters=finds)
        accelerator = Accelerator(kwargs_handlers=[handler])
        model = accelerator.prepare(Partly())
        for _ in range(2):
            accelerator.backward(model(torch.ones(1, 2)).sum())

    train(True)
    with pytest.raises(RuntimeError):
        train(False)


def prepared_with_hook(hook: DDPCommunicationHookType) -> tuple[Accelerator, Any]:
    handler = DistributedDataParallelKwargs(comm_hook=hook)
    if hook is DDPCommunicationHookType.POWER_SGD:
        handler.comm_state_option = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 2}
    accelerator = Accelerator(kwargs_handlers=[handler])
    return accelerator, accelerator.prepare(torch.nn.Linear(4, 4, bias=False))


@with_ranks(2, long=(3,))
def test_gradients_are_exchanged_by_the_hook() -> None:
    found = {}
    for hook in ("no", "fp16", "power_sgd"):
        accelerator, model = prepared_with_hook(DDPCommunicationHookType(hook))
        for _ in range(4):
            model.zero_grad()
            accelerator.backward(model(torch.full((1, 4), 1.01 * (RANK + 1))).sum())
        found[hook] = next(model.parameters()).grad.flatten()[0].item()
    mean = 1.01 * (WORLD + 1) / 2
    assert found["no"] == pytest.approx(mean, abs=1e-6)
    assert found["fp16"] != found["no"]
    assert found["fp16"] == pytest.approx(mean, abs=1e-3)
    assert found["power_sgd"] == pytest.approx(mean, abs=1e-4)


@with_ranks(2, long=(3,))
def test_a_hook_that_torch_cannot_run_here_is_refused() -> None:
    has_hook = torch.version.cuda is not None or torch.version.hip is not None
    with nullcontext() if has_hook else pytest.raises(MachineError):
        prepared_with_hook(DDPCommunicationHookType.BF16)


@with_ranks(1, 2)
def test_the_batch_size_that_the_rank_with_least_memory_can_use_is_that_of_all() -> None:
    """The last rank runs out of memory; the others train their attempt to its end."""
    accelerator = Accelerator()
    tried = []

    @find_executable_batch_size(starting_batch_size=64)
    def train(batch_size: int) -> None:
        tried.append(batch_size)
        accelerator.free_memory()
        data = TensorDataset(torch.ones(256, 2))
        model = accelerator.prepare(torch.nn.Linear(2, 1))
        for (x,) in accelerator.prepare(DataLoader(data, batch_size=batch_size)):
            accelerator.backward(model(x).mean())
        if RANK == WORLD - 1 and batch_size > 16:
            raise torch.OutOfMemoryError

    train()
    train()
    assert tried == [64, 32, 16, 16]
    assert of_all_ranks(RANK) == [*range(WORLD)]


OUT_OF_MEMORY_ALONE = """
import torch
from headway import Accelerator, find_executable_batch_size
accelerator = Accelerator(cpu=True)
@find_executable_batch_size(starting_batch_size=64)
def train(batch_size):
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    if accelerator.process_index == 1:
        raise torch.OutOfMemoryError
    accelerator.backward(model(torch.ones(1, 2)).mean())
train()
"""


def test_out_of_memory_on_a_rank_for_which_others_wait_in_a_collective_ends_the_run() -> None:
    done = launch("-q", "--cpu", "--num-processes", "2", script(OUT_OF_MEMORY_ALONE), timeout_s=60)
    assert done.returncode == 2, done.stderr
    assert "OutOfMemory: memory ran out on this rank alone: rank 1 is waiting in" in done.stderr
    assert "smaller starting_batch_size" in done.stderr


COUNTS = [7, 0, 1, 30, 2, 0, 5, 11, 3, 0, 0, 0, 4, 19, 1, 6, 0, 23]
"""The tokens of 18 micro-batches, of which any number of ranks and steps has its share."""


@in_ranks(1, 2, 3)
def weights_of_the_token_mean() -> dict[tuple[int, str], list[float]]:
    """Weights after two optimizer steps, on all tokens in a different division."""
    return {
        (accumulation, way): _train_on_tokens(accumulation, way)
        for accumulation in (1, 3)
        for way in ("accumulate", "clip")
    }


def _train_on_tokens(accumulation: int, way: str) -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 5, dtype=torch.float64)
    inputs = torch.randn(sum(COUNTS), 3, dtype=torch.float64)
    targets = torch.randint(5, (sum(COUNTS),))
    accelerator = Accelerator(gradient_accumulation_steps=accumulation)
    optimizer = sgd(model, lr=0.3, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    rows = torch.split(torch.arange(sum(COUNTS)), COUNTS)
    for half in (rows[:9], rows[9:]):
        for step in range(accumulation):
            mine = torch.cat(half[RANK * accumulation + step :: WORLD * accumulation])
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(
                    model(inputs[mine]), targets[mine], reduction="sum"
                )
                accelerator.backward(loss, num_tokens=len(mine))
                if way == "clip":
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return values(model)


@each_world(1, 2, long=(3,))
def test_the_gradient_is_that_of_the_mean_over_all_tokens_however_they_are_shared_out(
    world: int,
) -> None:
    alone = weights_of_the_token_mean(1)[0]
    for rank in weights_of_the_token_mean(world):
        for (_, way), found in rank.items():
            expected = alone[1, "clip" if way == "clip" else "accumulate"]
            assert found == pytest.approx(expected, rel=1e-9)


MODEL_OUTLIVES_ITS_GROUP = """
import sys, torch
from headway import Accelerator
sys.setswitchinterval(3)  # no thread gets Python's lock in passing
def main():
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    for _ in range(20):
        tensors = accelerator.gather((torch.ones(8), torch.ones(8)))
    accelerator.end_training()
main()
"""


def test_a_model_that_outlives_its_group_does_not_wait_for_good() -> None:
    """Torch's reducer waits for gloo's threads while it has Python's lock, and they want it too."""
    words = ("-q", "--cpu", "--num-processes", "4", script(MODEL_OUTLIVES_ITS_GROUP))
    done = launch(*words, timeout_s=60)
    assert done.returncode == 0, done.stderr
