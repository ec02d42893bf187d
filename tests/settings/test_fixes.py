"""Every fix is followed literally: the problem is gone, and no other has come."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence

import pytest

from headway.commands.doctor import OK, Check, machine_problems
from headway.errors import Code, Problem
from headway.ipc.origin import Layer
from headway.machine.detection import detect_machine
from headway.machine.facts import Machine
from headway.settings.problems import problems
from headway.settings.resolve import resolve
from headway.settings.setting import Raw
from headway.settings.table import Settings
from tests.launcher.plan.planning import said
from tests.machines.recorded import (
    RECORDINGS,
    Recorded,
    Recording,
    gpus,
    h100s,
    load,
    mac,
    server,
    snapshot,
    torch,
)

LAYERS = (Layer.USER_PROFILE, Layer.ENVIRONMENT, Layer.FLAG)  # from the weakest
Sources = Mapping[Layer, Mapping[str, Raw]]

SPECS = ("1", "2", "9,", "0,", "0,1", "0-3", "0-9", "idle:2")
SINGLE: dict[str, Sequence[Raw]] = {
    "device": ("cpu", "cuda", "gpu", "mps", "xpu"),
    "devices": SPECS,
    "mixed_precision": ("fp16", "bf16"),
    "num_processes": ("2", "3", "64"),
    "env": [
        *({name: "1", "A": "1"} for name in ("RANK", "HEADWAY_RUN", "CUDA_VISIBLE_DEVICES")),
        *({name: "1"} for name in ("ACCELERATE_USE_CPU", "ACCELERATE_MIXED_PRECISION")),
    ],
}
REQUESTS: list[dict[str, Raw]] = [
    *({name: value} for name, values in SINGLE.items() for value in values),
    {"device": "cpu", "mixed_precision": "fp16"},
    {"device": "cuda", "num_processes": "4"},
    {"device": "cuda", "devices": "9,", "mixed_precision": "fp16"},
    {"device": "cuda", "devices": "9,", "num_processes": "2"},
    {"device": "mps", "mixed_precision": "fp16"},
    {"device": "mps", "mixed_precision": "bf16"},
    {"device": "mps", "devices": "0,1"},
    {"device": "cpu", "devices": "2"},
    {"devices": "2", "num_processes": "1"},
    {"devices": "0,1", "num_processes": "8"},
    {"num_machines": "2"},
    {"num_machines": "2", "machine_rank": "2"},
    {"num_machines": "2", "machine_rank": "5", "main_address": "node0"},
    {"num_machines": "2", "machine_rank": "1", "main_address": "node0", "debug_rank": "0"},
    {"machine_rank": "1"},
    {"strategy": "hsdp", "num_processes": "2"},
    {"strategy": "hsdp", "shard_size": "3", "num_processes": "2"},
    {"cpu_offload": "yes", "device": "cpu"},
    {"ranks": "0,70"},
    {"debug_rank": "70"},
    {"env": {"OMP_NUM_THREADS": "2"}, "threads_per_process": "3"},
]


MACHINES = [
    *map(load, RECORDINGS),
    snapshot(mac("13.5")),
    snapshot(server([{**card, "mode": 2} for card in h100s(2)])),
    snapshot(server([{**h100s(1)[0], "slices": []}])),
]


def settings_of(sources: Sources, machine: Machine) -> Settings:
    return resolve([said(layer, **sources.get(layer, {})) for layer in LAYERS], machine, {})


STEP = re.compile(  # in the words of a fix: to set or to remove a setting, or one variable
    r"(?:set `|`export |pass --set |pass --)(?P<set>[\w-]+)[:= ] ?(?P<value>[^`,;\s]+)"
    r"|remove (?P<variable>[A-Z_]+) from|(?:remove |`unset (?=HEADWAY_)|omit --)(?P<gone>[\w-]+)"
)


def followed(way: str, sources: Sources, settings: Settings) -> Sources | None:
    """Return the sources after these steps, each taken where the setting was set.

    None for words that name no step.
    """
    after = {layer: dict(sources.get(layer, {})) for layer in LAYERS}
    steps = [*STEP.finditer(way)] if STEP.match(way) else []
    for step in steps:
        word = (step["set"] or step["gone"] or "").removeprefix("HEADWAY_")
        name = "env" if step["variable"] else word.replace("-", "_").lower()
        layer = settings.origin(name).layer
        held = after[layer if layer in LAYERS else Layer.FLAG]
        if step["set"]:
            held[name] = step["value"]
        elif step["variable"]:
            values = dict(held[name])  # type: ignore[arg-type]
            del values[step["variable"]]
            held[name] = values
        else:
            del held[name]
    return after if steps else None


def asked(layer: Layer) -> Iterator[tuple[Sources, Machine, Problem]]:
    """Yield every problem of every request made in this layer; as a flag on every machine."""
    for machine in MACHINES if layer is Layer.FLAG else MACHINES[::6]:
        for request in REQUESTS:
            sources = {layer: request}
            for problem in problems(settings_of(sources, machine), machine):
                yield sources, machine, problem


@pytest.mark.parametrize("layer", LAYERS)
def test_a_setting_that_is_changed_as_the_fix_says_is_no_problem_any_more(layer: Layer) -> None:
    seen = set()
    for sources, machine, problem in asked(layer):
        settings = settings_of(sources, machine)
        before = problems(settings, machine)
        ways = [followed(way, sources, settings) for way in problem.fix.split("; or ")]
        for after in ways:
            if after is not None:
                left = problems(settings_of(after, machine), machine)
                known = [(other.code, other.names) for other in left]
                assert (problem.code, problem.names) not in known, (problem, after)
                new = [p for p in left if p.code not in [old.code for old in before]]
                assert not new, (problem, after, new)
        seen.add(problem.code)
        assert any(ways), problem
    if layer is not Layer.FLAG:
        return
    missing = {
        name
        for name, code in vars(Code).items()
        if str(code)[:3] in ("HW1", "HW2") and code not in seen
    }
    assert missing == {
        *("NO_CLUSTER", "CLUSTERS_DISAGREE", "TASKS"),  # of the environment
        *("UNSUPPORTED_HERE", "NOT_INSTALLED"),
        # of the program
        *("SCRIPT_FROM_STREAM", "LAUNCHER_IN_PROCESS", "PROGRAM_IN_PROCESS"),
    }


@pytest.mark.parametrize(
    ("layer", "to_set", "to_remove"),
    [
        (Layer.USER_PROFILE, "set `mixed_precision: bf16`", "remove RANK from `env`"),
        (
            Layer.ENVIRONMENT,
            "`export HEADWAY_MIXED_PRECISION=bf16`",
            "remove RANK from HEADWAY_ENV",
        ),
        (Layer.FLAG, "pass --mixed-precision bf16", "remove RANK from --env"),
    ],
)
def test_a_fix_says_how_to_take_its_steps_where_the_setting_was_set(
    layer: Layer, to_set: str, to_remove: str
) -> None:
    machine = load("laptop_cpu")
    sources = {layer: {"device": "cpu", "mixed_precision": "fp16"}}
    (problem,) = problems(settings_of(sources, machine), machine)
    assert problem.fix == to_set
    (problem,) = problems(settings_of({layer: {"env": {"RANK": "1"}}}, machine), machine)
    assert problem.fix == to_remove


def shell(command: str, recording: Recording) -> Recording:
    """Return what a recorded machine is after a command."""
    for part in command.split("; "):
        recording = _after(shlex.split(part), recording)
    return recording


def _after(words: Sequence[str], recording: Recording) -> Recording:
    environ = dict(recording.environ)
    match words:
        case ["unset", *names]:
            kept = {name: text for name, text in environ.items() if name not in names}
            return recording._replace(environ=kept)
        case ["export", assignment]:
            name, _, text = assignment.partition("=")
            return recording._replace(environ={**environ, name: text})
        case ["docker", "run", "--shm-size=8g"]:
            return recording._replace(shm=8 * 2**30)
        case ["pip", "install", *flags]:
            return recording._replace(torch=_installed(flags, recording.platform))
    raise AssertionError(f"a command that this test does not know: {words}")


def _installed(flags: Sequence[str], platform: str) -> str:
    assert "torch" in flags
    index = flags[-1].rpartition("/")[2] if "--index-url" in flags else ""
    if platform == "darwin":
        return torch("2.13.0")
    index = index or "cu130"  # PyPI's own wheels
    return torch(f"2.13.0+{index}", cuda=f"{index[2:4]}.{index[4]}")


def found(recording: Recording) -> list[Check]:
    machine = detect_machine(recording.environ, Recorded(recording), full=True)
    return [check for check in machine_problems(machine) if check.status != OK]


GPUS = RECORDINGS["gpu_4"]
CUDA_12, CPU_ONLY = torch("2.13.0+cu126", cuda="12.6"), torch("2.13.0+cpu")
TROUBLED = {
    **RECORDINGS,
    "no torch": GPUS._replace(torch=""),
    "old torch on a Mac": mac(torch=torch("2.10.0")),
    "MIG without slices": server([{**h100s(1)[0], "slices": []}]),
    "a new GPU with an old wheel": server(
        gpus(2, "NVIDIA GeForce RTX 5090", 32, (12, 0)), driver="570.86.10", torch=CUDA_12
    ),
    "an old GPU with a new wheel": server(gpus(2, "Tesla V100-SXM2-32GB", 32, (7, 0))),
    "a new GPU without CUDA": server(
        gpus(1, "NVIDIA GeForce RTX 5090", 32, (12, 0)), driver="570.86.10", torch=CPU_ONLY
    ),
    "CUDA 11 driver": server(h100s(4), driver="470.82.01"),
    **{
        f"{name}={text}": GPUS._replace(environ={name: text})
        for name, text in {
            "OMP_NUM_THREADS": "640",
            "RANK": "0",
            "CUDA_VISIBLE_DEVICES": "1,9,2",
        }.items()
    },
    "OMP_NUM_THREADS is no number": GPUS._replace(environ={"OMP_NUM_THREADS": "many"}),
    "two stale variables": GPUS._replace(environ={"RANK": "0", "WORLD_SIZE": "2"}),
}


@pytest.mark.parametrize("name", TROUBLED)
def test_a_machine_whose_fix_was_run_has_the_problem_no_more(name: str) -> None:
    recording = TROUBLED[name]
    before = found(recording)
    assert all(check.remedies for check in before)
    for check in before:
        for remedy in check.remedies:
            if not re.fullmatch("`[^`]+`", remedy) or remedy.startswith("`--"):
                continue
            left = found(shell(remedy.strip("`"), recording))
            assert check not in left, remedy
            assert len(left) < len(before), (remedy, left)
