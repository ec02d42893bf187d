"""What scripts and the launcher say about sharding, on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from headway import Accelerator, FullyShardedDataParallelPlugin
from headway.errors import UsageError
from headway.ipc.origin import Layer, Origin
from headway.ipc.run_contract import RunContract, decode, encode
from headway.training.arguments import Arguments, merge_arguments, merge_sharing

FLAG = Origin(Layer.FLAG, flag="--strategy")


def said(**arguments: Any) -> dict[str, Any]:
    return merge_sharing(Arguments(**arguments))


def test_one_process_is_not_sharded_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    accelerator = Accelerator(cpu=True, strategy="fsdp")
    with accelerator.empty_init():
        model = nn.Linear(2, 1)
    assert not model.weight.is_meta
    assert type(accelerator.prepare(model)) is nn.Linear
    assert not accelerator.is_fsdp2
    assert "one process" in capsys.readouterr().err


def test_activations_are_computed_again_in_the_backward_pass_without_sharding() -> None:
    calls = []

    class Layer(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(torch.is_grad_enabled())
            return super().forward(x)

    accelerator = Accelerator(cpu=True, activation_checkpointing=True)
    plain = nn.Sequential(Layer(2, 2), Layer(2, 2))
    names = list(plain.state_dict())
    model = accelerator.prepare(plain)
    accelerator.backward(model(torch.ones(1, 2)).sum())
    assert len(calls) == 4
    assert list(model.state_dict()) == names
    with torch.no_grad():
        model(torch.ones(1, 2))
    assert len(calls) == 6


def test_running_statistics_are_updated_once_where_activations_are_computed_again() -> None:
    states = []
    for is_on in (False, True):
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True, activation_checkpointing=is_on)
        norms = nn.BatchNorm1d(2, momentum=None), nn.InstanceNorm1d(2, track_running_stats=True)
        blocks = [nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), norm) for norm in norms]
        model = accelerator.prepare(nn.Sequential(*blocks))
        for _ in range(2):
            accelerator.backward(model(torch.randn(3, 2, 2)).square().sum())
        states.append({**model.state_dict()})
        assert (norms[0].momentum, norms[1].momentum) == (None, 0.1)
    assert all(states[0][name].equal(states[1][name]) for name in states[0])
    assert states[1]["0.1.num_batches_tracked"] == 2


def test_what_a_flag_says_may_not_be_contradicted() -> None:
    run = RunContract("cpu", "no", 1, {"strategy": FLAG}, strategy="fsdp", wrap="Block")
    assert decode(encode(run)) == run
    agreed, _ = merge_arguments(run)
    assert (agreed.strategy, agreed.wrap, agreed.cpu_offload) == ("fsdp", "Block", False)
    with pytest.raises(UsageError):
        merge_arguments(run, **said(strategy="ddp"))
    assert merge_arguments(run, **said(wrap=["Layer", "Head"]))[0].wrap == "Layer,Head"


@pytest.mark.parametrize(
    ("fields", "settings"),
    [
        ({}, ("fsdp", "auto", False, False)),
        ({"sharding_strategy": "FULL_SHARD", "cpu_offload": True}, ("fsdp", "auto", False, True)),
        ({"reshard_after_forward": True, "fsdp_version": 2}, ("fsdp", "auto", False, False)),
        ({"sharding_strategy": "HYBRID_SHARD"}, ("hsdp", "auto", False, False)),
        ({"sharding_strategy": "no_shard"}, ("ddp", "auto", False, False)),
        (
            {
                "auto_wrap_policy": "transformer_based_wrap",
                "transformer_cls_names_to_wrap": ["Block", "Head"],
                "activation_checkpointing": True,
            },
            ("fsdp", "Block,Head", True, False),
        ),
        (
            {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 1000},
            ("fsdp", "1000", False, False),
        ),
    ],
)
def test_the_plugin_says_the_same_as_settings(
    fields: dict[str, Any], settings: tuple[Any, ...]
) -> None:
    found = said(fsdp_plugin=FullyShardedDataParallelPlugin(**fields))
    names = ("strategy", "wrap", "activation_checkpointing", "cpu_offload")
    assert tuple(found[name] for name in names) == settings


@pytest.mark.parametrize(
    "fields",
    [
        {"use_orig_params": True},
        {"backward_prefetch": "BACKWARD_PRE"},
        {"sync_module_states": True},
        {"sharding_strategy": "SHARD_GRAD_OP"},
        {"sharding_strategy": 4},
        {"reshard_after_forward": False},
        {"auto_wrap_policy": "all"},
        {"mixed_precision_policy": {}},
        {"state_dict_type": "LOCAL_STATE_DICT"},
        {"fsdp_version": 3},
    ],
)
def test_fields_that_sharding_here_does_not_have_are_refused_by_name(
    fields: dict[str, Any],
) -> None:
    with pytest.raises(UsageError) as refused:
        FullyShardedDataParallelPlugin(**fields)
    assert next(iter(fields)) in refused.value.problems[0].what
