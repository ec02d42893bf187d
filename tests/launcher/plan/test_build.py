"""A process that a scheduler has started for a rank is that rank, or is refused; and how long ranks
may take to stop.
"""

from __future__ import annotations

from typing import Any

import pytest

from headway.errors import Code, ConfigError
from headway.ipc.run_contract import ALLOCATION_VARIABLE, KEY_VARIABLE, Ranks
from headway.launcher.plan.describe import describe
from headway.launcher.plan.plan import LaunchPlan
from tests.launcher.clusters.test_detection import STEP
from tests.launcher.plan.planning import planned, set_by

TASKS = {**STEP, "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}
TASK = Ranks(rank=3, local_rank=1, world_size=4, local_world_size=2)


def plan(machine: str = "laptop_cpu", **flags: str) -> LaunchPlan:
    environ = {**TASKS, "RANK": "0", KEY_VARIABLE: "secret"}
    values: dict[str, Any] = {"device": "cpu", **flags}
    return planned(machine, environ, joins_cluster=True, **values)


def refused(machine: str = "laptop_cpu", **flags: str) -> str:
    with pytest.raises(ConfigError) as caught:
        plan(machine, **flags)
    (problem,) = caught.value.problems
    assert problem.code == Code.TASKS
    return problem.what


def test_the_task_replaces_the_launcher_with_the_variables_of_its_rank() -> None:
    found = plan()
    assert found.supervised is None
    variables = set_by(found)
    expected = {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "n1",
        "MASTER_PORT": str(found.settings.main_port),
    }
    assert variables.items() >= expected.items()
    assert variables[KEY_VARIABLE] is None  # it is the launchers'
    assert variables[ALLOCATION_VARIABLE] == "3:"
    assert "this is rank 3" in describe(found)


def test_another_number_of_processes_is_refused_with_both_numbers() -> None:
    what = refused(num_processes="4")
    assert "4" in what
    assert "2" in what
    assert plan(num_processes="2").task == TASK


@pytest.mark.parametrize("setting", [{"max_restarts": "1"}, {"hang_timeout": "60"}])
def test_a_setting_that_needs_a_launcher_beside_the_ranks_is_refused(
    setting: dict[str, str],
) -> None:
    assert next(iter(setting)) in refused(**setting)


def test_tasks_that_see_fewer_gpus_than_there_are_tasks_are_refused_with_both_numbers() -> None:
    what = refused("gpu_1", device="cuda")
    assert "1 GPU" in what
    assert "2 tasks" in what
    assert plan("gpu_4", device="cuda").gpus == (0, 1)
