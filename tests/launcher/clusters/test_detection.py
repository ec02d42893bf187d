"""What the schedulers' recorded environments mean: machines, this one's rank, the first one's name.

Those of SLURM and mpirun are recorded from SLURM 22.05 and Open MPI 4.1; the others are from the
documentation that the rows name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from headway.errors import Code, ConfigError
from headway.ipc.numbering import ALONE, ALONE_VARIABLE, NUMBERINGS, unknown_launcher
from headway.ipc.run_contract import ALLOCATION_VARIABLE, Ranks
from headway.ipc.run_contract import VARIABLE as RUN_VARIABLE
from headway.launcher.clusters import mpi
from headway.launcher.clusters.cluster_settings import assigned_rank, cluster_layer
from headway.launcher.clusters.mpi import MpiJob
from headway.settings.resolve import NOTHING
from headway.settings.table import TABLE
from tests.launcher.clusters.test_cluster import POD, place, settings_in
from tests.launcher.plan.planning import plan

JOB = {
    "SLURM_JOB_ID": "3",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_CPUS_PER_NODE": "4(x2)",
    "SLURM_TASKS_PER_NODE": "1(x2)",
}
"""In a shell of salloc."""

BATCH = {**JOB, "SLURMD_NODENAME": "n1", "SLURM_NODEID": "0", "SLURM_PROCID": "0"}

STEP = {
    **JOB,
    "SLURMD_NODENAME": "n2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_LAUNCH_NODE_IPADDR": "192.0.2.1",
}

MPIRUN = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "PMIX_NAMESPACE": "948830209",
}

Environ = dict[str, str]


def task(environ: Environ) -> Ranks | None:
    return assigned_rank(environ, settings_in(environ))


def test_one_task_on_each_node_is_one_machine_each() -> None:
    settings = settings_in(STEP)
    assert place(settings)[:3] == (2, 1, "n1")
    assert 20000 <= (settings.main_port or 0) < 32000
    on_the_other = {**STEP, "SLURM_NODEID": "0", "SLURMD_NODENAME": "n1"}
    assert settings_in(on_the_other).main_port == settings.main_port
    assert settings.cluster == "slurm"
    assert settings.origin("main_address").variable == "SLURM_STEP_NODELIST"
    assert task(STEP) is None


def test_the_machine_has_its_rank_by_its_node_and_not_by_its_process() -> None:
    assert place(settings_in({**STEP, "SLURM_PROCID": "0"}))[:2] == (2, 1)


def test_two_steps_of_a_job_use_different_ports() -> None:
    assert settings_in(STEP).main_port != settings_in({**STEP, "SLURM_STEP_ID": "1"}).main_port


def test_several_tasks_on_a_node_are_the_ranks() -> None:
    environ = {**STEP, "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_PROCID": "3"}
    environ["SLURM_LOCALID"] = "1"
    assert settings_in(environ).num_processes == 2
    assert task(environ) == Ranks(rank=3, local_rank=1, world_size=4, local_world_size=2)


def test_who_says_which_machine_this_is_has_started_it_as_one() -> None:
    environ = {**STEP, "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
    typed = settings_in(environ, machine_rank="0", num_machines="2")
    assert assigned_rank(environ, typed) is None


def test_a_heterogeneous_job_is_refused_with_the_fix() -> None:
    with pytest.raises(ConfigError, match="heterogeneous"):
        settings_in({**STEP, "SLURM_HET_SIZE": "2"})


def test_a_step_on_one_node_is_a_run_on_one_machine() -> None:
    one = {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "n2", "SLURM_NODEID": "0"}
    environ = {**STEP, **one, "SLURM_STEP_TASKS_PER_NODE": "1"}
    assert place(settings_in(environ)) == (1, 0, None, None)


@pytest.mark.parametrize(
    "shell",
    [
        JOB,
        BATCH,
        {**BATCH, "SLURM_STEP_ID": "4294967291"},
        {**BATCH, "SLURM_STEP_ID": "4294967290"},
        {**STEP, "SLURM_PTY_PORT": "40000", "SLURM_NODEID": "0", "SLURMD_NODENAME": "n1"},
    ],
    ids=["salloc", "sbatch", "batch step", "interactive step", "srun --pty"],
)
def test_outside_of_a_step_the_whole_allocation_is_meant(shell: Environ) -> None:
    settings = settings_in(shell)
    assert (settings.num_machines, settings.main_address) == (2, "n1")
    assert settings.num_processes == 1
    assert task(shell) is None


def test_the_number_of_tasks_that_a_job_asks_for_is_the_number_of_processes() -> None:
    tasks = {"SLURM_TASKS_PER_NODE": "2,4"}
    assert settings_in({**BATCH, **tasks, "SLURM_NTASKS": "6"}).num_processes == 2
    assert settings_in({**BATCH, **tasks}).num_processes == 1  # SLURM's own, with --exclusive
    step = {**STEP, ALLOCATION_VARIABLE: "3:2,4"}
    assert settings_in(step).num_processes == 4
    assert settings_in({**step, ALLOCATION_VARIABLE: "2:2,4"}).num_processes == 1  # another job's


@pytest.mark.parametrize(
    "environ",
    [
        {**BATCH, "SLURM_JOB_NODELIST": "n[1"},
        {**STEP, "SLURM_STEP_NODELIST": "n[1"},
        {**STEP, "SLURM_STEP_TASKS_PER_NODE": "all"},
        {name: text for name, text in STEP.items() if name != "SLURM_NODEID"},
    ],
)
def test_variables_of_slurm_that_cannot_be_read_are_refused(environ: Environ) -> None:
    with pytest.raises(ConfigError) as caught:
        settings_in(environ)
    assert caught.value.problems[0].names == ("num_machines",)
    typed = settings_in(environ, num_machines="2", machine_rank="1", main_address="a")
    assert assigned_rank(environ, typed) is None


def test_a_containers_variables_of_a_rank_change_nothing_where_slurm_speaks() -> None:
    hook = {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "n1"}
    assert place(settings_in({**STEP, **hook})) == place(settings_in(STEP))
    del hook["LOCAL_RANK"]
    assert place(settings_in({**STEP, **hook})) == place(settings_in(STEP))


def test_mpirun_with_one_process_on_each_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "ask_server", lambda: MpiJob("n1", num_nodes=2, node=1))
    settings = settings_in(MPIRUN)
    assert place(settings)[:3] == (2, 1, "n1")
    assert 20000 <= (settings.main_port or 0) < 32000
    assert task(MPIRUN) is None
    # the first machine of a job under mpirun sees a batch script's variables, the others a step's
    assert place(settings_in({**MPIRUN, **STEP})) == place(settings_in({**MPIRUN, **BATCH}))


def test_mpirun_with_several_processes_on_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "ask_server", lambda: MpiJob("n1", num_nodes=2, node=1))
    environ = {**MPIRUN, "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "2"}
    assert place(settings_in(environ))[:3] == (2, 1, "n1")
    assert task(environ) == Ranks(rank=2, local_rank=0, world_size=3, local_world_size=1)


def test_mpirun_on_one_machine_needs_no_server() -> None:
    environ = {**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    settings = settings_in(environ)
    assert (settings.num_machines, settings.num_processes) == (1, 2)
    assert task(environ) == Ranks(rank=1, local_rank=1, world_size=2, local_world_size=2)
    alone = {"OMPI_COMM_WORLD_SIZE": "1"}
    assert place(settings_in(alone)) == (1, 0, None, None)
    assert task(alone) is None


def test_a_server_of_mpirun_that_does_not_answer_is_no_matter_where_the_place_is_typed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def silent() -> MpiJob:
        raise OSError("PMIx_Init returned -25")

    monkeypatch.setattr(mpi, "ask_server", silent)
    with pytest.raises(ConfigError, match="PMIx_Init returned -25"):
        settings_in(MPIRUN)
    typed = settings_in(MPIRUN, num_machines="2", machine_rank="1", main_address="a")
    assert place(typed)[:3] == (2, 1, "a")


SKYPILOT = {
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "0",
}
PAI = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "9",
    "NPROC_PER_NODE": "8",
}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (SKYPILOT, (2, 1, "10.0.0.1", 29500)),
        (PAI, (2, 1, "a", 9)),
        ({"PET_NNODES": "2", "PET_RDZV_ENDPOINT": "a:7"}, (2, None, "a", 7)),
        ({"PET_NNODES": "2", "PET_RDZV_ENDPOINT": "a"}, (2, None, "a", 29500)),
        ({"PET_NNODES": "2:2", "PET_MASTER_ADDR": "a"}, (2, None, "a", 29500)),
    ],
)
def test_other_clusters_say_where_a_machine_is(
    environ: Environ, expected: tuple[object, ...]
) -> None:
    assert place(settings_in(environ)) == expected


def test_processes_are_as_many_as_the_cluster_says_where_nothing_is_set() -> None:
    assert settings_in(PAI).num_processes == 8
    assert settings_in({**SKYPILOT, "SKYPILOT_NUM_GPUS_PER_NODE": "4"}).num_processes == 4
    assert settings_in(PAI, num_processes="2").num_processes == 2


COUNTED = {
    "torchrun": {"PET_NNODES": "2:2", "PET_RDZV_ENDPOINT": "n1:7"},
    "mpi": {**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
    "mvapich": {"MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_RANK": "1"},
    "pmi": {"PMI_SIZE": "2", "PMI_RANK": "1"},
    "jsrun": {"JSM_NAMESPACE_SIZE": "2", "JSM_NAMESPACE_RANK": "1"},
    "flux": {"FLUX_JOB_SIZE": "2", "FLUX_TASK_RANK": "1"},
    "submitit": {"SUBMITIT_LOCAL_NTASKS": "2", "SUBMITIT_LOCAL_GLOBALID": "1"},
    "slurm": {**STEP, "PMI_SIZE": "2", "PMI_RANK": "1"},  # as srun --mpi=pmi2 sets them
    "skypilot": SKYPILOT,
    "ranked": PAI,
    "aws_batch": {"AWS_BATCH_JOB_NUM_NODES": "3"},
    "sagemaker": {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2"},
    "pbs": {"PBS_NODEFILE": "hosts"},
    "lsf": {"LSB_DJOB_HOSTFILE": "hosts"},
    "lsf_list": {"LSB_HOSTS": "n1 n1 n2"},
    "lsf_counts": {"LSB_MCPU_HOSTS": "n1 4 n2 4"},
    "grid_engine": {"PE_HOSTFILE": "hosts"},
    "oar": {"OAR_NODEFILE": "hosts"},
    "cobalt": {"COBALT_NODEFILE": "hosts"},
    "htcondor": {"_CONDOR_NPROCS": "2", "_CONDOR_PROCNO": "1"},
    "google_batch": {"BATCH_HOSTS_FILE": "hosts"},
    "azure_batch": {"AZ_BATCH_NODE_LIST": "n1;n2"},
    "volcano": {"VC_WORKER_NUM": "2", "VC_TASK_INDEX": "1"},
    "leader_worker_set": {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"},
    "lightning": {"NODE_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "9", "WORLD_SIZE": "4"},
}
"""Processes that are one of several, by the rows of the table; `hosts` names n1 and n2."""


@pytest.mark.parametrize(
    "name", [name for name in NUMBERINGS if name not in ("kubernetes", "lightning")]
)
def test_each_row_is_joined_or_refused_with_the_way_to_join_and_the_one_to_be_alone(
    name: str,
) -> None:
    more = " 8 all.q UNDEFINED" * (name == "grid_engine")
    Path("hosts").write_text(f"n1{more}\nn1{more}\nn2{more}\n")
    environ, row = COUNTED[name], NUMBERINGS[name]
    if name in ("torchrun", "mpi", "slurm", "skypilot", "ranked"):
        settings = settings_in(environ)
        assert settings.num_machines * settings.num_processes > 1
        assert settings.cluster == name
        assert settings.machine_rank is not None or row.rank not in environ
        return
    with pytest.raises(ConfigError) as caught:
        settings_in(environ)
    (problem,) = caught.value.problems
    assert row.size in problem.where
    assert "--num-machines" in problem.fix
    assert ("--cluster none" if row.rank else "--hosts n1,n2") in problem.fix
    for alone in ({"cluster": "none"}, {"num_machines": "1"}):
        assert place(settings_in(environ, **alone)) == (1, 0, None, None)
    typed = settings_in(environ, num_machines="2", main_address="a")
    assert place(typed) == (2, None, "a", 29500)
    is_file = environ.get(row.size) == "hosts"
    one = '["algo-1"]' if name == "sagemaker" else "elsewhere" if is_file else "1"
    assert place(settings_in({**environ, row.size: one})) == (1, 0, None, None)
    if row.rank and name != "sagemaker":
        with pytest.raises(ConfigError, match="is 'abc', not a whole number"):
            settings_in({**environ, row.size: "abc"})
        assert unknown_launcher({**environ, row.size: "abc"}) is row
        with pytest.raises(ConfigError, match=f"as one of {environ[row.size]} "):
            settings_in({row.size: environ[row.size]})


@pytest.mark.parametrize("name", list(COUNTED))
def test_a_process_without_a_rank_knows_what_counts_it_unless_somebody_calls_it_alone(
    name: str,
) -> None:
    row, environ = NUMBERINGS[name], COUNTED[name]
    is_numbered = bool(row.rank)
    assert (unknown_launcher(environ) is row) == is_numbered
    assert unknown_launcher({**environ, RUN_VARIABLE: "{}"}) is None
    assert unknown_launcher({**environ, ALONE_VARIABLE: ALONE}) is None
    assert unknown_launcher({**environ, row.size: "1", "WORLD_SIZE": "1"}) is not row
    assert TABLE["cluster"].variable == ALONE_VARIABLE


@pytest.mark.parametrize("missing", ["", "WORLD_SIZE", "MASTER_ADDR"])
def test_lightnings_variables_of_a_machine_are_refused_with_the_flags_that_they_mean(
    missing: str,
) -> None:
    environ = {name: text for name, text in COUNTED["lightning"].items() if name != missing}
    for processes in ({}, {"num_processes": "2"}):
        with pytest.raises(ConfigError) as caught:
            settings_in(environ, **processes)
        fix = caught.value.problems[0].fix
        assert "--num-machines N --machine-rank 1" in fix
        assert ("--main-address a" in fix) == (missing != "MASTER_ADDR")
        assert (
            f"`unset {' '.join(name for name in COUNTED['lightning'] if name in environ)}`" in fix
        )
    assert place(settings_in(environ, cluster="none")) == (1, 0, None, None)
    typed = settings_in(environ, num_machines="2", main_address="b")
    assert place(typed) == (2, 1, "b", 9)
    assert place(settings_in({**STEP, **environ})) == place(settings_in(STEP))
    for more in ({"RANK": "1", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "a"}, {"WORLD_SIZE": "1"}):
        assert cluster_layer({**environ, **more}) == NOTHING


@pytest.mark.parametrize("shell", ["4294967291", "4294967290", ""])
def test_a_shell_in_a_job_of_several_tasks_is_no_task(shell: str) -> None:
    tasks = {"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_ID": shell}
    assert unknown_launcher({**BATCH, **tasks}) is None
    assert unknown_launcher({**STEP, "SLURM_PTY_PORT": "4000"}) is None


def test_a_container_with_some_of_slurms_variables_is_one_machine_of_a_job_on_one() -> None:
    some = {"SLURM_JOB_ID": "3", "SLURM_JOB_NODELIST": "n1"}
    for more in ({}, {"SLURM_STEP_ID": "0"}, {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}):
        assert place(settings_in({**some, **more})) == (1, 0, None, None)
    with pytest.raises(ConfigError):
        settings_in({**some, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"})


def test_a_jobs_index_is_a_machines_rank_only_in_a_run_of_several_machines() -> None:
    assert cluster_layer({"JOB_COMPLETION_INDEX": "3"}) == NOTHING
    pod = {"JOB_COMPLETION_INDEX": "3", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    (note,) = plan(environ=pod, joins_cluster=True).notes
    assert "this pod has index 3 of an indexed Job and trains alone" in note
    for alone in (plan(environ=pod, cluster="none"), plan(environ=pod, num_machines="1")):
        assert not any("this pod" in text for text in alone.notes)
    settings = settings_in({"JOB_COMPLETION_INDEX": "3"}, num_machines="4", main_address="a-0.a")
    assert place(settings) == (4, 3, "a-0.a", 29500)


def test_numbers_that_may_be_of_machines_or_processes_are_refused() -> None:
    environ = {name: text for name, text in PAI.items() if name != "NPROC_PER_NODE"}
    with pytest.raises(ConfigError) as caught:
        settings_in(environ)
    assert "--cluster none" in caught.value.problems[0].fix
    assert place(settings_in(environ, cluster="none")) == (1, 0, None, None)
    assert place(settings_in(environ, num_machines="2", machine_rank="1")) == (2, 1, "a", 9)
    assert cluster_layer({**environ, "LOCAL_RANK": "0"}) == NOTHING
    with pytest.raises(ConfigError):  # as on AzureML
        settings_in({**environ, "LOCAL_RANK": "0", "NODE_RANK": "1"})
    assert cluster_layer({**environ, "WORLD_SIZE": "1"}) == NOTHING


@pytest.mark.parametrize(
    ("other", "name"),
    [
        ({"PET_NNODES": "4"}, "num_machines"),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "0"}, "machine_rank"),
    ],
)
def test_two_clusters_that_disagree_are_refused_by_name(other: Environ, name: str) -> None:
    environ = {**STEP, **other}
    with pytest.raises(ConfigError) as caught:
        settings_in(environ)
    (problem,) = caught.value.problems
    assert (problem.code, problem.names) == (Code.CLUSTERS_DISAGREE, (name,))
    assert "SLURM_" in problem.where
    assert "PET_" in problem.where
    assert settings_in(environ, cluster="slurm").cluster == "slurm"
    said = {"num_machines": "2", "machine_rank": "1"}[name]
    assert str(settings_in(environ, **{name: said}).values[name].value) == said


def test_the_first_of_two_clusters_names_machine_0_which_has_several_names() -> None:
    environ = {**STEP, **POD, "PET_MASTER_ADDR": "10.0.0.1"}
    assert place(settings_in(environ)) == (2, 1, "10.0.0.1", 23456)


def test_a_named_cluster_that_is_not_here_is_refused_and_another_is_not_asked() -> None:
    for said in ({}, {"num_machines": "1"}, {"num_machines": "2", "main_address": "a"}):
        with pytest.raises(ConfigError) as caught:
            settings_in(dict(POD), cluster="slurm", **said)
        assert [problem.code for problem in caught.value.problems] == [Code.NO_CLUSTER]


def test_no_cluster_is_read_where_none_is_meant() -> None:
    assert place(settings_in(STEP, cluster="none")) == (1, 0, None, None)


def test_a_launch_inside_of_a_rank_has_no_part_in_the_ranks_run() -> None:
    inside = {**STEP, RUN_VARIABLE: "{}", ALLOCATION_VARIABLE: "3:"}
    assert place(settings_in(inside)) == (1, 0, None, None)
    assert place(settings_in(inside, cluster="slurm"))[:2] == (2, 1)
    assert place(settings_in({**POD, RUN_VARIABLE: "{}"})) == (1, 0, None, None)


def test_a_job_that_a_rank_has_submitted_is_a_run_of_its_own() -> None:
    submitted = {**STEP, RUN_VARIABLE: "{}"}
    assert place(settings_in({**submitted, ALLOCATION_VARIABLE: "2:"}))[:2] == (2, 1)
    assert place(settings_in(submitted))[:2] == (2, 1)  # by a rank outside of any job


def test_the_strongest_source_names_the_cluster() -> None:
    from headway.settings.resolve import environment_layer

    variables = environment_layer({"HEADWAY_CLUSTER": "none"})
    assert cluster_layer(STEP, [variables]) == NOTHING
    flags: Mapping[str, str] = {"HEADWAY_CLUSTER": "SLURM"}
    assert cluster_layer(STEP, [variables, environment_layer(flags)]) != NOTHING
    assert cluster_layer(STEP, [environment_layer({"HEADWAY_CLUSTER": "slrum"})]) != NOTHING
