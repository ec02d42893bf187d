"""`headway config` without a terminal: pipes, --yes, --set, --answers, --dry-run."""

from __future__ import annotations

import io
import os
import resource
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from headway.commands import flags, test
from headway.commands.main import main
from headway.config_wizard.questions import TEST
from headway.contract.origin import Layer
from headway.launcher.remote import slurm_jobs
from headway.machine.facts import Machine
from headway.settings.profile import read_profile
from headway.settings.profile_files import choose_profile
from headway.settings.setting import Raw
from tests.machines.recorded import FOLDER, load

LAPTOP, EIGHT_H100, M2 = load("laptop_cpu"), load("gpu_8_h100"), load("mac_m2")

Capture = pytest.CaptureFixture[str]


def profile(path: str | None = None) -> dict[str, Raw]:
    entries = read_profile(path or choose_profile().path, Layer.USER_PROFILE)
    return {name: entry.raw for name, entry in entries.items()}


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask and say the same where SLURM or kubectl is installed."""
    monkeypatch.setattr(slurm_jobs, "partitions", list)
    monkeypatch.setattr(shutil, "which", lambda name: None)


@pytest.fixture
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """The machine that is detected: the laptop, unless a test names another."""
    found: Machine = getattr(request, "param", LAPTOP)
    monkeypatch.setattr(flags, "detect_machine", lambda *_, **__: found)
    return found


def on(machine: Machine) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("machine", [machine], indirect=True)


ENTERS = "\n" * 20
"""More than there are questions: each takes its default, and the last one is to write."""


def typed(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


CPU = {"device": "cpu", "num_processes": "1", "mixed_precision": "no"}
CUDA = {"device": "cuda", "num_processes": "8", "mixed_precision": "bf16"}


@pytest.mark.wording
def test_a_pipe_answers_numbered_lines(
    machine: Machine, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, "cpu\n2\n\n\nwrite\n")
    assert main(["config"]) == 0
    assert profile() == {**CPU, "num_processes": "2"}
    out = capsys.readouterr().out
    assert "  1) cpu  8 usable cores; no NVIDIA driver on this machine\n[cpu] cpu\n" in out
    assert out.endswith("next: headway launch your_script.py\n")


@pytest.mark.wording
@pytest.mark.parametrize("words", [[], ["--dry-run"], ["--set", "max_restarts=2"]])
@pytest.mark.parametrize("answers", ["", "cpu\n", "cpu\n2\nuser\nno\n"])
def test_the_end_of_input_is_no_consent(
    answers: str,
    words: list[str],
    machine: Machine,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    typed(monkeypatch, answers)
    assert main(["config", *words]) == 2
    out, err = capsys.readouterr()
    assert "~/.config/headway/default.yaml\n" in out
    assert "  + device: cpu\n" in out
    assert out.count("A launch: ") == 1
    assert err.startswith("error: the input ended before the last question was answered")
    assert "--yes" in err
    assert not Path(choose_profile().path).parent.exists()


def test_the_end_of_input_leaves_a_profile_as_it_was(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("headway.yaml").write_text("device: cuda\n")
    typed(monkeypatch, "")
    assert main(["config"]) == 2
    assert Path("headway.yaml").read_text() == "device: cuda\n"


def test_a_wrong_answer_in_a_pipe_writes_nothing(
    machine: Machine, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, "cuda\n")
    assert main(["config"]) == 2
    assert "no GPU is visible" in capsys.readouterr().err
    assert not Path(choose_profile().path).exists()


@on(EIGHT_H100)
def test_yes_asks_nothing_and_takes_the_best(
    machine: Machine, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, "would be an answer")
    assert main(["config", "--yes"]) == 0
    assert profile() == CUDA
    out = capsys.readouterr().out
    assert out.startswith("wrote ~/.config/headway/default.yaml\n  device: cuda\n")
    assert sys.stdin.read() == "would be an answer"


def test_yes_writes_the_users_profile_also_inside_a_project(machine: Machine) -> None:
    Path("headway.yaml").write_text("max_restarts: 1\n")
    assert main(["config", "--yes"]) == 0
    assert profile() == CPU
    assert Path("headway.yaml").read_text() == "max_restarts: 1\n"


@on(EIGHT_H100)
def test_set_answers_a_question_and_any_other_setting(machine: Machine) -> None:
    words = ["--set", "num_processes=2", "--set", "max_restarts=3", "--set=env=A=1 B=2"]
    assert main(["config", "--yes", *words]) == 0
    assert profile() == {
        **CUDA, "num_processes": "2", "max_restarts": "3", "env": {"A": "1", "B": "2"},
    }  # fmt: skip
    assert main(["config", "--yes", "--set", "env.C=3"]) == 0
    assert profile()["env"] == {"A": "1", "B": "2", "C": "3"}


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--set", "num_proceses=2"], "did you mean 'num_processes'"),
        (["--set", "num_processes=two"], "not a whole number"),
        (["--set", "device"], "not KEY=VALUE"),
        (["--set", "device=cuda"], "no GPU is visible"),
        (["--set", "num_machines=2"], "main_address is not set"),
        (["--answers", "missing.yaml"], "No such file"),
        (["--answers", "answers.yaml"], "did you mean 'device'"),
        (["--profile", "a b"], "invalid profile name"),
        (["extra"], "unknown subcommand 'extra'"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(
    words: list[str], reason: str, machine: Machine, capsys: Capture
) -> None:
    Path("answers.yaml").write_text("devise: cpu\n")
    yes = [] if words == ["extra"] else ["--yes"]
    assert main(["config", *words, *yes]) in (2, 3)
    assert reason in capsys.readouterr().err
    assert not Path(choose_profile().path).parent.exists()


@on(EIGHT_H100)
def test_answers_are_replayed_from_a_file_and_the_rest_is_the_best(machine: Machine) -> None:
    Path("answers.yaml").write_text("num_processes: 4\nplace: project\nlog_dir: logs\n")
    assert main(["config", "--answers", "answers.yaml"]) == 0
    assert profile("headway.yaml") == {**CUDA, "num_processes": "4", "log_dir": "logs"}
    Path("answers.yaml").write_text("place: nowhere\n")
    assert main(["config", "--answers", "answers.yaml"]) == 2


@pytest.mark.wording
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("more: maybe\n", "more is 'maybe', but it must be no or yes"),
        ("place: project\n", "place is project, but here the profile is kept in"),
        ("place: [user]\n", "place is ['user'], but it must be user or project"),
    ],
)
def test_answers_that_are_none_are_refused_and_not_ignored(
    text: str, reason: str, machine: Machine, capsys: Capture
) -> None:
    Path("answers.yaml").write_text(text)
    assert main(["config", "--answers", "answers.yaml", "--profile", "other"]) == 2
    err = capsys.readouterr().err
    assert reason in err
    assert "from: answers answers.yaml, line 1, column 1" in err


@pytest.mark.wording
def test_all_that_is_wrong_with_answers_is_said_at_once_with_its_place(
    machine: Machine, capsys: Capture
) -> None:
    Path("answers.yaml").write_text("device: tpu\nfoo: 1\nmore: maybe\nnum_machines: 2\n")
    assert main(["config", "--answers", "answers.yaml"]) == 2
    err = capsys.readouterr().err
    assert [err.count(f"answers.yaml, line {line}, column 1") for line in (1, 2, 3)] == [1, 1, 1]
    Path("answers.yaml").write_text("device: cpu\nnum_machines: 2\n")
    assert main(["config", "--answers", "answers.yaml"]) == 2
    assert "num_machines: answers answers.yaml, line 2" in capsys.readouterr().err
    assert main(["config", "--yes", "--set", "mixed_precision=fp16"]) == 2
    assert "mixed_precision: flag --set" in capsys.readouterr().err


def test_answers_come_from_a_pipe_too(machine: Machine) -> None:
    read, write = os.pipe()
    os.write(write, b"device: cpu\nnum_processes: 3\n")
    os.close(write)
    try:
        assert main(["config", "--answers", f"/dev/fd/{read}"]) == 0
    finally:
        os.close(read)
    assert profile()["num_processes"] == "3"


def test_replayed_answers_keep_what_they_do_not_speak_of(machine: Machine) -> None:
    main(["config", "set", "max_restarts=4", "threads_per_process=2", "env.B=1"])
    Path("answers.yaml").write_text("more: yes\nlog_dir: logs\nenv.A: 3\n")
    assert main(["config", "--answers", "answers.yaml"]) == 0
    kept = {"max_restarts": "4", "threads_per_process": "2", "env": {"A": "3", "B": "1"}}
    assert profile() == {**CPU, **kept, "log_dir": "logs"}


def test_a_variable_that_was_set_by_flag_is_offered_and_not_lost(
    machine: Machine, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, "cpu\n1\nuser\nyes\n" + ENTERS)
    assert main(["config", "--set", "env.A=x y"]) == 0
    assert "['A=x y']" in capsys.readouterr().out
    assert profile()["env"] == {"A": "x y"}


def test_the_address_of_machine_0_is_asked_for_whoever_said_that_there_are_several(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, "cpu\n1\nuser\nno\nnode0\n1\n" + ENTERS)
    assert main(["config", "--set", "num_machines=2"]) == 0
    assert (profile()["main_address"], profile()["machine_rank"]) == ("node0", "1")


def test_a_wrong_variable_is_said_before_the_first_question(
    machine: Machine, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWAY_NUM_PROCESES", "3")
    assert main(["config"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "did you mean 'HEADWAY_NUM_PROCESSES'" in err


def test_dry_run_prints_the_file_and_writes_nothing(machine: Machine, capsys: Capture) -> None:
    assert main(["config", "--yes", "--dry-run", "--profile", "gpu4"]) == 0
    streams = capsys.readouterr()
    assert "would write ~/.config/headway/gpu4.yaml" in streams.err
    Path("printed.yaml").write_text(streams.out)
    assert profile("printed.yaml") == CPU
    assert not Path(choose_profile().path).parent.exists()


def test_a_profile_that_exists_keeps_its_comments_and_its_other_keys(
    machine: Machine, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(choose_profile("mine").path)
    path.parent.mkdir(parents=True)
    path.write_text("# mine\ndevice: cuda  # the big one\nnum_processes: 4\nmax_restarts: 3\n")
    typed(monkeypatch, "\n\n\n\n")
    assert main(["config", "--profile", "mine"]) == 0
    out = capsys.readouterr().out
    assert "- device: cuda  # the big one\n  + device: cpu  # the big one\n" in out
    assert path.read_text() == (
        "# mine\ndevice: cpu  # the big one\nnum_processes: 4\nmax_restarts: 3\n"
        'mixed_precision: "no"\n'
    )
    assert out.endswith("next: headway launch --profile mine your_script.py\n")
    assert main(["config", "--yes", "--profile", "mine"]) == 0
    assert profile(str(path)) == {**CPU, "max_restarts": "3"}  # detected anew


def test_a_broken_profile_is_refused_before_any_question(machine: Machine, capsys: Capture) -> None:
    Path("headway.yaml").write_text("device: cpu\ndevice: cpu\n")
    assert main(["config"]) == 2
    streams = capsys.readouterr()
    assert "duplicate key" in streams.err
    assert not streams.out


@pytest.mark.wording
def test_a_stronger_source_than_the_new_profile_is_named(
    machine: Machine, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWAY_NUM_PROCESSES", "3")
    assert main(["config", "--yes"]) == 0
    assert "is overridden by environment HEADWAY_NUM_PROCESSES" in capsys.readouterr().err


def full_disk(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_full_disk_is_a_clear_error(
    machine: Machine, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, "cpu\n2\nuser\n" + ENTERS)
    monkeypatch.setattr(os, "fsync", full_disk)
    assert main(["config"]) == 2
    assert "cannot be written: No space left on device" in capsys.readouterr().err


@pytest.mark.wording
@pytest.mark.usefixtures("ordinary_user")
def test_a_read_only_folder_is_a_clear_error(
    machine: Machine, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(choose_profile().path).parent
    folder.mkdir(mode=0o500, parents=True)
    typed(monkeypatch, "cpu\n5\nuser\n" + ENTERS)
    assert main(["config"]) == 2
    err = capsys.readouterr().err
    assert "cannot be written: Permission denied\n  from: ~/.config/headway/default.yaml" in err
    assert os.listdir(folder) == []


class InterruptedInput(io.StringIO):
    """Ctrl-C where the input would end."""

    def readline(self, size: int | None = -1) -> str:  # type: ignore[override]
        return super().readline() or self.interrupt()

    def interrupt(self) -> str:
        raise KeyboardInterrupt


@pytest.mark.parametrize("answered", range(11))
def test_ctrl_c_at_any_question_writes_nothing_and_the_next_run_starts_again(
    answered: int, machine: Machine, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    replies = ["cpu", "2", "user", "yes", "bf16", "4", "auto", "3", "-", "-"][:answered]
    monkeypatch.setattr(sys, "stdin", InterruptedInput("".join(f"{word}\n" for word in replies)))
    assert main(["config"]) == 130
    assert capsys.readouterr().err == "\nnothing was written\n"
    assert not any(path.is_file() for path in Path.home().rglob("*"))
    typed(monkeypatch, ENTERS)
    assert main(["config"]) == 0
    assert profile() == CPU


@on(M2)
def test_write_and_test_runs_the_test_command_under_the_profile(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Mapping[str, Raw] | list[str]] = []

    def run(words: list[str]) -> int:
        calls.extend([words, profile(choose_profile("mine").path)])
        return 7

    monkeypatch.setattr(test, "main", run)
    typed(monkeypatch, "\n\n\nwrite and test\n")
    assert main(["config", "--profile", "mine"]) == 7
    assert calls == [["--profile", "mine"], {**CPU, "device": "mps"}]


def test_gpus_that_are_busy_now_count_for_the_profile(capsys: Capture) -> None:
    recorded = str(FOLDER / "gpu_exclusive.json")  # one of its two GPUs is taken
    assert main(["config", "--machine", recorded, "--yes", "--dry-run"]) == 0
    assert "num_processes: 2\n" in capsys.readouterr().out


def test_a_recorded_machine_is_asked_for_and_its_profile_is_planned_for_it(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = str(FOLDER / "gpu_8_h100.json")
    typed(monkeypatch, "\n\n\n\n\n\n")
    assert main(["config", "--machine", recorded]) == 0
    assert profile() == CUDA
    out = capsys.readouterr().out
    assert "write and test" not in out
    assert out.endswith(f"next: headway launch --machine {recorded} --dry-run your_script.py\n")


IMPORTED = """
import sys
from headway.commands.main import main
from headway.config_wizard.questions import TEST
code = main(sys.argv[1:])
heavy = {"torch", "questionary", "prompt_toolkit", "rich", "dataclasses", "platformdirs"}
print(sorted(heavy & sys.modules.keys()), file=sys.stderr)
sys.exit(code)
"""


def seconds_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@pytest.mark.parametrize(
    ("words", "limit_s"), [(["config", "--yes"], 0.2), (["config", "show"], 0.1)]
)
@pytest.mark.processes
def test_yes_and_show_are_quick_and_import_nothing_heavy(
    words: list[str], limit_s: float, tmp_path: Path
) -> None:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environ["PYTHONPYCACHEPREFIX"] = str(tmp_path / "cache")  # compiled once, as an installed one
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    times: list[float] = []
    while not times or (min(times) >= limit_s and len(times) < 20):
        before = seconds_of_children()  # of computing; others use this machine too
        command = [sys.executable, "-c", IMPORTED, *words]
        done = subprocess.run(command, capture_output=True, text=True, env=environ)
        times.append(seconds_of_children() - before)
        assert (done.returncode, done.stderr) == (0, "[]\n")
    assert min(times) < limit_s


def test_in_a_removed_working_directory_only_the_users_place_is_left(
    machine: Machine, capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main(["config", "--yes"]) == 0
    assert profile() == CPU
    assert main(["config", "--yes", "--profile", "./mine.yaml"]) == 2
    assert "which has been removed" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)


class Meanwhile(io.StringIO):
    """Somebody else sets a key while the closing menu waits."""

    def readline(self, size: int | None = -1) -> str:  # type: ignore[override]
        line = super().readline()
        if line == "write\n":
            main(["config", "set", "grace_period_s=7", "env.B=2"])
        return line


def test_what_somebody_else_sets_during_the_conversation_stays(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["config", "set", "env.A=1", "device=cpu"])
    monkeypatch.setattr(sys, "stdin", Meanwhile("cpu\n2\nuser\nno\nwrite\n"))
    assert main(["config"]) == 0
    env = {"A": "1", "B": "2"}
    assert profile() == {**CPU, "num_processes": "2", "grace_period_s": "7", "env": env}


def test_a_wrong_variable_is_refused_before_anything_is_written(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWAY_BOGUS", "1")
    assert main(["config", "--yes"]) == 2
    assert not Path(choose_profile().path).exists()


def test_a_default_is_written_where_a_weaker_profile_says_otherwise(machine: Machine) -> None:
    main(["config", "set", "max_restarts=3"])
    Path("answers.yaml").write_text("place: project\nmax_restarts: 0\n")
    assert main(["config", "--answers", "answers.yaml"]) == 0
    assert profile("headway.yaml")["max_restarts"] == "0"


def test_env_whole_and_by_variable_is_set_twice(machine: Machine, capsys: Capture) -> None:
    assert main(["config", "set", "env.B=2", "env=A=1"]) == 2
    assert "env.B is set twice" in capsys.readouterr().err


def test_a_broken_profile_is_named_with_its_line(machine: Machine, capsys: Capture) -> None:
    path = Path("mine.yaml")
    path.write_text("max_restarts: many\n")
    assert main(["config", "--profile", "./mine.yaml"]) == 2
    assert "mine.yaml, line 1" in capsys.readouterr().err


@pytest.mark.parametrize("mask", [0o077, 0o002])
def test_a_new_profile_has_the_permissions_of_any_new_file(mask: int, machine: Machine) -> None:
    before = os.umask(mask)
    try:
        assert main(["config", "--yes"]) == 0
    finally:
        os.umask(before)
    assert Path(choose_profile().path).stat().st_mode & 0o777 == 0o666 & ~mask


def test_gpus_of_the_profile_go_when_the_device_is_said_to_be_the_cpu(machine: Machine) -> None:
    main(["config", "set", "devices=0,1", "num_processes=2"])
    assert main(["config", "--yes", "--set", "device=cpu"]) == 0
    assert profile() == CPU


def test_one_machine_by_flag_needs_no_address_any_more(machine: Machine) -> None:
    main(["config", "set", "num_machines=2", "main_address=h", "machine_rank=1"])
    assert main(["config", "--yes", "--set", "num_machines=1"]) == 0
    assert profile() == {**CPU, "num_machines": "1"}


@pytest.mark.parametrize("machine", [EIGHT_H100], indirect=True)
def test_values_in_another_spelling_are_the_defaults_and_stay_as_they_are(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(choose_profile().path)
    path.parent.mkdir(parents=True)
    text = "device: CUDA\nnum_processes: 4\nmixed_precision: BF16\n"
    path.write_text(text)
    typed(monkeypatch, ENTERS)
    assert main(["config"]) == 0
    assert path.read_text() == text


@pytest.mark.wording
def test_the_summary_and_the_notes_count_what_the_other_profile_says(
    machine: Machine, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("headway.yaml").write_text("num_processes: 4\n")
    typed(monkeypatch, "cpu\n2\nuser\n" + ENTERS)
    assert main(["config"]) == 0
    out, err = capsys.readouterr()
    assert "A launch: your_script.py: 4 processes on cpu" in out
    assert "default.yaml, line 4, column 1 is overridden by project profile" in err
    main(["config", "set", "num_processes=4", "ranks=3"])
    Path("answers.yaml").write_text("device: cpu\nnum_processes: 2\nplace: project\n")
    assert main(["config", "--answers", "answers.yaml"]) == 0
    assert "note: ranks contains rank 3, but ranks are 0 to 1" in capsys.readouterr().err


def test_what_the_user_keeps_for_all_projects_is_not_copied_into_one(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["config", "set", "env.TOKEN=secret", "log_dir=/home/me/logs", "max_restarts=3"])
    Path("headway.yaml").write_text("env: {A: 1}\n")
    typed(monkeypatch, "cpu\n1\nproject\nyes\n" + ENTERS)
    assert main(["config"]) == 0
    assert profile("headway.yaml") == {**CPU, "env": {"A": "1"}}


def test_an_answer_that_is_not_utf_8_is_asked_again(
    machine: Machine, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, "\n\n\nyes\n\n\n\n\nl\udcfcg\nlogs\n" + ENTERS)
    assert main(["config"]) == 0
    assert "'l\\udcfcg' is not UTF-8" in capsys.readouterr().out
    assert profile()["log_dir"] == "logs"


@pytest.mark.parametrize("exit_code", [0, 1])
def test_after_a_test_that_passed_the_next_command_is_said(
    exit_code: int, machine: Machine, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.commands.test.main", lambda _: exit_code)
    typed(monkeypatch, f"\n\n\n\n{TEST}\n")
    assert main(["config"]) == exit_code
    assert ("next: headway launch" in capsys.readouterr().out) == (exit_code == 0)


@pytest.mark.parametrize("by", ["flag", "file"])
def test_the_place_can_be_said(by: str, machine: Machine) -> None:
    Path("answers.yaml").write_text("place: project\n")
    words = ["--set", "place=project"] if by == "flag" else ["--answers", "answers.yaml"]
    assert main(["config", "--yes", *words]) == 0
    assert profile("headway.yaml") == CPU


def test_a_place_that_is_none_is_refused(machine: Machine, capsys: Capture) -> None:
    assert main(["config", "--yes", "--set", "place=here"]) == 2
    assert "place is 'here', but it must be user or project" in capsys.readouterr().err


@pytest.mark.wording
def test_answers_that_are_no_map_are_not_called_a_profile(
    machine: Machine, capsys: Capture
) -> None:
    Path("answers.yaml").write_text("cpu\n2\n")
    assert main(["config", "--answers", "answers.yaml"]) == 2
    assert "error: the file is a single value" in capsys.readouterr().err


@pytest.mark.wording
def test_what_only_the_user_knows_has_no_default(
    machine: Machine, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, "cpu\n1\nuser\nno\n\nnode0\n" + ENTERS)
    assert main(["config", "--set", "num_machines=2"]) == 0
    out = capsys.readouterr().out
    assert "The name or IP address of machine 0?\n\nnum_machines is 2, but main_address" in out
    assert profile()["main_address"] == "node0"


SWALLOWED = """
import os, signal, sys
from headway.commands.main import main
from headway.config_wizard.prompts import PlainPrompter
class Fleeting:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)  # Python ignores what its handler raises here
usual = PlainPrompter.ask
def ask(prompter, question):
    if question.name == "num_processes":
        Fleeting()
    return usual(prompter, question)
PlainPrompter.ask = ask
sys.exit(main(["config"]))
"""


@pytest.mark.processes
def test_a_stop_signal_that_is_swallowed_writes_nothing_all_the_same() -> None:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SWALLOWED]
    done = subprocess.run(command, input="cpu\n", capture_output=True, text=True, env=environ)
    assert done.returncode == 143, done.stderr
    assert "\nnothing was written\n" in done.stderr
    assert not Path(choose_profile().path).exists()


def test_a_hostfile_here_is_asked_about_and_kept(
    machine: Machine, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("hosts.txt").write_text("these are notes, not hosts\n")
    Path("hostfile").write_text("a slots=2\nb slots=2\n")
    path = os.path.abspath("hostfile")
    typed(monkeypatch, f"cpu\n1\n{path}\nuser\nno\nwrite\n")
    assert main(["config"]) == 0
    out = capsys.readouterr().out
    assert f"{path}  2 hosts" in out
    assert "A launch: your_script.py on 2 hosts over ssh: a:2,b:2" in out
    assert "hosts.txt" not in out
    assert profile() == {**CPU, "hostfile": path}


def test_a_pipe_in_the_place_of_a_hostfile_is_not_waited_for(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo("hostfile")
    typed(monkeypatch, ENTERS)
    assert main(["config"]) == 0
    assert profile() == CPU


def test_where_kubectl_is_the_command_that_prints_a_job_is_named(
    machine: Machine, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert main(["config", "--yes", "--profile", "pods"]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    words = shlex.split(last.partition(": ")[2])
    assert words[-2:] == [">", "train.yaml"]
    assert main(words[1:-2]) == 0
    assert "kind: Job" in capsys.readouterr().out


def test_in_a_folder_that_has_been_removed_the_questions_are_asked_all_the_same(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    typed(monkeypatch, ENTERS)
    assert main(["config"]) == 0
    assert profile() == CPU
