"""Sharded training on 2 gloo ranks, and on 3 and 4: the numbers of one process, and its memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

from headway import Accelerator
from headway.distributed.collectives import full_tensor
from headway.errors import HeadwayError
from tests.distributed import fsdp_parity
from tests.distributed.fsdp_models import GPT, MLP, VOCABULARY
from tests.distributed.in_ranks import RANK, WORLD, each_world, in_ranks, marks, with_ranks

pytestmark = marks(__name__)
LONG = (3, 4)
TOKENS = torch.arange(48).reshape(6, 8) % VOCABULARY
FEW = ("gpt sgd 3", "mlp adamw 1")
"""The cases that are trained on 2 ranks in every run of the tests."""


def fsdp(**settings: Any) -> Accelerator:
    return Accelerator(cpu=True, **{"strategy": "fsdp", **settings})


def prepared(accelerator: Accelerator, seed: int = 0) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    found: tuple[Any, Any] = accelerator.prepare(model, optimizer)
    return found


def own_rows() -> Tensor:
    each = len(TOKENS) // WORLD
    return TOKENS[RANK * each :][:each]


def train(accelerator: Accelerator, model: Any, optimizer: Any, steps: int = 2) -> None:
    for _ in range(steps):
        accelerator.backward(model(own_rows()))
        optimizer.step()
        optimizer.zero_grad()


def weights(accelerator: Accelerator, model: Any) -> Tensor:
    """Return all weights in full, on every rank."""
    with accelerator.unsharded(model) as inner:
        return torch.cat([p.detach().flatten().clone() for p in inner.parameters()])


def is_sharded(model: Any) -> bool:
    return all(hasattr(p, "full_tensor") for p in model.parameters())


def require_near(one: Tensor, other: Tensor, limit: float, name: str = "") -> None:
    assert float((one - other).abs().max()) <= limit, name


@with_ranks(2, long=LONG)
def test_weights_gradients_and_norms_are_those_of_one_process() -> None:
    cases, steps = (FEW, 7) if WORLD == 2 else (fsdp_parity.CASES, 20)
    found = fsdp_parity.differences(cases, steps)
    for case, differences in found.items():
        # Adam amplifies differences of rounding where gradients are near zero
        assert differences["weights"] <= (1e-5 if "adamw" in case else 1e-6), case
        assert differences["gradients"] <= 1e-6, case
        assert differences["norms"] <= 2e-6, case
        assert differences["learning rates"] == 0, case


@with_ranks(2, long=LONG)
def test_a_rank_holds_its_share_and_sharding_takes_the_model_and_one_unit_at_most() -> None:
    for is_empty in (False, True):  # whether the model was made without memory
        found = fsdp_parity.measured(is_empty)
        share = found.model / WORLD
        assert found.parameters == pytest.approx(share, rel=0.05)
        assert found.gradients == pytest.approx(share, rel=0.05)
        assert found.optimizer == pytest.approx(2 * share, rel=0.05)
        assert found.after <= found.parameters * 1.01, "the whole model is freed"
        whole = found.parameters * 1.05 if is_empty else found.model
        assert found.peak <= whole + found.unit


@with_ranks(2, long=LONG)
def test_what_cannot_work_is_refused_on_every_rank() -> None:
    accelerator = fsdp()
    before = list((plain := GPT()).parameters())
    model = accelerator.prepare(plain)
    alone = nn.Linear(2, 2)
    scalar = MLP()
    scalar.scale = nn.Parameter(torch.tensor(1.0))
    hooked = nn.Linear(2, 2)
    hooked.weight.register_hook(print)  # type: ignore[no-untyped-call]
    with accelerator.empty_init():
        empty = MLP()
        empty.offset = nn.Parameter(torch.zeros(3))

    def with_optimizer(kind: Any) -> None:
        other = MLP()
        fsdp().prepare(other, kind(other.parameters()))

    def mixed() -> None:
        accelerator.clip_grad_norm_([*model.parameters(), *alone.parameters()], 1.0)

    def joined() -> None:
        with accelerator.join_uneven_inputs([model]):
            pass

    def state_dict_of_whole() -> None:
        with accelerator.unsharded(model) as inner:
            inner.state_dict()

    def tokens_withheld() -> None:
        with accelerator.no_sync(model):
            accelerator.backward(model(own_rows()), num_tokens=8)

    cases: dict[str, Callable[[], object]] = {
        "num_tokens under no_sync": tokens_withheld,
        "state_dict in whole": state_dict_of_whole,
        "deepcopy": lambda: copy.deepcopy(model),
        "deepcopy of a unit": lambda: copy.deepcopy(model.blocks[0]),
        "AveragedModel": lambda: torch.optim.swa_utils.AveragedModel(model),
        "Adafactor": lambda: with_optimizer(torch.optim.Adafactor),
        "Rprop": lambda: with_optimizer(torch.optim.Rprop),
        "one layer more on a rank": lambda: accelerator.prepare(
            nn.Sequential(*[nn.Linear(2, 2) for _ in range(2 + RANK)])
        ),
        "frozen on a rank": lambda: accelerator.prepare(
            nn.Linear(2, 2).requires_grad_(accelerator.is_main_process)
        ),
        "tied on a rank": lambda: accelerator.prepare(
            nn.ParameterList([alone.weight, alone.weight if RANK else alone.weight.clone()])
        ),
        "empty parameter": lambda: accelerator.prepare(nn.Linear(0, 3)),
        "two dtypes": lambda: fsdp(wrap=10**6).prepare(
            nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
        ),
        "optimizer of no prepared model": lambda: accelerator.prepare(
            torch.optim.SGD(alone.parameters(), lr=1.0)
        ),
        "sharded and other parameters": mixed,
        "part of the weights": lambda: accelerator.save(model.state_dict(), "part.pt"),
        "parameters from before, norm": lambda: accelerator.clip_grad_norm_(before, 1.0),
        "parameters from before, value": lambda: accelerator.clip_grad_value_(before, 1.0),
        "parameters from before, loss": lambda: accelerator.backward(before[0].sum()),
        "a hook before": lambda: accelerator.prepare(hooked),
        "a hook after": lambda: next(model.parameters()).register_hook(print),
        "class that is not there": lambda: fsdp(wrap="Blok").prepare(GPT()),
        "shard_size that does not divide": lambda: fsdp(strategy="hsdp", shard_size=5),
        "hsdp without shard_size": lambda: fsdp(strategy="hsdp"),
        "cpu_offload on a CPU": lambda: fsdp(cpu_offload=True),
        "join_uneven_inputs": joined,
        "nothing initialises it": lambda: accelerator.prepare(empty),
    }
    for name, call in cases.items():
        with pytest.raises(HeadwayError) as refused:
            call()
        problem = refused.value.problems[0]
        assert problem.where, name
        assert problem.fix, name
    for impossible in (scalar, nn.ModuleList([nn.Linear(1, 1)])):
        with pytest.raises(ValueError, match="fully_shard"):  # torch's own
            accelerator.prepare(impossible)


@with_ranks(2, long=LONG)
def test_evaluation_leaves_parameters_sharded_and_training_goes_on() -> None:
    accelerator = fsdp(forward_methods=["logits"])
    model, optimizer = prepared(accelerator)
    with torch.inference_mode():  # as the very first pass
        logits = model.logits(TOKENS)
        model(TOKENS)
    assert is_sharded(model)
    train(accelerator, model, optimizer)
    with torch.no_grad():
        assert not torch.equal(model.logits(TOKENS), logits)
    assert accelerator.unwrap_model(model) is model
    assert accelerator.distributed_type == "FSDP"


class Autoencoder(nn.Module):
    """A model whose forward() calls a method that is also called by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 4), nn.Linear(4, 8)

    def encode(self, x: Tensor) -> Tensor:
        return self.inner(x).relu()  # type: ignore[no-any-return]

    def error(self, x: Tensor) -> Tensor:
        return self(x) - self.outer(self.encode(x))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.encode(x))  # type: ignore[no-any-return]


@with_ranks(2, long=LONG)
def test_methods_and_whole_weights_are_as_without_sharding() -> None:
    accelerator = fsdp(forward_methods=["encode", "error"])
    torch.manual_seed(0)
    plain = Autoencoder()
    x = torch.randn(3, 8)
    encoded, decoded = plain.encode(x).detach(), plain(x).detach()
    model: Any = accelerator.prepare(plain)
    accelerator.backward(model(x).sum())
    inner: Any
    with accelerator.unsharded(model) as inner:
        assert inner.inner.weight.shape == (4, 8)
        weight = inner.inner.weight.clone()
    assert torch.allclose(model(x), decoded)
    assert torch.allclose(model.encode(x), encoded)
    assert bool((model.error(x).abs() < 1e-6).all())
    assert is_sharded(model)
    state = accelerator.get_state_dict(model)
    assert RANK or torch.equal(state["inner.weight"], weight)
    model.zero_grad()
    accelerator.backward(model.encode(x).sum())
    torch.manual_seed(0)
    expected: Any = Autoencoder()
    expected.encode(x).sum().backward()
    assert torch.allclose(model.inner.weight.grad.full_tensor(), expected.inner.weight.grad)


@with_ranks(2, long=LONG)
def test_a_state_is_whole_on_rank_0_and_files_are_small() -> None:
    accelerator = fsdp()
    model, optimizer = prepared(accelerator)
    train(accelerator, model, optimizer)
    state = accelerator.get_state_dict(model)
    accelerator.save_model(model, "files", max_shard_size=2000)
    accelerator.wait_for_everyone()
    files = sorted(Path("files").glob("*.safetensors"))
    read = {name: t for path in files for name, t in load_file(path).items()}
    assert bool(state) == (RANK == 0)
    assert len(files) > 2
    assert max(path.stat().st_size for path in files) < 2000 + 2000
    assert all(torch.equal(t, read[name]) for name, t in state.items() if name in read)
    assert ("head.weight" in read) != ("token.weight" in read), "tied weights are there once"


@in_ranks(1)
def saved_by_one_rank() -> float:
    """Save as "of one rank", and return the sum of the weights."""
    accelerator = Accelerator(cpu=True)
    model, optimizer = prepared(accelerator, seed=9)
    train(accelerator, model, optimizer)
    accelerator.save_state("of one rank")
    return float(weights(accelerator, model).double().sum())


@pytest.fixture(scope="module", autouse=True)
def checkpoint_of_one_rank() -> None:
    """Have it before other ranks start, which go on from it."""
    saved_by_one_rank(1)


@in_ranks(2, *LONG)
def saved_and_loaded() -> tuple[Path, float]:
    """Return where there are checkpoints, and the sum of the weights that one rank saved."""
    accelerator = fsdp()
    model, optimizer = prepared(accelerator)
    train(accelerator, model, optimizer)
    accelerator.save_state("sharded")
    train(accelerator, model, optimizer)
    expected = weights(accelerator, model)
    for strategy, limit in (("fsdp", 0.0), ("ddp", 1e-6)):
        other = fsdp(strategy=strategy)
        model, optimizer = prepared(other, seed=5)
        other.load_state("sharded")
        train(other, model, optimizer)
        require_near(weights(other, model), expected, limit, strategy)
        other.save_state(strategy)
    other = fsdp()
    model, optimizer = prepared(other, seed=6)
    other.load_state("ddp")
    require_near(weights(other, model), expected, 1e-6)
    assert all(hasattr(state["exp_avg"], "full_tensor") for state in optimizer.state.values())
    other.load_state("../1/of one rank")
    return Path.cwd(), float(weights(other, model).double().sum())


@each_world(2, long=LONG)
def test_checkpoints_go_on_with_and_without_sharding_and_with_another_number_of_ranks(
    world: int,
) -> None:
    [folder, *_], totals = zip(*saved_and_loaded(world), strict=True)
    for total in totals:
        assert total == pytest.approx(saved_by_one_rank(1)[0], abs=1e-4)
    accelerator = Accelerator(cpu=True)
    model, optimizer = prepared(accelerator, seed=4)
    accelerator.load_state(folder / "sharded")
    saved = nn.utils.parameters_to_vector(model.parameters())
    other = Accelerator(cpu=True)
    again, _ = prepared(other, seed=5)
    other.load_state(folder / "fsdp")
    assert not torch.equal(saved, nn.utils.parameters_to_vector(again.parameters()))
    assert {state["exp_avg"].shape for state in optimizer.state.values()} == {
        p.shape for p in model.parameters()
    }


@with_ranks(2, long=LONG)
def test_a_training_goes_on_from_the_middle_of_an_accumulation() -> None:
    def micro_batch(accelerator: Accelerator, model: Any, optimizer: Any) -> None:
        with accelerator.accumulate(model):
            accelerator.backward(model(own_rows()))
            optimizer.step()
            optimizer.zero_grad()

    one, other = (fsdp(gradient_accumulation_steps=2) for _ in range(2))
    model, optimizer = prepared(one)
    for _ in range(3):
        micro_batch(one, model, optimizer)
    one.save_state("between")
    micro_batch(one, model, optimizer)
    again, another = prepared(other, seed=8)
    other.load_state("between")
    micro_batch(other, again, another)
    require_near(weights(other, again), weights(one, model), 2e-6)


@with_ranks(2, long=LONG)
def test_all_ways_to_train_come_to_the_same_weights() -> None:
    accelerator = fsdp()
    model, optimizer = prepared(accelerator)
    train(accelerator, model, optimizer)
    expected = weights(accelerator, model)
    cases: dict[str, dict[str, Any]] = {
        "ddp": {"strategy": "ddp"},
        "hsdp": {"strategy": "hsdp", "shard_size": 2},
        "activation checkpointing": {"activation_checkpointing": True},
        "one unit": {"wrap": 10**6},
        "named units": {"wrap": ["Block", "Embedding"]},
    }
    for name, settings in cases.items():
        if name == "hsdp" and WORLD % 2:
            continue
        other = fsdp(**settings)
        model, optimizer = prepared(other)
        train(other, model, optimizer)
        require_near(weights(other, model), expected, 2e-6, name)
    other = fsdp()
    model, optimizer = prepared(other)
    for _ in range(2):
        with other.no_sync(model):
            other.backward(model(own_rows()) * 0.25)
        other.backward(model(own_rows()) * 0.75)
        optimizer.step()
        optimizer.zero_grad()
    require_near(weights(other, model), expected, 2e-6, "no_sync")
    other = fsdp(gradient_accumulation_steps=2)
    model, optimizer = prepared(other)
    for part in (own_rows(),) * 4:
        with other.accumulate(model):
            tokens = part[:, 1:].numel()
            other.backward(model(part) * tokens, num_tokens=tokens)
            optimizer.step()
            optimizer.zero_grad()
    require_near(weights(other, model), expected, 2e-6, "num_tokens")


@with_ranks(2, long=LONG)
def test_an_average_of_weights_is_the_same_with_every_strategy() -> None:
    """Kept as the documentation says."""
    sums = []
    for strategy in ("ddp", "fsdp"):
        accelerator = fsdp(strategy=strategy)
        model, optimizer = prepared(accelerator)
        average = [p.detach().clone() for p in model.parameters()]
        for _ in range(2):
            train(accelerator, model, optimizer, 1)
            torch._foreach_lerp_(average, [p.detach() for p in model.parameters()], 0.25)
        with torch.no_grad():
            for parameter, mean in zip(model.parameters(), average, strict=True):
                parameter.copy_(mean)
        sums.append(float(weights(accelerator, model).double().sum()))
    assert sums[1] == pytest.approx(sums[0], abs=1e-5)


class Kept:
    """Tensors that a checkpoint has; loaded in their place, or instead of them."""

    def __init__(self, tensors: list[Tensor], *, in_place: bool = True) -> None:
        self.tensors, self.in_place = tensors, in_place

    def state_dict(self) -> dict[str, Any]:
        return {"tensors": self.tensors}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not self.in_place:
            self.tensors = state["tensors"]
        for tensor, saved in zip(self.tensors, state["tensors"], strict=True):
            tensor.copy_(saved)


@with_ranks(2, long=LONG)
def test_a_registered_average_comes_back_in_the_shards_in_which_it_was_given() -> None:
    def averages(strategy: str, seed: int) -> tuple[Accelerator, list[Any], list[Kept]]:
        accelerator = fsdp(strategy=strategy)
        model, _ = prepared(accelerator, seed)
        parameters = [p.detach() for p in model.parameters()]
        kept = [Kept([p + 1 for p in parameters]), Kept([], in_place=False)]
        accelerator.register_for_checkpointing(*kept)
        return accelerator, parameters, kept

    for saved, loaded in (("fsdp", "fsdp"), ("fsdp", "ddp"), ("ddp", "fsdp")):
        one, _, kept = averages(saved, seed=0)
        kept[1].tensors = kept[0].tensors[:2]
        one.save_state(f"averages {saved} {loaded}")
        whole = [full_tensor(each) for each in kept[0].tensors]
        other, parameters, again = averages(loaded, seed=1)
        other.load_state(f"averages {saved} {loaded}")
        for tensors in (again[0].tensors, again[1].tensors):
            for each, value in zip(tensors, whole, strict=False):
                assert torch.equal(full_tensor(each), value)
        if saved == loaded:
            loaded_tensors: list[Any] = again[1].tensors
            for back, live in zip(loaded_tensors, parameters, strict=False):
                assert type(back) is type(live)
                assert back.placements == live.placements


@with_ranks(2, long=LONG)
def test_several_models_and_frozen_parameters_train_as_ever() -> None:
    accelerator = fsdp()
    torch.manual_seed(0)
    one, two = MLP(), MLP()
    optimizers: Any = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (one, two)]
    models: Any = (one, two)
    *models, first, second = accelerator.prepare(one, two, *optimizers)
    frozen = models[0].layers[2].weight
    before = full_tensor(frozen).clone()
    for is_trained in (False, True):
        models[0].layers[2].requires_grad_(is_trained)
        for model, optimizer in zip(models, (first, second), strict=True):
            train(accelerator, model, optimizer, 1)
        assert torch.equal(full_tensor(frozen), before) != is_trained


@with_ranks(long=LONG)
def test_hsdp_reduces_over_copies_once_for_each_optimizer_step() -> None:
    if WORLD % 2:
        return
    calls: list[int] = []
    profile, kinds = torch.profiler.profile, [torch.profiler.ProfilerActivity.CPU]

    def trained_by(strategy: str, **settings: Any) -> torch.Tensor:
        accelerator = fsdp(strategy=strategy, gradient_accumulation_steps=3, **settings)
        model, optimizer = prepared(accelerator)
        for _ in range(6):
            with accelerator.accumulate(model):
                with profile(activities=kinds) as seen:
                    accelerator.backward(model(own_rows()))
                calls.append(sum("allreduce" in event.name for event in seen.events()))
                optimizer.step()
                optimizer.zero_grad()
        return weights(accelerator, model)

    expected = trained_by("ddp")
    calls.clear()
    require_near(trained_by("hsdp", shard_size=2), expected, 2e-6, "hsdp")
    first, second, last, *_ = calls
    assert first == second == 0 < last, calls


@with_ranks(2, long=LONG)
def test_metrics_are_gathered_once_for_each_sample() -> None:
    for strategy in ("fsdp", "hsdp") if WORLD % 2 == 0 else ("fsdp",):
        accelerator = fsdp(strategy=strategy, shard_size=2 if strategy == "hsdp" else None)
        data: Any = torch.arange(11)
        loader = accelerator.prepare(DataLoader(data, batch_size=2))
        gathered = [accelerator.gather_for_metrics(batch) for batch in loader]
        assert torch.cat(gathered).tolist() == list(range(11))


@in_ranks(2, *LONG)
def buffers() -> list[float]:
    model = fsdp().prepare(nn.BatchNorm1d(3))
    model(torch.full((4, 3), float(RANK)))
    model(torch.zeros(4, 3))
    model.eval()(torch.zeros(4, 3))
    return [float(x) for x in model.running_mean]


@each_world(2, long=LONG)
def test_buffers_are_those_of_rank_0(world: int) -> None:
    first, *others = buffers(world)
    assert others == [first] * len(others)
