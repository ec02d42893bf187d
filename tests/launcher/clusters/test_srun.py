"""A launch in a job of SLURM becomes one step over its machines, once; lists of SLURM are read."""

from __future__ import annotations

import shlex

import pytest

from headway.errors import ConfigError, LaunchError
from headway.ipc.run_contract import ALLOCATION_VARIABLE, KEY_VARIABLE
from headway.launcher.clusters import slurm as srun
from headway.launcher.clusters.slurm import Step, read_nodelist, read_repeated, run_step, step_of
from tests.commands.running import run
from tests.distributed.launching import script
from tests.launcher.clusters.test_cluster import settings_in
from tests.launcher.clusters.test_detection import BATCH, JOB, STEP

LAUNCH = ("python", "-m", "headway", "launch", "train.py")
Environ = dict[str, str]


def step(environ: Environ, *words: str, **flags: str) -> Step | None:
    return step_of(environ, settings_in(environ, **flags), (*LAUNCH, *words), has_terminal=False)


def step_of_a_terminal(environ: Environ) -> Step | None:
    return step_of(environ, settings_in(environ), LAUNCH, has_terminal=True)


@pytest.fixture(autouse=True)
def srun_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(srun, "which", lambda *_, **__: "srun")


def command(environ: Environ, **flags: str) -> list[str]:
    found = step(environ, **flags)
    assert found is not None
    return [*found.command]


def test_a_batch_script_and_a_shell_of_salloc_start_one_launch_on_each_machine() -> None:
    for environ in (BATCH, JOB):
        words = command(environ)
        assert words[0] == "srun"
        assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1"} <= {*words}
        assert "--cpus-per-task=4" in words
        assert words[-len(LAUNCH) :] == [*LAUNCH]
        assert "--overlap" in words


def test_a_shell_that_is_a_step_shares_the_machines_with_it() -> None:
    shell = {**STEP, "SLURM_PTY_PORT": "4000"}
    assert "--nodelist=n[1-2]" in command(shell)
    interactive = {**BATCH, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NODELIST": "n1"}
    assert {"--nodes=2", "--ntasks=2"} <= {*command(interactive)}
    assert "--nodelist=n1" not in command(interactive)


def test_the_smallest_machine_says_how_many_cpus_each_task_has() -> None:
    assert "--cpus-per-task=2" in command({**BATCH, "SLURM_JOB_CPUS_PER_NODE": "8,2"})


def test_fewer_machines_than_the_job_has_can_be_asked_for_and_not_more() -> None:
    three = {**BATCH, "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_CPUS_PER_NODE": "4(x3)"}
    assert "--nodes=2" in command(three, num_machines="2")
    with pytest.raises(ConfigError, match="4"):
        command(three, num_machines="4")


@pytest.mark.parametrize(
    "flags",
    [
        {"cluster": "none"},
        {"num_machines": "1"},
        {"num_machines": "2", "machine_rank": "0"},
        {"num_machines": "2", "main_address": "n1"},
    ],
)
def test_what_a_person_says_of_the_machines_keeps_the_launch_where_it_is(flags: Environ) -> None:
    assert step(BATCH, **flags) is None


def test_a_task_of_a_step_is_where_it_should_be() -> None:
    assert step(STEP) is None
    assert step({}) is None


def test_a_job_on_one_machine_gets_a_step_for_its_signals_unless_somebody_is_looking_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = {"SLURM_JOB_NODELIST": "n1", "SLURM_JOB_CPUS_PER_NODE": "4"}
    assert "--nodes=1" in command({**BATCH, **one})
    assert step_of_a_terminal({**BATCH, **one}) is None
    assert step_of_a_terminal({**JOB, **one}) is not None  # salloc's shell is elsewhere
    monkeypatch.setattr(srun, "which", lambda *_, **__: None)  # as in a container
    assert step({**BATCH, **one}) is None


def test_the_step_has_a_secret_and_none_of_the_jobs_options_for_steps() -> None:
    tasks = {"SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2", "SLURM_TASKS_PER_NODE": "2(x2)"}
    of_steps = {"SLURM_GPUS_PER_TASK": "1", "SLURM_PTY_WIN_COL": "80", "SLURM_CPU_BIND_TYPE": "x"}
    found = step({**BATCH, **tasks, **of_steps, "A": "1"})
    assert found is not None
    assert not found.environment.keys() & {"SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", *of_steps}
    assert found.environment["A"] == "1"
    assert found.environment[ALLOCATION_VARIABLE] == "3:2(x2)"
    key = found.environment[KEY_VARIABLE]
    assert len(key) == 64
    assert key not in " ".join(found.command)
    again = step({**BATCH, KEY_VARIABLE: "mine"})
    assert again is not None
    assert again.environment[KEY_VARIABLE] == "mine"


def test_a_word_that_srun_would_read_as_the_next_component_reaches_the_script() -> None:
    found = step(BATCH, ":", "a b")
    assert found is not None
    shell, flag, text = found.command[-3:]
    assert (shell, flag) == ("sh", "-c")
    assert shlex.split(text) == ["exec", *LAUNCH, ":", "a b"]


def test_a_step_without_its_variables_does_not_start_another() -> None:
    begun = step(BATCH)
    assert begun is not None
    with pytest.raises(LaunchError):
        step({**BATCH, **begun.environment})


def test_a_machine_without_srun_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    found = step(BATCH)
    assert found is not None
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LaunchError, match="cannot run srun"):
        run_step(found._replace(environment={**found.environment, "PATH": "/nowhere"}))


def test_a_dry_run_prints_the_step_and_starts_nothing() -> None:
    words = ["launch", "--dry-run", "--cpu", script("pass"), "--key", "word"]
    code, shown = run(*words, **BATCH)
    assert code == 0
    assert "srun --export=ALL" in shown
    assert "launch --cpu script.py --key '***'" in shown


@pytest.mark.parametrize("words", [["--num-machines", "3"], ["--mixed-precision", "fp16"]])
def test_settings_that_cannot_be_used_are_refused_before_a_step_begins(words: list[str]) -> None:
    assert run("launch", "--cpu", *words, script("pass"), **BATCH)[0] == 2


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("login", ["login"]),
        ("n1,n2", ["n1", "n2"]),
        ("n[1-3,7]", ["n1", "n2", "n3", "n7"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("gpu-[0-1]-ib,n5", ["gpu-0-ib", "gpu-1-ib", "n5"]),
        ("rack[1-2]n[03-04]", ["rack1n03", "rack1n04", "rack2n03", "rack2n04"]),
        ("127.0.0.[2-3]", ["127.0.0.2", "127.0.0.3"]),
        ("a[1,3],b[2]", ["a1", "a3", "b2"]),
    ],
)
def test_a_list_of_nodes_is_read_in_its_order(text: str, nodes: list[str]) -> None:
    assert read_nodelist(text) == nodes


TOO_MANY = ["n[1-1001][1-1001]", "n[1-999999],m[1-2]", f"n[{'1-999999,' * 9999}1]"]


@pytest.mark.parametrize(
    "text",
    ["", "n1,", "n[1", "n1]", "n[2-1]", "n[a]", "n[1-9999999]", "n[]", *TOO_MANY],
    ids=lambda text: text[:20],
)
def test_what_is_no_list_of_nodes_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a|has more than"):
        read_nodelist(text)


@pytest.mark.parametrize(
    ("text", "numbers"), [("1", [1]), ("2(x3),1", [2, 2, 2, 1]), ("1,2(x2)", [1, 2, 2])]
)
def test_numbers_for_each_node_are_read(text: str, numbers: list[int]) -> None:
    assert read_repeated(text) == numbers


@pytest.mark.parametrize("text", ["", "a", "2(x)", "2(x99999999)", "1,,2", "-1"])
def test_what_are_no_numbers_for_nodes_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not"):
        read_repeated(text)
