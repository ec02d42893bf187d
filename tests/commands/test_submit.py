"""`headway launch --submit slurm`: what SLURM is given, and how the job is followed.

SLURM's commands are scripts that record what they are given; tests/clusters has the real ones.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import pytest

from headway.history.record import find
from headway.launcher.remote import slurm_jobs
from headway.launcher.remote.slurm_jobs import JobState, batch_script, read_state
from tests.commands.running import run

SECRET = "dont-tell-anyone"

SHOWN = """\
JobId=7 JobName=a JobState=FAILED ExitCode=9:9
   UserId=me(0) GroupId=me(0) MCS_label=N/A
   JobState={state} Reason={reason} Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode={code}
   StdErr=/dev/null
   StdOut={log}
   Power=
"""


@pytest.fixture
def script() -> str:
    Path("train.py").write_text("")
    return "train.py"


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of commands that comes first on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


def add_command(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def sbatch(fakes: Path) -> Path:
    """Return the file in which an sbatch records its words, its script and its environment."""
    record = fakes.parent / "sbatch.json"
    python = (
        "import json, os, sys; json.dump([sys.argv[2:], sys.stdin.read(), dict(os.environ)], "
        f"open({str(record)!r}, 'w'))"
    )
    add_command(fakes, "sbatch", f'{sys.executable} -c "{python}" - "$@"; echo "7;cluster"')
    return record


def submitted(*words: str) -> str:
    """Return the script of a job that would be submitted."""
    code, text = run("launch", "--submit", "slurm", "--dry-run", "--quiet", *words)
    assert code == 0, text
    return text


def options_in(script: str) -> dict[str, str]:
    lines = [line for line in script.splitlines() if line.startswith("#SBATCH --")]
    return dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in lines)


def test_a_job_asks_slurm_for_what_flags_profile_and_sbatch_options_say(script: str) -> None:
    Path("headway.yaml").write_text("sbatch: {partition: cpu, account: physics, time: 1d}\n")
    words = ["--num-machines", "4", "--sbatch", "time=2h exclusive", "--sbatch", "qos=a=b"]
    options = options_in(submitted(*words, script))
    assert options["nodes"] == "4"
    assert options["time"] == "0-02:00:00"
    assert (options["partition"], options["account"]) == ("cpu", "physics")
    assert (options["exclusive"], options["qos"]) == ("", "a=b")
    assert options["chdir"] == os.getcwd()
    assert options["output"] == f"{os.getcwd()}/headway-jobs/train-%j.log"


def test_sbatch_options_replace_those_of_headway_and_of_profiles(script: str) -> None:
    Path("headway.yaml").write_text("sbatch: time=1d\n")
    words = [f"--sbatch={word}" for word in ("time=unlimited", "no-requeue", "signal=USR1@9")]
    options = options_in(submitted(*words, script))
    assert (options["time"], options["signal"]) == ("unlimited", "USR1@9")
    assert "requeue" not in options


@pytest.mark.processes  # torch is asked
@pytest.mark.usefixtures("torch_asked_once")
def test_a_job_asks_for_the_gpus_and_cores_that_the_settings_use(script: str) -> None:
    assert "gpus-per-node" not in options_in(submitted(script))
    words = ["--device", "cuda", "--num-processes", "8", "--threads-per-process", "4"]
    options = options_in(submitted(*words, script))
    assert (options["gpus-per-node"], options["cpus-per-task"]) == ("8", "32")
    two = options_in(submitted("--device", "cuda", "--devices", "2", script))
    assert two["gpus-per-node"] == "2"
    options = options_in(submitted(*words, "--sbatch", "gres=gpu:a:8", script))
    assert "gpus-per-node" not in options


def test_the_signal_comes_early_enough_for_the_grace_period(script: str) -> None:
    assert options_in(submitted("--grace-period-s", "10m", script))["signal"] == "TERM@690"
    assert options_in(submitted(script))["signal"] == "TERM@120"
    assert options_in(submitted("--sbatch", "time=1h", script))["signal"] == "TERM@120"


@pytest.mark.parametrize(
    "flags",
    [
        ("--sbatch", "time=1m"),
        ("--sbatch", "time=4m"),
        ("--sbatch", "time=10m", "--grace-period-s", "600"),
    ],
)
def test_a_job_too_short_for_a_signal_has_none_and_is_told_so(
    script: str, flags: tuple[str, ...]
) -> None:
    text = submitted(*flags, script)
    assert "signal" not in options_in(text)
    assert "not be signaled to save before its time limit" in text


def test_the_job_gets_the_words_typed_here_and_the_variables_of_settings(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWAY_MIXED_PRECISION", "bf16")
    odd = ["a b", "it's", "$HOME", "--sbatch=3", "two\nlines"]
    text = submitted("--num-machines", "2", "--num_processes", "2", script, *odd)
    assert "export HEADWAY_MIXED_PRECISION=bf16\n" in text
    command = text[text.index("-m headway launch") : text.index("\ncode=$?")]
    assert shlex.split(command)[2:] == ["launch", "--quiet", "--num-processes=2", script, *odd]


@pytest.mark.processes
@pytest.mark.parametrize("where", ["--env", "HEADWAY_ENV"])
def test_no_secret_is_in_the_script_or_on_sbatchs_command_line(
    where: str, script: str, sbatch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWAY_RUN_KEY", SECRET)  # of another run
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    words = ["--env", "A=1"]
    if where == "--env":
        words += ["--env", f"HF_TOKEN={SECRET}"]
    else:
        monkeypatch.setenv("HEADWAY_ENV", f"HF_TOKEN={SECRET}")
    code, shown = run("launch", "--submit", "slurm", *words, script)
    assert code == 0
    assert "HEADWAY_ENV" in shown  # how the job gets it
    arguments, text, environ = json.loads(sbatch.read_text())
    for public in (*arguments, text, shown):
        assert SECRET not in public
    assert environ["HEADWAY_ENV"] == f"HF_TOKEN={SECRET}"
    assert environ["WANDB_API_KEY"] == SECRET  # as sbatch inherits anything
    assert "HEADWAY_RUN_KEY" not in environ


@pytest.mark.processes
def test_the_job_id_is_all_of_stdout(
    script: str, sbatch: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from headway.commands.main import main

    assert main(["launch", "--submit", "slurm", "--log-dir", "logs", script]) == 0
    assert capfd.readouterr().out == "7\n"
    arguments, text, _ = json.loads(sbatch.read_text())
    # SBATCH_* variables override what is in the script, but not the command line
    in_script = [
        f"--{key}={value}" if value else f"--{key}" for key, value in options_in(text).items()
    ]
    assert arguments == ["--parsable", *in_script]


@pytest.mark.processes
def test_what_a_wrapper_of_sbatch_prints_is_not_taken_for_the_job_id(
    script: str, fakes: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from headway.commands.main import main

    banner = ["Welcome to node 5", "2026", "--> Verifying...OK"]
    with_id = ([*banner, "7;cluster"], ["7", "", "Goodbye, 3 jobs"])
    for lines in (*with_id, ["Submitted batch job 7"], []):
        add_command(fakes, "sbatch", "cat > /dev/null\n" + "\n".join(f"echo '{x}'" for x in lines))
        assert main(["launch", "--submit", "slurm", script]) == 0
        shown = capfd.readouterr()
        assert shown.out == "7\n" * (lines in with_id)
        assert ("--follow 7`" if shown.out else "no job id; `squeue --me`") in shown.err


@pytest.mark.processes
def test_a_job_of_a_job_inherits_nothing_of_the_outer_one_but_where_slurm_is(
    script: str, sbatch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_CONF"):
        monkeypatch.setenv(name, "1")
    assert run("launch", "--submit", "slurm", script)[0] == 0
    environ = json.loads(sbatch.read_text())[2]
    assert [name for name in environ if name.startswith("SLURM_")] == ["SLURM_CONF"]


def test_the_number_of_machines_is_for_slurm_and_the_launch_in_the_job_asks_slurm(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWAY_NUM_MACHINES", "3")
    text = submitted(script)
    assert options_in(text)["nodes"] == "3"
    assert "HEADWAY_NUM_MACHINES" not in text
    monkeypatch.setenv("HEADWAY_MAIN_ADDRESS", "here")
    assert run("launch", "--submit", "slurm", script)[0] == 2


@pytest.mark.processes
def test_what_sbatch_refuses_is_said_in_its_words(script: str, fakes: Path) -> None:
    add_command(fakes, "sbatch", "echo 'sbatch: error: no such partition' >&2; exit 1")
    code, text = run("launch", "--submit", "slurm", script)
    assert code == 4
    assert "no such partition" in text


def test_without_slurm_that_is_said(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert run("launch", "--submit", "slurm", script)[0] == 3


@pytest.mark.processes
@pytest.mark.parametrize(
    ("code", "state", "variables", "requeued"),
    [
        (75, "RUNNING", {}, "requeue 7\n"),
        (143, "RUNNING", {"PREEMPTED": "2026-11-24T07:28:12"}, "requeue 7\n"),
        (143, "COMPLETING", {"PREEMPTED": "2026-11-24T07:28:12"}, ""),
        (143, "RUNNING", {"PREEMPTED": "N/A"}, ""),  # the script's own end, or a time limit
        (75, "RUNNING", {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3"}, "requeue 5_3\n"),
        (75, "COMPLETING", {}, ""),
        (1, "RUNNING", {}, ""),
        (76, "RUNNING", {}, "update JobId=7 Requeue=0\n"),
        (0, "RUNNING", {}, ""),
    ],
)
def test_only_a_job_that_has_saved_or_was_preempted_and_is_not_cancelled_is_run_again(
    code: int, state: str, variables: dict[str, str], requeued: str, fakes: Path
) -> None:
    add_command(
        fakes, "squeue", f"case $* in *preempttime) echo $PREEMPTED;; *) echo {state};; esac"
    )
    add_command(fakes, "scontrol", 'echo "$@"')
    text = batch_script({}, {}, ["sh", "-c", f"exit {code}"])
    environ = {**os.environ, "SLURM_JOB_ID": "7", **variables}
    done = subprocess.run(["bash"], input=text, env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (code, requeued)


@pytest.mark.processes
def test_a_job_of_an_array_knows_its_end_also_where_its_number_is_that_of_the_array(
    fakes: Path,
) -> None:
    end = "2026-11-24T07:22:42"
    add_command(fakes, "squeue", f"echo {end}; case $* in *5_3*) ;; *) echo {end};; esac")
    text = batch_script({}, {}, ["sh", "-c", "echo $SLURM_JOB_END_TIME"])
    array = {"SLURM_JOB_ID": "5", "SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3"}
    environ = {**os.environ, **array, "TZ": "UTC"}
    done = subprocess.run(["bash"], input=text, env=environ, capture_output=True, text=True)
    assert done.stdout == f"{int(datetime.fromisoformat(f'{end}+00:00').timestamp())}\n"


def shown(state: str, log: Path, code: str = "0:0", reason: str = "None") -> str:
    return SHOWN.format(state=state, log=str(log).replace("%", "%%"), code=code, reason=reason)


def test_what_slurm_shows_of_a_job_is_read_whatever_its_name_is() -> None:
    state = read_state(shown("FAILED", Path("/a b/50%/x.log"), "3:0", "NonZeroExitCode"))
    assert state == JobState("FAILED", "NonZeroExitCode", "/a b/50%/x.log", 3, 0)


@pytest.mark.parametrize("log", ["/nowhere/a-7.log", ""])
def test_a_job_without_a_log_is_said_to_have_none_and_where_it_was_looked_for(
    log: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = ["RUNNING"] * 5 + ["COMPLETED"] * 2
    monkeypatch.setattr(slurm_jobs, "state_of", lambda _: JobState(states.pop(0), log=log))
    monkeypatch.setattr(slurm_jobs, "_MIN_POLL_S", 0.0)
    monkeypatch.setattr(slurm_jobs, "_MAX_POLL_S", 0.0)
    said: list[str] = []
    slurm_jobs.follow("7", print, said.append)
    assert len(said) == 2  # once while it runs, and at its end
    assert all(log in line for line in said)


@pytest.mark.parametrize(
    ("name", "code", "signal", "exit_code"),
    [
        ("COMPLETED", 0, 0, 0),
        ("FAILED", 3, 0, 3),
        ("FAILED", 0, 9, 137),
        ("TIMEOUT", 0, 0, 1),
        ("CANCELLED", 75, 0, 75),
    ],
)
def test_a_followed_job_has_the_exit_code_of_its_script(
    name: str, code: int, signal: int, exit_code: int
) -> None:
    assert JobState(name, code=code, signal=signal).exit_code == exit_code


@pytest.mark.processes
def test_a_job_is_followed_over_a_requeue_to_its_end(
    fakes: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    """Each question to SLURM gets the next answer; the log grows before the answer is given."""
    log = tmp_path / "50% job.log"
    answers = [
        ("", "PENDING", "0:0", "Resources"),
        ("one\n", "RUNNING", "0:0", "None"),
        ("", "PREEMPTED", "0:0", "None"),
        ("", "PENDING", "0:0", "BeginTime"),
        ("two", "RUNNING", "0:0", "None"),
        ("", "FAILED", "3:0", "NonZeroExitCode"),
        ("\n", "FAILED", "3:0", "NonZeroExitCode"),
    ]
    given = iter(answers)

    def ask(job: str) -> JobState:
        printed, *state = next(given)
        with log.open("a") as file:
            file.write(printed)
        return read_state(shown(state[0], log, *state[1:]))

    monkeypatch.setattr(slurm_jobs, "state_of", ask)
    monkeypatch.setattr(slurm_jobs, "_MIN_POLL_S", 0.0)
    monkeypatch.setattr(slurm_jobs, "_MAX_POLL_S", 0.0)
    from headway.commands.main import main

    assert main(["logs", "--follow", "7"]) == 3
    out, err = capfdbinary.readouterr()
    assert out == b"one\ntwo\n"
    assert [b"Resources" in line for line in err.splitlines()].count(True) == 1
    assert not list(given)


@pytest.mark.parametrize(
    ("state", "code", "said"),
    [("RUNNING", 130, "headway logs --follow 12_3"), ("COMPLETED", 0, "ended: COMPLETED")],
)
def test_ctrl_c_leaves_the_job_alone_and_says_how_to_come_back_if_it_has_not_ended(
    state: str, code: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> JobState:
        raise KeyboardInterrupt

    monkeypatch.setattr(slurm_jobs, "follow", interrupt)
    monkeypatch.setattr(slurm_jobs, "state_of", lambda _: JobState(state))
    ended, text = run("logs", "-f", "12_3")
    assert ended == code
    assert said in text


@pytest.mark.parametrize("words", [["1", "2"], ["-1"], ["1;ls"], ["--rank", "0", "12"]])
def test_one_job_is_followed(words: list[str]) -> None:
    assert run("logs", "--follow", *words)[0] == 2


@pytest.mark.processes
def test_a_job_that_the_controller_has_forgotten_is_looked_up_in_the_accounting(
    fakes: Path,
) -> None:
    add_command(fakes, "scontrol", "echo 'Invalid job id specified' >&2; exit 1")
    add_command(fakes, "sacct", "echo 'CANCELLED by 0|0:15'")
    code, text = run("logs", "-f", "7")
    assert code == 128 + 15
    add_command(fakes, "sacct", "exit 1")
    code, text = run("logs", "-f", "7")
    assert code == 4
    assert "Invalid job id specified" in text


CODE = {
    "train.py": "import sys\nimport near, lib.far\n"
    "print('first', near.X, lib.far.Y, open(sys.argv[2]).read(), open('data/d').read())\n"
    "open('out.txt', 'w').write('done')\n",
    "near.py": "X = 1\n",
    "lib/__init__.py": "",
    "lib/far.py": "Y = 1\n",
    "conf/a.txt": "conf 1",
    "headway.yaml": "threads_per_process: 1\n",
    ".gitignore": "data\n",
    "data/d": "data",
}


@pytest.fixture
def repository() -> Path:
    """Return this folder as a repository whose last changes are not committed."""
    for name, text in CODE.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text.replace("first", "zeroth"))
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run(["git", "-c", "user.name=n", "-c", "user.email=a@b", *words], check=True)
    Path("train.py").write_text(CODE["train.py"])
    Path("lib/new.py").write_text("")
    return Path.cwd()


def edit_everything() -> None:
    """Change all that a job could read of the code, but not what git ignores."""
    Path("train.py").write_text("raise SystemExit('edited')\n")
    Path("near.py").write_text("X = 2\n")
    Path("lib/far.py").unlink()
    Path("lib/new.py").write_text("raise SystemExit\n")
    Path("lib.py").write_text("raise SystemExit('a new file')\n")
    Path("conf/a.txt").write_text("conf 2")
    Path("headway.yaml").write_text("threads_per_process: 2\n")
    subprocess.run(["git", "checkout", "-q", "--orphan", "other"], check=True)
    subprocess.run(["git", "rm", "-rqf", "--cached", "."], check=True)


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="jobs of SLURM")
def test_no_edit_of_the_code_after_the_submission_reaches_a_queued_job(
    repository: Path, sbatch: Path, fakes: Path
) -> None:
    add_command(fakes, "squeue", "true")
    code, text = run("launch", "--submit", "slurm", "--cpu", "train.py", "--conf", "conf/a.txt")
    assert code == 0
    snapshot = next(repository.glob("headway-jobs/train-*/code"))
    assert f"snapshot of the code, {snapshot}" in text.replace("~", str(Path.home()))
    _, script, environ = json.loads(sbatch.read_text())
    edit_everything()
    done = subprocess.run(
        ["bash", "-c", script], env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "first 1 1 conf 2 data\n", done.stderr  # an argument stays as it is
    assert "1 thread" in done.stderr
    assert Path("out.txt").read_text() == "done"  # where it always was
    record = find(None)
    assert record.start.script == str(repository / "train.py")
    assert record.commit is not None
    assert "+print('first'" in (record.commit.diff or "")
    assert record.start.command[-3:] == ("train.py", "--conf", "conf/a.txt")


@pytest.mark.processes
def test_a_second_job_does_not_copy_the_first_ones_code(
    repository: Path, sbatch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for second in ("first", "second"):
        monkeypatch.setattr(time, "strftime", lambda *_, second=second: second)
        assert run("launch", "--submit", "slurm", "--cpu", "train.py")[0] == 0
    copies = [*repository.glob("headway-jobs/train-*/code")]
    assert len(copies) == 2
    for copy in copies:
        files = {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()}
        assert files == {*CODE, "lib/new.py"} - {"data/d"}


@pytest.mark.processes
def test_a_job_runs_in_place_where_that_was_asked_for_or_git_does_not_know_the_script(
    repository: Path, sbatch: Path, tmp_path: Path
) -> None:
    _, text = run("launch", "--submit", "slurm", "--set", "snapshot=off", "--cpu", "train.py")
    assert "a snapshot of the code" not in text
    Path("data/own.py").write_text("")
    assert "git ignores the script" in run("launch", "--submit", "slurm", "data/own.py")[1]
    (tmp_path / "own.py").write_text("")
    _, text = run("launch", "--submit", "slurm", str(tmp_path / "own.py"))
    assert "the script is not in a git commit" in text
    assert not [*repository.glob("headway-jobs/*/code")]
    code, text = run("launch", "--set", "snapshot=off", "train.py")
    assert code == 2
    assert "--set snapshot applies only to jobs" in text


def test_code_that_is_too_large_is_refused_with_what_to_exclude(
    repository: Path, sbatch: Path
) -> None:
    with open("weights.bin", "wb") as file:
        file.truncate(60 * 2**20)
    code, text = run("launch", "--submit", "slurm", "train.py")
    assert code == 2
    assert "weights.bin (60.0 MiB)" in text
    assert ".gitignore" in text
    assert not sbatch.exists()


@pytest.mark.processes
def test_a_job_that_slurm_refuses_leaves_no_copy(repository: Path, fakes: Path) -> None:
    add_command(fakes, "sbatch", "echo 'no such partition' >&2; exit 1")
    assert run("launch", "--submit", "slurm", "train.py")[0] == 4
    assert not [*repository.glob("headway-jobs/*/code")]


@pytest.mark.processes
def test_a_module_is_found_in_the_copy_and_not_in_the_working_folder(
    repository: Path, sbatch: Path
) -> None:
    Path("lib/__main__.py").write_text("")
    code, text = run("launch", "--submit", "slurm", "-m", "lib")
    _, script, _ = json.loads(sbatch.read_text()) if code == 0 else ("", "", "")
    if sys.version_info < (3, 11):
        assert code == 3
        return
    assert code == 0, text
    (copy,) = repository.glob("headway-jobs/*/code")
    assert "export PYTHONSAFEPATH=1\n" in script
    assert f"export PYTHONPATH={copy}" in script
