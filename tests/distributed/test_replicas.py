"""Ranks whose models differ are told so; what can be right is: on two and three real ranks."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import re
from collections.abc import Callable
from contextlib import redirect_stderr
from functools import partial
from typing import Any
from unittest.mock import patch
from warnings import catch_warnings, simplefilter

import pytest
import torch
from torch.optim.lr_scheduler import ConstantLR, ReduceLROnPlateau
from torch.utils.checkpoint import checkpoint

from headway import Accelerator, DistributedDataParallelKwargs
from headway.errors import CheckpointError, HeadwayError, UsageError
from headway.ipc import stderr
from headway.ipc.progress import process_progress
from headway.utils import set_seed
from tests.distributed.in_ranks import RANK, WORLD, marks, with_ranks

pytestmark = marks(__name__)

SINGLE: Any = torch.arange(12.0).reshape(6, 2) / 10
DATA = SINGLE[RANK::WORLD]


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(RANK)  # the ranks disagree
        self.body, self.head = torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x))  # type: ignore[no-any-return]

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).tanh()  # type: ignore[no-any-return]

    def score(self, x: torch.Tensor) -> torch.Tensor:
        return self.features(x).mean() + self(x).mean()  # type: ignore[no-any-return]


def prepared(**arguments: Any) -> tuple[Accelerator, Any, Any]:
    accelerator, net = Accelerator(**arguments), Net()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    return accelerator, model, optimizer


def step(accelerator: Accelerator, optimizer: Any, *losses: torch.Tensor) -> None:
    for loss in losses:
        accelerator.backward(loss, retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()


def unwrapped(accelerator: Accelerator, model: Any, optimizer: Any) -> None:
    step(accelerator, optimizer, accelerator.unwrap_model(model)(DATA).sum())


def two_forward_passes(accelerator: Accelerator, model: Any, optimizer: Any) -> None:
    step(accelerator, optimizer, model(DATA).square().mean(), model(2 * DATA).sum())


def reentrant_checkpoint(accelerator: Accelerator, model: Any, optimizer: Any) -> None:
    model.module.features = partial(checkpoint, model.module.body, use_reentrant=True)
    step(accelerator, optimizer, model(DATA).square().mean())


def two_losses(accelerator: Accelerator, model: Any, optimizer: Any) -> None:
    output = model(DATA)
    step(accelerator, optimizer, output.square().mean(), output.sum())


def other_method(accelerator: Accelerator, model: Any, optimizer: Any) -> None:
    step(accelerator, optimizer, model.module.features(DATA).sum())


def gradient_penalty(accelerator: Accelerator, model: Any, optimizer: Any) -> None:
    x = DATA.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    step(accelerator, optimizer, gradient.square().mean())


def replaced_layer(accelerator: Accelerator, model: Any, optimizer: Any) -> None:
    model.module.head = torch.nn.Linear(3, 2)
    step(accelerator, optimizer, model(DATA).sum())


def changed_by_hand(accelerator: Accelerator, model: Any, optimizer: Any) -> None:
    for i in range(100):  # the first step is right
        step(accelerator, optimizer, model(DATA).square().mean())
        if i == 20:
            model.module.head.bias.data += RANK


def own_learning_rate(accelerator: Accelerator, model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = 0.1 + RANK
    step(accelerator, optimizer, model(DATA).square().mean())


def own_betas(accelerator: Accelerator, model: Any, optimizer: Any) -> None:
    other = torch.optim.Adam(
        [torch.nn.Parameter(torch.ones(1 + RANK))], betas=(0.9, 0.9 + RANK * 0.09)
    )
    accelerator.prepare(other)
    step(accelerator, optimizer, model(DATA).square().mean())


def own_argument(accelerator: Accelerator, model: Any, optimizer: Any) -> None:
    accelerator.gradient_accumulation_steps = 1 + RANK
    step(accelerator, optimizer, model(DATA).square().mean())


def at_checkpoint(accelerator: Accelerator, model: Any, optimizer: Any) -> None:
    model.module.body.weight.data[0, 0] += 0.01 * RANK
    accelerator.save_state("differs")


def at_the_end(accelerator: Accelerator, model: Any, optimizer: Any) -> None:
    frozen = accelerator.prepare(torch.nn.Linear(2, 2).requires_grad_(False))
    frozen.weight.data.fill_(float("nan") if RANK else 0.0)  # whose sums alone are the same
    accelerator.end_training()


DRIFTS: dict[Callable[..., None], str] = {
    unwrapped: "body.weight differs .*number 1$",
    two_forward_passes: "differs .*number 1$",
    two_losses: "differs .*number 1$",
    other_method: "differs .*number 1$",
    gradient_penalty: "body.weight differs .*number 1$",
    replaced_layer: "head.weight was added after its model.*number 1$",
    changed_by_hand: "head.bias differs between .*number 32$",
    own_learning_rate: "the learning rate of parameter group 0 of optimizer 0 is 0.1 on rank 0,"
    " but 1.1 on rank 1: .*number 1$",
    own_betas: r"the betas of .* is \(0.9, 0.9\) on rank 0, but \(0.9, 0.99\) on rank 1",
    own_argument: "gradient_accumulation_steps is 1 on rank 0, but 2 on rank 1: .*number 1$",
    at_checkpoint: "body.weight differs .*a checkpoint$",
    at_the_end: r"weight of prepared model 1 differs .*end_training\(\)$",
    reentrant_checkpoint: "differs .*number 1$",  # last, because the process keeps its warning
}


CAUSES: dict[str, tuple[Callable[..., None], ...]] = {
    "head.bias has no gradient: if the loss": (gradient_penalty,),
    "the model was called twice before a backward()": (two_forward_passes,),
    "body.weight has no gradient: pass use_reentrant=False": (reentrant_checkpoint,),
}


@with_ranks(2, long=(3,))
def test_ranks_whose_weights_differ_are_refused() -> None:
    for drift, told in DRIFTS.items():
        with pytest.raises(UsageError) as refused:
            drift(*prepared())
        text = str(refused.value)
        assert re.search(told, " ".join(text.splitlines()[:2])), (drift, text)
        is_of_weights = drift not in (own_learning_rate, own_betas, own_argument)
        assert ("before prepare()" in text) == is_of_weights
        fix = text.partition("fix:  ")[2]
        for first, causes in CAUSES.items():
            assert fix.startswith(first) == (drift in causes), text


@with_ranks(2)
def test_models_with_other_weights_are_refused() -> None:
    accelerator, model, optimizer = prepared()
    if RANK:
        model.module.extra = torch.nn.Parameter(torch.ones(1), requires_grad=False)
    with pytest.raises(UsageError, match="weights of the ranks differ in name or number: "):
        step(accelerator, optimizer, model(DATA).sum())


@with_ranks(2)
def test_weights_that_are_meant_to_differ_are_not_compared() -> None:
    handler = DistributedDataParallelKwargs(compare_weights=False)
    for drift in (unwrapped, at_checkpoint):
        drift(*prepared(kwargs_handlers=[handler]))
    accelerator, model, optimizer = prepared()
    with torch.no_grad():
        model.module.body.weight[0, 0] = float("nan")  # on all ranks
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for _ in range(2 * RANK):  # rank 0 has no batch
            step(accelerator, optimizer, model(DATA).square().mean())
    own = accelerator.prepare_model(torch.nn.Linear(1, 1), evaluation_mode=True)
    own.weight.data.fill_(RANK)  # of each rank for itself
    accelerator.save_state("same")


@with_ranks(2, long=(3,))
def test_frozen_models_have_the_weights_of_rank_0() -> None:
    accelerator, net = Accelerator(), Net().requires_grad_(False)
    net.register_buffer("mean", torch.tensor([float(RANK)]))
    for tensor in accelerator.prepare(net).state_dict().values():
        assert torch.equal(accelerator.gather(tensor[None])[-1], tensor)
        assert torch.equal(accelerator.gather(tensor[None])[0], tensor)
    with pytest.raises(UsageError, match="the model differs between ranks"):
        accelerator.prepare(torch.nn.Linear(1, 1 + RANK).requires_grad_(False))


@with_ranks(1, 2, long=(3,))
def test_named_methods_exchange_gradients() -> None:
    handler = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator, model, optimizer = prepared(
        forward_methods=["features", "score"], kwargs_handlers=[handler]
    )
    net = accelerator.unwrap_model(model)
    alone = pickle.loads(pickle.dumps(copy.deepcopy(net)))
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    losses: list[Any] = [
        lambda one, x: one.features(x).square().mean(),
        lambda one, x: one.score(x),
    ]
    for loss_of in losses:
        step(accelerator, optimizer, loss_of(net, DATA))
        loss_of(alone, SINGLE).backward()
        plain.step()
        plain.zero_grad()
    for one, other in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    accelerator.save_state("methods")


def said(training: Callable[[], object]) -> str:
    """Return what is printed, also what was already printed once in this process."""
    stderr._logged.clear()
    with redirect_stderr(io.StringIO()) as printed:
        training()
    return printed.getvalue()


@with_ranks(1, 2)
def test_a_prepared_model_refuses_weights_with_the_names_of_the_unwrapped_model() -> None:
    plain = Net().state_dict()
    for arguments in ({}, {"dynamo_backend": "eager"}):
        accelerator, model, _ = prepared(**arguments)
        inner = accelerator.unwrap_model(model, keep_torch_compile=False)
        for strict in (True, False) if inner is not model else ():
            with pytest.raises(CheckpointError, match=r"no prefix .(module|_orig_mod)"):
                model.load_state_dict(plain, strict=strict)
        inner.load_state_dict(plain)
        model.load_state_dict({"other.weight": plain["head.weight"]}, strict=False)
        model.load_state_dict(copy.deepcopy(model).state_dict())


@with_ranks(2, long=(3,))
def test_registered_objects_that_differ_between_ranks_are_named_at_the_first_save() -> None:
    accelerator = Accelerator()
    accelerator.register_for_checkpointing(torch.nn.BatchNorm1d(2), Net())
    differ = "the state of registered object 1, a Net, differs between ranks? 1"
    assert len(re.findall(differ, said(lambda: accelerator.save_state("object")))) == (RANK == 0)


@with_ranks(1, 2)
def test_trained_weights_that_checkpoints_lack_are_reported_at_the_first_save() -> None:
    class Holder:
        def __init__(self, module: torch.nn.Module) -> None:
            self.module = module
            self.state_dict, self.load_state_dict = module.state_dict, module.load_state_dict

    def train(register: Callable[[Any], Any], *, trained: bool = True) -> str:
        accelerator, net, loss = Accelerator(), Net(), torch.nn.Linear(2, 1)
        loss.requires_grad_(trained)
        weights = [*net.parameters(), *loss.parameters()]
        accelerator.prepare(net, torch.optim.SGD(weights, lr=0.1))
        if (registered := register(loss)) is not None:
            accelerator.register_for_checkpointing(registered)
        return said(lambda: [accelerator.save_state("first"), accelerator.save_state("second")])

    told = "checkpoints do not contain weights of shapes [[1, 2], [1]]"
    printed = train(lambda _: None)
    assert printed.count(told) == (RANK == 0)
    assert told not in train(lambda _: None, trained=False)
    for register in (lambda loss: loss, Holder):
        assert told not in train(register)


@with_ranks(2)
def test_an_optimizer_that_divides_its_state_is_refused_at_a_save() -> None:
    with catch_warnings():
        simplefilter("ignore")  # its import calls torch.jit
        from torch.distributed.optim import ZeroRedundancyOptimizer
    net = Net()
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    accelerator = Accelerator()
    accelerator.prepare(net, optimizer)
    with pytest.raises(HeadwayError, match=r"ZeroRedundancyOptimizer(.|\n)*fsdp also divides"):
        accelerator.save_state("divided")


@with_ranks(1, 2)
def test_weights_and_data_that_were_not_prepared_are_reported() -> None:
    def forgotten(of: Callable[[Any], Any]) -> None:
        accelerator, net = Accelerator(), Net()
        optimizer = of(torch.optim.SGD(net.parameters(), lr=0.1))
        for _ in range(2):
            step(accelerator, optimizer, net(DATA).sum())

    def all_prepared() -> None:
        Accelerator()
        accelerator, model, optimizer = prepared()
        for batch in accelerator.prepare(torch.utils.data.DataLoader(SINGLE, batch_size=2)):
            step(accelerator, optimizer, model(batch).sum())
        accelerator.prepare(torch.utils.data.TensorDataset(DATA), DATA, "text", None)

    def of_another(*, later: bool = False, trained: bool = True) -> None:
        (accelerator, net, _), other = prepared(), torch.nn.Linear(1, 1).requires_grad_(trained)
        both = [{"params": [*module.parameters()]} for module in (net, other)]
        optimizer = accelerator.prepare(torch.optim.SGD(both[: 2 - later], lr=0.1))
        for number in range(4):
            if number == 1 and later:
                optimizer.add_param_group(both.pop())
            step(accelerator, optimizer, net(DATA).sum())

    def as_it_is() -> None:
        Accelerator().prepare([torch.nn.Linear(1, 1)])

    def without_loader(*, differs: bool) -> None:
        set_seed(1, device_specific=differs)  # ranks of other seeds draw other data
        accelerator, model, optimizer = prepared()
        step(accelerator, optimizer, model(DATA).sum())

    is_told = WORLD > 1 and RANK == 0
    forgets = "trains a model that was not passed"
    no_batch = "no prepared DataLoader yielded a batch"
    lacks = "weights that are in no prepared model, of shapes [[1, 1], [1]]"
    for training, text, is_wrong in (
        (partial(forgotten, Accelerator().prepare), forgets, True),
        (partial(forgotten, lambda optimizer: optimizer), forgets, True),
        (of_another, lacks, True),
        (partial(of_another, later=True), lacks, True),
        (partial(of_another, trained=False), lacks, False),
        (as_it_is, "returned a list unchanged", True),
        (all_prepared, "note", False),
        (partial(without_loader, differs=True), no_batch, False),
        (partial(without_loader, differs=False), no_batch, True),
    ):
        gc.collect()
        process_progress().num_trained = 0
        assert said(training).count(text) == (is_told and is_wrong), training
    assert (forgets in str(process_progress().feature_use.notes)) == is_told

    def ending(accelerator: Accelerator) -> str:
        with patch("headway.accelerator.leave_world"):
            return said(accelerator.end_training)

    assert ending(Accelerator()).count("nothing was passed to prepare()") == is_told
    splitting = Accelerator()
    splitting.split_between_processes([RANK])
    assert ending(splitting) == ending(prepared()[0]) == ""


@with_ranks(1, 2)
def test_accumulation_that_does_not_take_effect_is_reported() -> None:
    def raw_optimizer() -> None:
        accelerator = Accelerator(gradient_accumulation_steps=2)
        model = accelerator.prepare(Net())
        with accelerator.accumulate(model):
            accelerator.backward(model(DATA).sum())

    def not_entered() -> None:
        accelerator, model, optimizer = prepared(gradient_accumulation_steps=2)
        step(accelerator, optimizer, model(DATA).sum())

    def plain_backward() -> None:
        accelerator, model, optimizer = prepared(gradient_accumulation_steps=2)
        for _ in range(2):
            with accelerator.accumulate(model):
                model(DATA).sum().backward()
                optimizer.step()

    def both(schedule: Callable[[Any], Any] = lambda optimizer: None) -> None:
        accelerator, model, optimizer = prepared(gradient_accumulation_steps=2)
        schedule(optimizer)
        for batch in accelerator.prepare(torch.utils.data.DataLoader(SINGLE, batch_size=2)):
            with accelerator.accumulate(model):
                step(accelerator, optimizer, model(batch).sum())

    def not_stepped() -> None:
        accelerator, model, _ = prepared()
        for _ in range(100):
            accelerator.backward(model(DATA).sum())

    def unprepared() -> None:
        accelerator = Accelerator(strategy="fsdp")
        model = accelerator.prepare(torch.nn.Linear(2, 1))
        for _ in range(2):
            accelerator.backward(model(DATA).sum())
        accelerator.end_training()

    trainings: dict[Callable[[], object], str] = {
        raw_optimizer: "accumulate() was called without a prepared optimizer",
        not_entered: "outside of accelerator.accumulate(model)",
        plain_backward: "without accelerator.backward(loss)",
        not_stepped: "no prepared optimizer has stepped in 100 backward passes",
        partial(both, lambda of: ConstantLR(of)): "scheduler that was not passed to prepare()",
    }
    if WORLD > 1:  # one rank shards nothing
        trainings[unprepared] = "no optimizer was prepared before 2 backward passes"
    for training, told in trainings.items():
        process_progress().num_trained = 0
        assert said(training).count(told) == (RANK == 0), training
    process_progress().num_trained = 0
    assert "note" not in said(both)


@with_ranks(2)
def test_learning_rates_that_differ_are_refused_with_sharded_models() -> None:
    def train(change: float, rounding: float = 0.0, **arguments: Any) -> float:
        accelerator, model, optimizer = prepared(strategy="fsdp", **arguments)
        own = torch.optim.Adam([torch.nn.Parameter(torch.ones(1 + RANK))], lr=1.0 + RANK)
        plateau = ReduceLROnPlateau(optimizer, patience=0)
        for epoch in range(4):
            step(accelerator, optimizer, model(DATA).square().mean())
            own.step()  # of this rank alone
            plateau.step(1.0 + change * epoch)
            optimizer.param_groups[0]["weight_decay"] = 0.1 + rounding
            optimizer.param_groups[0]["device"] = f"cpu:{RANK}"
        accelerator.save_state("sharded")
        rate: float = optimizer.param_groups[0]["lr"]
        return rate

    told = "the learning rate of .* is 0.1 on rank 0, but 0.001"
    with pytest.raises(UsageError, match=told) as refused:
        train(RANK - 0.5)
    assert "accelerator.reduce(loss, 'mean')" in refused.value.problems[0].fix
    assert train(1.0, rounding=RANK * 1e-7) < 0.1
    handler = DistributedDataParallelKwargs(compare_weights=False)
    assert (train(RANK - 0.5, kwargs_handlers=[handler]) < 0.1) == RANK


@with_ranks(2, long=(3,))
def test_a_number_of_a_sharded_weight_is_that_of_all_of_it() -> None:
    torch.manual_seed(0)
    net = torch.nn.Linear(2, 6)
    wanted = [net.weight.norm().item(), float(net.bias.mean()), bool(net.bias.max() > 0)]
    weight, bias = Accelerator(strategy="fsdp").prepare(net).parameters()
    found = [weight.norm().item(), float(bias.mean()), bool(bias.max() > 0)]
    assert found == pytest.approx(wanted)
    Accelerator().wait_for_everyone()
    with pytest.raises(UsageError, match="item"):
        bias.sum().item() if RANK == 0 else Accelerator().wait_for_everyone()
