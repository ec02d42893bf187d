"""One list of problems for whoever shows or decides: with codes, not with words."""

from __future__ import annotations

from typing import Any

import pytest

from headway.contract.origin import Layer, Origin
from headway.errors import Code
from headway.machine.facts import Machine
from headway.settings.problems import problems
from headway.settings.profile import Entry
from headway.settings.resolve import resolve, try_resolve
from headway.settings.table import Settings
from tests.machines.recorded import load


def settings(machine: Machine, **values: Any) -> Settings:
    origin = Origin(Layer.FLAG, reason="a flag")
    return resolve([{name: Entry(raw, origin) for name, raw in values.items()}], machine, {})


@pytest.mark.parametrize(
    ("machine", "values", "code", "names"),
    [
        (
            "laptop_cpu",
            {"mixed_precision": "fp16"},
            Code.FP16_ON_CPU,
            ("mixed_precision", "device"),
        ),
        ("laptop_cpu", {"env": "RANK=1"}, Code.VARIABLE_OF_LAUNCHER, ("env.RANK",)),
        ("laptop_cpu", {"ranks": "3"}, Code.MISSING_RANK, ("ranks", "num_processes")),
        ("laptop_cpu", {"device": "cuda"}, Code.NO_GPU, ("device",)),
        ("gpu_4", {"num_processes": "8"}, Code.TOO_FEW_GPUS, ("num_processes", "device")),
        ("gpu_4", {"devices": "9,"}, Code.NO_SUCH_GPU, ("devices",)),
        ("gpu_mig", {"devices": "2"}, Code.SEVERAL_MIG_SLICES, ("devices", "num_processes")),
        ("mac_m2", {"num_processes": "2"}, Code.SEVERAL_ON_MPS, None),
        ("mac_intel", {"device": "mps"}, Code.NO_MPS, ("device",)),
    ],
)
def test_a_problem_names_its_code_and_the_setting_to_change_first(
    machine: str, values: dict[str, str], code: Code, names: tuple[str, ...] | None
) -> None:
    there = load(machine)
    (problem,) = problems(settings(there, **values), there)
    assert problem.code is code
    assert problem.names == (names or problem.names)
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


def test_the_same_problem_is_known_again_in_another_place() -> None:
    def unknown(name: str, layer: Layer, file: str) -> Any:
        entry = Entry("1", Origin(layer, file, 3))
        return try_resolve([{name: entry}], Machine(), {})[1][0]

    first = unknown("devise", Layer.USER_PROFILE, "a.yaml")
    assert first.is_same_as(unknown("devise", Layer.ASSIGNMENT, "b.yaml"))
    assert not first.is_same_as(unknown("divise", Layer.USER_PROFILE, "a.yaml"))
