"""One list of problems for whoever shows or decides: with codes, not with words."""

from __future__ import annotations

from typing import Any

import pytest

from headway.errors import Code
from headway.ipc.origin import Layer
from headway.machine.facts import Machine
from headway.settings.problems import missing_ranks, problems
from headway.settings.resolve import try_resolve
from tests.launcher.plan.planning import said
from tests.launcher.plan.planning import settings_of as settings
from tests.machines.recorded import load

SHARDS_OF_3 = {"shard_size": "3", "strategy": "hsdp"}


@pytest.mark.parametrize(
    ("machine", "values", "code", "names"),
    [
        ("laptop_cpu", {"mixed_precision": "fp16"}, Code.FP16_ON_CPU, "mixed_precision device"),
        ("laptop_cpu", {"env": "RANK=1"}, Code.VARIABLE_OF_LAUNCHER, "env.RANK"),
        ("laptop_cpu", {"ranks": "3"}, Code.MISSING_RANK, "ranks num_processes"),
        ("laptop_cpu", {"device": "cuda"}, Code.NO_GPU, "device"),
        ("gpu_4", {"num_processes": "8"}, Code.TOO_FEW_GPUS, "num_processes device"),
        ("gpu_4", {"devices": "9,"}, Code.NO_SUCH_GPU, "devices"),
        ("gpu_mig", {"devices": "2"}, Code.SEVERAL_MIG_SLICES, "devices num_processes"),
        ("mac_m2", {"num_processes": "2"}, Code.SEVERAL_ON_MPS, ""),
        ("gpu_8_h100", {"strategy": "hsdp"}, Code.NO_SHARD_SIZE, "strategy shard_size"),
        ("gpu_8_h100", SHARDS_OF_3, Code.SHARD_SIZE, "shard_size strategy num_processes"),
        ("laptop_cpu", {"cpu_offload": "yes"}, Code.OFFLOAD_WITHOUT_GPU, "cpu_offload device"),
        ("mac_intel", {"device": "mps"}, Code.NO_MPS, "device"),
    ],
)
def test_a_problem_names_its_code_and_the_setting_to_change_first(
    machine: str, values: dict[str, Any], code: str, names: str
) -> None:
    there = load(machine)
    (problem,) = problems(settings(there, **values), there)
    assert problem.code == code
    assert not names or problem.names == (*names.split(),)
    assert problem.names[0].partition(".")[0] in values


def test_without_a_machine_only_what_is_wrong_everywhere_is_found() -> None:
    there = load("laptop_cpu")
    asked = settings(there, device="cuda", machine_rank="3")
    assert [problem.code for problem in problems(asked)] == [Code.MACHINE_RANK]
    assert [problem.is_of_machine for problem in problems(asked, there)] == [False, True]


def test_a_mac_s_own_device_is_its_problem_and_a_device_that_was_set_is_everybody_s() -> None:
    there = load("mac_m2")
    detected = settings(there, num_processes="2")
    assert problems(detected) == []
    assert [problem.is_of_machine for problem in problems(detected, there)] == [True]
    said = settings(there, num_processes="2", device="mps")
    assert [problem.is_of_machine for problem in problems(said, there)] == [False]


@pytest.mark.parametrize(
    "values",
    [
        {"strategy": "hsdp", "shard_size": "4"},
        {"strategy": "hsdp", "num_machines": "2", "main_address": "node0"},
        {"strategy": "fsdp", "cpu_offload": "yes", "wrap": "Block,Head"},
        {"strategy": "hsdp", "num_processes": "1"},  # one process: a note, as for fsdp
    ],
)
def test_sharding_that_can_be_done_is_no_problem(values: dict[str, Any]) -> None:
    there = load("gpu_8_h100")
    assert problems(settings(there, **values), there) == []


@pytest.mark.parametrize("wrap", ["", "a b", "1x", "-3", "0", "Block,,3"])
def test_a_wrap_that_names_nothing_is_refused(wrap: str) -> None:
    (problem,) = try_resolve([said(Layer.FLAG, wrap=wrap)], Machine(), {})[1]
    assert problem.code == Code.BAD_VALUE


@pytest.mark.parametrize(
    ("machine", "num_machines", "has_more"),
    [("laptop_cpu", "1", True), ("laptop_cpu", "2", False), ("gpu_4", "1", False)],
)
def test_more_processes_are_no_remedy_where_gpus_or_other_machines_limit_them(
    machine: str, num_machines: str, has_more: bool
) -> None:
    asked = settings(load(machine), ranks="9", num_machines=num_machines, machine_rank="0")
    (problem,) = missing_ranks(asked, 4)
    assert ("--num-processes 10" in problem.fix) == has_more
