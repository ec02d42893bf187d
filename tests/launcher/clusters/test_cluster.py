"""Where a cluster's variables say which machine this is, nobody types it; a person's word wins."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from headway.devices.table import extensions
from headway.errors import ConfigError
from headway.ipc.numbering import ALONE, NUMBERINGS
from headway.ipc.origin import Layer
from headway.launcher.clusters import cluster_settings
from headway.launcher.clusters.cluster_settings import cluster_layer
from headway.launcher.clusters.kinds import ClusterKind
from headway.launcher.clusters.table import CLUSTERS
from headway.machine.facts import Machine
from headway.settings.resolve import NOTHING
from headway.settings.setting import AUTO, Machines
from headway.settings.table import TABLE, Settings
from tests.commands.running import run
from tests.distributed.launching import environment, free_port, script, start
from tests.launcher.plan.planning import settings_of

POD = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-master-0",
    "PET_MASTER_PORT": "23456",
}
"""What Kubeflow sets in each pod of a PyTorchJob."""


def settings_in(environ: dict[str, str], **flags: str) -> Settings:
    values: dict[str, Any] = flags
    return settings_of(Machine(), environ, joins_cluster=True, **values)


def place(settings: Settings) -> tuple[object, ...]:
    return (
        *(settings.num_machines, settings.machine_rank),
        *(settings.main_address, settings.main_port),
    )


def test_without_a_cluster_a_run_has_one_machine() -> None:
    assert cluster_layer({"RANK": "1", "WORLD_SIZE": "2", "SLURM_NODEID": "1"}) == NOTHING
    settings = settings_in({})
    assert place(settings) == (1, 0, None, None)
    assert str(settings.origin("num_machines")) == "detected: one machine"


def test_torchruns_variables_give_the_place_and_each_value_names_its_variable() -> None:
    settings = settings_in(POD)
    assert place(settings) == (2, 1, "job-master-0", 23456)
    assert str(settings.origin("num_machines")) == "PET_NNODES"
    assert str(settings.origin("machine_rank")) == "PET_NODE_RANK"
    assert str(settings.origin("main_address")) == "PET_MASTER_ADDR"
    assert str(settings.origin("main_port")) == "PET_MASTER_PORT"
    assert {settings.origin(name).layer for name in cluster_layer(POD)} == {Layer.CLUSTER}


def test_the_number_of_processes_on_a_machine_is_read_and_its_words_set_the_device() -> None:
    settings = settings_in({"PET_NPROC_PER_NODE": "3"})
    assert settings.num_processes == 3
    assert str(settings.origin("num_processes")) == "PET_NPROC_PER_NODE"
    assert settings_in({"PET_NPROC_PER_NODE": "auto"}).num_processes == 1
    for word, device in (("cpu", "cpu"), ("gpu", "cuda"), ("xpu", "xpu")):  # as with torchrun
        entries = cluster_layer({"PET_NPROC_PER_NODE": word})
        assert entries["device"].raw == device
        assert ("num_processes" in entries) == (word == "cpu")
    with pytest.raises(ConfigError, match="PET_NPROC_PER_NODE"):
        settings_in({"PET_NPROC_PER_NODE": "several"})


@pytest.mark.parametrize("name", ["num_machines", "machine_rank", "main_address", "main_port"])
def test_what_a_person_says_replaces_the_clusters_variable(name: str) -> None:
    said = {"num_machines": "3", "machine_rank": "0", "main_address": "b", "main_port": "99"}
    settings = settings_in(POD, **{name: said[name]})
    assert str(settings.values[name].value) == said[name]
    assert settings.origin(name).layer is Layer.FLAG
    others = said.keys() - {name}
    assert {settings.origin(other).layer for other in others} == {Layer.CLUSTER}


def test_auto_asks_the_cluster() -> None:
    settings = settings_in(POD, num_machines="auto", main_port="auto")
    assert place(settings) == (2, 1, "job-master-0", 23456)
    words = "PET_NNODES (auto from flag --num-machines)"
    assert str(settings.origin("num_machines")) == words


def test_a_run_that_a_person_keeps_to_one_machine_takes_no_place_in_the_cluster() -> None:
    assert place(settings_in(POD, num_machines="1")) == (1, 0, None, None)


def test_a_range_of_machines_is_one_of_the_run() -> None:
    machines = settings_in({**POD, "PET_NNODES": "1:4"}).num_machines
    assert (machines, machines.least) == (Machines(4, 1), 1)


@pytest.mark.parametrize(
    ("variable", "text", "name"),
    [
        ("PET_NNODES", "4:1", "num_machines"),
        ("PET_NNODES", "two", "num_machines"),
        ("PET_NNODES", "", "num_machines"),
        ("PET_NNODES", "0", "num_machines"),
        ("PET_NODE_RANK", "-1", "machine_rank"),
        ("PET_MASTER_ADDR", "a b", "main_address"),
        ("PET_MASTER_PORT", "http", "main_port"),
    ],
)
def test_an_impossible_variable_is_refused_by_its_name_unless_a_person_says_otherwise(
    variable: str, text: str, name: str
) -> None:
    environ = {**POD, variable: text}
    with pytest.raises(ConfigError) as caught:
        settings_in(environ)
    (problem,) = caught.value.problems
    assert repr(text) in problem.what
    assert problem.where == variable
    assert variable in problem.fix
    assert TABLE[name].flag in problem.fix
    said = {"num_machines": "2", "machine_rank": "0", "main_address": "b", "main_port": "9"}[name]
    assert str(settings_in(environ, **{name: said}).values[name].value) == said


def test_variables_that_contradict_each_other_are_refused_by_their_names() -> None:
    environ = {**POD, "PET_NODE_RANK": "2"}
    code, error = run("launch", "--cpu", "--dry-run", script("pass"), **environ)
    assert code == 2
    assert "machine_rank is 2, but num_machines is 2: the ranks are 0 to 1" in error
    assert "from: machine_rank: PET_NODE_RANK; num_machines: PET_NNODES" in error


@pytest.mark.parametrize("command", ["launch --cpu --dry-run script.py", "config show --origin"])
def test_dry_run_and_config_show_name_the_variables(command: str) -> None:
    script("pass")
    environ = {**POD, "PET_MAX_RESTARTS": "2", "PET_TEE": "3"}
    code, shown = run(*command.split(), **environ)
    assert code == 0
    assert ("PET_TEE (pass --log-dir DIR)" in shown) == command.startswith("launch")
    rows = [line.split() for line in shown.splitlines()]
    assert ["max_restarts", "2", "environment", "PET_MAX_RESTARTS"] in rows
    assert ["num_machines", "2", "PET_NNODES"] in rows
    assert ["main_address", "job-master-0", "PET_MASTER_ADDR"] in rows


def test_export_does_not_write_the_clusters_place() -> None:
    assert run("config", "export", "--format", "env", **POD) == (0, "")


@pytest.mark.processes
@pytest.mark.usefixtures("torch_asked_once")
def test_doctor_shows_a_variable_that_a_launch_would_refuse() -> None:
    code, text = run("doctor", "--json", PET_NNODES="4:1")
    assert code == 1
    assert any("'4:1'" in check["what"] for check in json.loads(text)["checks"])


@pytest.mark.parametrize("row", CLUSTERS, ids=lambda row: row.name)
def test_a_row_answers_only_for_settings_that_can_be_left_to_auto(row: ClusterKind) -> None:
    assert all(TABLE[name].default == AUTO for name in row.variables)
    assert not row.is_detected({})


HERE = {
    "torchrun": {"PET_NNODES": "2"},
    "mpi": {"OMPI_COMM_WORLD_SIZE": "2"},
    "slurm": {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"},
    "kubernetes": {"JOB_COMPLETION_INDEX": "0"},
    "skypilot": {"SKYPILOT_NUM_NODES": "2"},
    "ranked": {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"},
    "lightning": {"NODE_RANK": "0", "MASTER_ADDR": "a"},
}


@pytest.mark.parametrize("row", CLUSTERS, ids=lambda row: row.name)
def test_the_least_that_a_row_needs_has_a_name_for_which_it_is_imported(row: ClusterKind) -> None:
    least = HERE[row.name]
    assert row.is_detected(least)
    assert any(name.startswith(cluster_settings.PREFIXES) for name in least)
    for name in least:  # so that no less is enough
        assert not row.is_detected({other: least[other] for other in least if other != name})


def test_each_row_is_a_value_of_the_setting() -> None:
    assert {ALONE, AUTO, *(row.name for row in CLUSTERS)} == {*TABLE["cluster"].choices}
    names = [name for row in NUMBERINGS.values() for name in (row.size, row.rank) if name]
    assert all(name.startswith(cluster_settings.PREFIXES) for name in names)


TOY = {
    "TOY_JOB": "7",
    "TOY_MACHINES": "2",
    "TOY_INDEX": "1",
    "TOY_HOSTS": "127.0.0.1 other",
    "HEADWAY_CLUSTER": "toy",
}
FILES = {
    "toy_cluster-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n",
    "toy_cluster-1.0.dist-info/entry_points.txt": "[headway.clusters]\ntoy = toy_cluster:TOY\n",
    "toy_cluster.py": """
from headway.launcher.clusters.kinds import ClusterKind, origin_of
from headway.settings.profile import Entry

TOY = ClusterKind(
    "toy",
    lambda environ: "TOY_JOB" in environ,
    {"num_machines": "TOY_MACHINES", "machine_rank": "TOY_INDEX", "main_port": "TOY_PORT"},
    lambda environ: {
        "main_address": Entry(environ["TOY_HOSTS"].split()[0], origin_of("TOY_HOSTS"))
    },
    job_variable="TOY_JOB",
)
""",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package that adds a cluster, importable as an installed one is."""
    folder = tmp_path / "outside"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(folder)
    extensions.cache_clear()
    yield
    extensions.cache_clear()


@pytest.mark.usefixtures("package")
def test_a_cluster_of_another_package_is_one_row_and_dry_run_shows_its_origins() -> None:
    code, text = run("launch", "--cpu", "--dry-run", script("pass"), **TOY)
    assert code == 0
    lines = [line.split() for line in text.splitlines()]
    assert ["num_machines", "2", "TOY_MACHINES"] in lines
    assert ["machine_rank", "1", "TOY_INDEX"] in lines
    assert ["main_address", "127.0.0.1", "TOY_HOSTS"] in lines
    assert any(line[:3] == ["+", "HEADWAY_ALLOCATION", "7:"] for line in lines)


def test_a_cluster_that_no_package_has_is_refused() -> None:
    code, error = run("launch", "--cpu", "--cluster", "toy", "--dry-run", script("pass"))
    assert (code, "toy" in error) == (2, True)


@pytest.mark.processes
@pytest.mark.usefixtures("warm_pythons", "package")
@pytest.mark.skipif(find_spec("torch") is None, reason="starts ranks, which needs torch")
def test_the_machines_of_a_cluster_start_one_run_without_a_flag() -> None:
    name = script("import os; print(os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])")
    port = str(free_port())
    machines = [
        start("--cpu", name, env=environment(**{**TOY, "TOY_INDEX": rank, "TOY_PORT": port}))
        for rank in ("0", "1")
    ]
    outputs = [machine.communicate(timeout=120) for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], outputs
    assert ["0 of 2" in outputs[0][0], "1 of 2" in outputs[1][0]] == [True, True]
