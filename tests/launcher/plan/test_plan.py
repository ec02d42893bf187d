"""A plan does what was asked, or says why it cannot; on any machine, without starting anything."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headway.errors import ConfigError
from headway.ipc.origin import Layer
from headway.ipc.run_contract import RANK_VARIABLES
from headway.launcher.plan.describe import describe
from headway.launcher.plan.plan import summary
from headway.launcher.plan.program import Program, flags_in
from headway.launcher.run import launch_environment
from headway.machine.facts import Gpu, Machine
from headway.settings.table import TABLE
from tests.launcher.plan.planning import plan, set_by

H100 = Gpu("NVIDIA H100", "GPU-h", 80 * 2**30, (9, 0))
T4 = Gpu("Tesla T4", "GPU-t", 16 * 2**30, (7, 5))
SERVER = Machine(cores=64, gpus=tuple(H100._replace(uuid=f"GPU-{i}") for i in range(8)))
MAC = Machine(system="Darwin", cores=8, mps=True, mps_reason="Apple silicon")


def test_one_process_replaces_the_launcher() -> None:
    launch = plan()
    assert launch.supervised is None
    assert launch.program.command(launch.python) == ["/bin/python", "train.py", "--lr", "3"]


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        ("-m headway launch -O a.py", ""),
        ("-O -m headway launch a.py", "-O"),
        ("-OOuBm headway", "-O -O -u -B"),
        ("-Xdev -X importtime -Wd -W error -m headway", "-X dev -X importtime -W d -W error"),
        (
            "-uWerror --check-hash-based-pycs never -Im headway",
            "-u -W error --check-hash-based-pycs never -I",
        ),
        ("-E -c pass", "-E"),
        ("-sP /bin/headway launch a.py", ""),
        ("-u -", ""),
        ("", ""),
    ],
)
def test_pythons_own_flags_are_found_in_its_command_line(words: str, flags: str) -> None:
    assert flags_in(["python", *words.split()]) == tuple(flags.split())


@pytest.mark.parametrize(
    ("why", "values"),
    [
        ("num_processes is 2", {"num_processes": "2"}),
        ("max_restarts is 1", {"max_restarts": "1"}),
        ("log_dir is logs", {"log_dir": "logs"}),
        ("num_machines is 2", {"num_machines": "2", "main_address": "a"}),
    ],
)
def test_what_needs_a_launcher_keeps_one(why: str, values: dict[str, Any]) -> None:
    assert plan(layer=Layer.FLAG, **values).supervised == why
    assert plan(supervise=True).supervised == "--supervise is set"


def test_no_variable_of_a_run_around_it_reaches_an_inner_run() -> None:
    stale = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_ERROR_FILE": "/x", "RANK": "1"}
    for launch in (plan(environ=stale), plan(environ=stale, num_processes="2")):
        assert not launch_environment(launch, stale).keys() & stale.keys()
    alone = launch_environment(plan(environ=stale, num_processes="1"), stale)
    assert alone["RANK"] == "0"
    assert not alone.keys() & {"TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE"}


def test_what_is_removed_is_reported_and_what_the_script_needs_from_the_shell_stays() -> None:
    shell = {"MASTER_ADDR": "x", "MASTER_PORT": "9", "WORLD_SIZE": "2"}
    spawns = plan(environ=shell)
    assert launch_environment(spawns, shell).items() >= shell.items()
    assert not spawns.notes
    ranks: dict[str, Any] = {"num_processes": "2"}
    for environ, typed in (({**shell, "RANK": "1"}, {}), (shell, ranks)):
        launch = plan(environ=environ, **typed)
        assert not launch_environment(launch, environ).keys() & environ.keys()
        (note,) = launch.notes
        assert all(name in note for name in environ)
        assert not plan(environ={**environ, "HEADWAY_RUN": "{}"}, **typed).notes  # inside of ours


SHELL = {
    "ACCELERATE_MIXED_PRECISION": "bf16",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
    "GLOO_SOCKET_IFNAME": "eth7",
    "PYTHONUNBUFFERED": "x",
    "TORCH_FR_BUFFER_SIZE": "7",
}


def test_no_default_of_ours_replaces_what_the_shell_has_set() -> None:
    launch = plan(environ=SHELL, num_processes="2")
    assert launch_environment(launch, SHELL).items() >= SHELL.items()
    run = json.loads(set_by(launch)["HEADWAY_RUN"] or "")
    assert (run["mixed_precision"], run["gradient_accumulation_steps"]) == ("bf16", 4)
    assert launch.settings.origin("mixed_precision").variable == "ACCELERATE_MIXED_PRECISION"
    others = {"PET_MAX_RESTARTS": "3", "OMP_NUM_THREADS": "2"}
    assert summary(plan(environ={**SHELL, **others}, num_processes="2")) == (
        "train.py: 2 processes on cpu, precision bf16 (ACCELERATE_MIXED_PRECISION), gradient "
        "accumulation 4 (ACCELERATE_GRADIENT_ACCUMULATION_STEPS), max restarts 3 "
        "(PET_MAX_RESTARTS), 2 threads each (OMP_NUM_THREADS)"
    )
    typed = set_by(plan(environ=SHELL, mixed_precision="no"))
    assert typed["ACCELERATE_MIXED_PRECISION"] == "no"
    nested = {**SHELL, "HEADWAY_RUN": "{}"}
    assert plan(environ=nested).settings.mixed_precision == "no"
    with pytest.raises(ConfigError, match="'fp8' for mixed_precision"):
        plan(environ={"ACCELERATE_MIXED_PRECISION": "fp8"})
    masked = {"ACCELERATE_USE_CPU": "1", "CUDA_VISIBLE_DEVICES": "1"}
    assert not set_by(plan(SERVER, environ=masked)).keys() & masked.keys()
    assert set_by(plan(SERVER, environ=masked, device="cpu"))["CUDA_VISIBLE_DEVICES"] == ""


def test_scripts_written_for_accelerate_see_the_same_settings() -> None:
    environment = set_by(plan(mixed_precision="bf16", gradient_accumulation_steps="4"))
    assert environment["ACCELERATE_USE_CPU"] == "true"
    assert environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert environment["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "4"
    # Accelerate takes it for more than the script's own argument
    assert "ACCELERATE_GRADIENT_ACCUMULATION_STEPS" not in set_by(plan())
    assert set_by(plan(SERVER))["ACCELERATE_USE_CPU"] == "false"


def test_the_contract_says_what_was_typed_and_where_the_rest_came_from() -> None:
    run = json.loads(set_by(plan(mixed_precision="bf16"))["HEADWAY_RUN"] or "")
    assert run["mixed_precision"] == "bf16"
    origin = run["origins"]["mixed_precision"]
    assert (origin["layer"], origin["reason"]) == ("FLAG", "flag --mixed-precision")
    assert run["origins"]["device"]["layer"] == "DETECTED"


def test_threads_are_set_unless_the_users_variable_says_them() -> None:
    assert set_by(plan(num_processes="4"))["OMP_NUM_THREADS"] == "2"
    mine = {"OMP_NUM_THREADS": "3"}
    assert "OMP_NUM_THREADS" not in set_by(plan(environ=mine))
    assert set_by(plan(environ=mine, threads_per_process="5"))["OMP_NUM_THREADS"] == "5"
    nonsense = {"OMP_NUM_THREADS": "abc"}
    assert set_by(plan(environ=nonsense))["OMP_NUM_THREADS"] == "8"


def test_ranks_on_one_machine_stay_on_loopback_unless_the_user_named_a_device() -> None:
    assert set_by(plan(num_processes="2"))["GLOO_SOCKET_IFNAME"] == "lo"
    assert set_by(plan(MAC, device="cpu", num_processes="2"))["GLOO_SOCKET_IFNAME"] == "lo0"
    mine = {"GLOO_SOCKET_IFNAME": "eth7"}
    assert "GLOO_SOCKET_IFNAME" not in set_by(plan(environ=mine, num_processes="2"))
    far = plan(num_machines="2", main_address="10.0.0.1")
    assert "GLOO_SOCKET_IFNAME" not in set_by(far)
    near = plan(num_machines="2", main_address="127.0.0.1")
    assert set_by(near)["GLOO_SOCKET_IFNAME"] == "lo"


def test_extra_variables_reach_the_script_and_beat_what_is_computed() -> None:
    environment = set_by(plan(env="A=1 OMP_NUM_THREADS=7"))
    assert environment["A"] == "1"
    assert environment["OMP_NUM_THREADS"] == "7"
    assert plan(env="OMP_NUM_THREADS=7").settings.threads_per_process == 7


MASKED = SERVER._replace(mask="6,4,2")


@pytest.mark.parametrize(
    ("machine", "values", "mask"),
    [
        (SERVER, {"devices": "3"}, "0,1,2"),
        (SERVER, {"devices": "1,3"}, "1,3"),
        (SERVER, {"devices": "3,"}, "3"),
        (SERVER, {"devices": ["5", "0"]}, "5,0"),
        (SERVER, {"num_processes": "2"}, "0,1"),
        (MASKED, {"devices": "2,0"}, "2,6"),
        (SERVER, {"device": "cpu"}, ""),  # hidden from plain scripts
    ],
)
def test_the_gpus_of_the_ranks_become_the_mask(
    machine: Machine, values: dict[str, Any], mask: str
) -> None:
    assert set_by(plan(machine, **values))["CUDA_VISIBLE_DEVICES"] == mask


TWO = {"num_machines": "2", "main_address": "a"}


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"devices": "3", "num_processes": "2"}, "selects 3 GPUs .the first 3"),
        ({**TWO, "machine_rank": "2"}, "ranks are 0 to 1"),
        ({"machine_rank": "1"}, "only rank is 0"),
        ({"env": "GROUP_RANK=3"}, "GROUP_RANK"),  # an inner rank's
        ({"env": "ACCELERATE_MIXED_PRECISION=bf16"}, "derives from the setting mixed_precision"),
        ({"debug_rank": "2", "num_processes": "2"}, "debug_rank contains rank 2"),
        ({**TWO, "debug_rank": "1"}, "other machines would not wait"),
        ({"env": "OMP_NUM_THREADS=3", "threads_per_process": "2"}, "OMP_NUM_THREADS=3"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_reason_place_and_fix(
    values: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        plan(SERVER, layer=Layer.PROJECT_PROFILE, **values)
    for problem in caught.value.problems:
        assert problem.where
        assert problem.fix


@pytest.mark.parametrize(
    ("reason", "place", "values"),
    [
        ("num_processes is 2", "--num-processes", {"num_processes": "2"}),
        ("log_dir is logs", "--log-dir", {"log_dir": "logs"}),
        ("--supervise", "--supervise", {"supervise": True}),
        ("Python", "--no-python", {"program": Program("/bin/ls", kind="program")}),
    ],
)
def test_what_cannot_run_in_this_process_is_refused(
    reason: str, place: str, values: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        plan(in_process=True, **values)
    assert place in caught.value.problems[0].where


def test_a_plan_in_this_process_says_so() -> None:
    launch = plan(in_process=True, env="PYTHONHASHSEED=0 A=1")
    assert "in this interpreter" in describe(launch)
    assert "PYTHONHASHSEED" in launch.notes[0]
    assert len(launch.notes) == 1


def test_ranks_that_are_chosen_or_debugged_need_no_launcher_beside_the_only_one() -> None:
    assert plan(ranks="0", debug_rank="0").supervised is None


def test_a_debugged_run_says_who_has_the_terminal_and_what_it_goes_without() -> None:
    launch = plan(SERVER, num_processes="2", debug_rank="1", ranks="0", log_dir="logs")
    assert "rank 1 has the terminal" in summary(launch)
    assert "ranks has no effect with debug_rank (flag --ranks)" in launch.notes
    assert set_by(launch)["TORCH_NCCL_ENABLE_MONITORING"] == "0"
    assert json.loads(set_by(launch)["HEADWAY_RUN"] or "")["debug_rank"] == 1


def test_a_flag_without_effect_gets_a_note_and_a_profiles_default_none() -> None:
    assert "main_port has no effect on one machine" in plan(main_port="1234").notes[0]
    assert plan(layer=Layer.USER_PROFILE, main_port="1234").notes == ()


OF_THE_LAUNCHER = {
    "restart_delay": "3",
    "grace_period_s": "5",
    "ranks": "0",
    "output": "raw",
    "status": "off",
    "start_method": "exec",
}


@pytest.mark.parametrize("name", OF_THE_LAUNCHER)
def test_a_flag_for_the_launcher_of_ranks_gets_a_note_where_the_script_replaces_it(
    name: str,
) -> None:
    values: dict[str, Any] = {name: OF_THE_LAUNCHER[name]}
    assert f"{name} has no effect with one process" in plan(**values).notes[0]
    assert "--supervise" in plan(**values).notes[0]
    assert plan(layer=Layer.USER_PROFILE, **values).notes == ()
    assert plan(num_processes="2", max_restarts="1", **values).notes == ()


def test_a_flag_that_another_setting_makes_useless_gets_a_note_that_names_it() -> None:
    launch = plan(num_processes="2", restart_delay="3")
    assert "restart_delay has no effect without max_restarts" in launch.notes[0]
    launch = plan(num_processes="2", debug_rank="0", output="raw")
    assert "output has no effect with debug_rank" in launch.notes[0]
    launch = plan(num_processes="2", status="off", debug_rank="0")
    assert "status has no effect with debug_rank" in launch.notes[0]
    launch = plan(num_processes="2", status="off", output="raw")
    assert "status has no effect with output raw" in launch.notes[0]
    tool = Program("tool", (), kind="program")
    launch = plan(num_processes="2", start_method="fork", program=tool)
    assert "start_method has no effect with --no-python" in launch.notes[0]


def test_the_description_shows_every_setting_with_its_origin_and_every_change() -> None:
    launch = plan(SERVER, {"RANK": "0"}, devices="1,")
    text = describe(launch)
    for name in TABLE:
        (line,) = [line for line in text.splitlines() if line.split()[:1] == [name]]
        assert str(launch.settings.origin(name)) in line
    for name in launch.environment:
        assert f" {name} " in text
    assert "- RANK" in text
    assert "{" not in text  # the content of HEADWAY_RUN is internal
    assert "/bin/python train.py --lr 3" in text


WORLD = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}


def test_the_flag_for_one_process_makes_it_the_only_rank_of_a_world_of_one() -> None:
    launch = plan(num_processes="1")
    assert launch.supervised is None
    assert set_by(launch).items() >= WORLD.items()
    assert launch.environment["RANK"].origin.layer is Layer.FLAG
    assert set_by(launch)["GLOO_SOCKET_IFNAME"] == "lo"


@pytest.mark.parametrize("layer", [Layer.USER_PROFILE, Layer.ENVIRONMENT, Layer.CLUSTER])
def test_one_process_that_no_flag_asks_for_is_plain_python(layer: Layer) -> None:
    for launch in (plan(), plan(layer=layer, num_processes="1")):
        assert not set_by(launch).keys() & {*RANK_VARIABLES, "GLOO_SOCKET_IFNAME"}


def test_a_supervised_process_gets_its_variables_from_the_agent_alone() -> None:
    assert "RANK" not in set_by(plan(num_processes="1", supervise=True))
    several = plan(num_processes="1", num_machines="2", main_address="a")
    assert "RANK" not in set_by(several)


def test_more_processes_than_cores_are_noted() -> None:
    assert plan(num_processes="17").notes == ("17 processes oversubscribe 8 cores",)
    bound = "OMP_PROC_BIND=close binds the threads of all ranks to the same cores; unset it"
    assert plan(num_processes="2", env="OMP_PROC_BIND=close").notes == (bound,)
    assert not plan(num_processes="16").notes


def test_the_summary_is_one_line_with_all_that_matters() -> None:
    line = summary(plan(num_processes="3", mixed_precision="bf16"))
    assert line == "train.py: 3 processes on cpu, precision bf16, 2 threads each"
    line = summary(plan(layer=Layer.USER_PROFILE, gradient_accumulation_steps="8"))
    assert "precision fp32, gradient accumulation 8 (profile), " in line


def test_the_ranks_of_a_launcher_are_hooked_and_one_process_is_plain_python() -> None:
    assert plan(num_processes="2").not_hooked is None
    assert plan(in_process=True).not_hooked is None
    assert "--set library_hooks=yes" in (plan().not_hooked or "")
    assert "plain Python" in describe(plan())


@pytest.mark.parametrize(
    "asked", [{"library_hooks": "yes"}, {"resume": "latest"}, {"time_limit": "60"}]
)
def test_what_a_trainer_obeys_hooks_one_process_too(asked: dict[str, Any]) -> None:
    assert plan(**asked).not_hooked is None
    assert plan(environ={"SLURM_JOB_ID": "7"}).not_hooked is None, "a job may be preempted"
    values: dict[str, Any] = {**asked, "library_hooks": "no"}
    assert plan(**values).not_hooked == "library_hooks: flag --set"
