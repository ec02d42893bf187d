"""`headway config` without a terminal, beside its transcripts (../transcripts/ask.txt)."""

from __future__ import annotations

import io
import resource
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from headway.commands import flags, test
from headway.commands.main import main
from headway.config_wizard.questions import TEST
from headway.machine.facts import Machine
from headway.settings.profile import choose_profile
from headway.settings.setting import Raw
from tests.commands.running import profile
from tests.distributed.launching import environment
from tests.machines.recorded import FOLDER, load

LAPTOP, M2 = load("laptop_cpu"), load("mac_m2")

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """The machine that is detected: the laptop, unless a test names another."""
    found: Machine = getattr(request, "param", LAPTOP)
    monkeypatch.setattr(flags, "detect_machine", lambda *_, **__: found)
    return found


ENTERS = "\n" * 20
"""More than there are questions: each takes its default, and the last one is to write."""


def typed(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


CPU = {"device": "cpu", "num_processes": "1", "mixed_precision": "no"}
CUDA = {"device": "cuda", "num_processes": "8", "mixed_precision": "bf16"}


class InterruptedInput(io.StringIO):
    """Ctrl-C where the input would end."""

    def readline(self, size: int | None = -1) -> str:  # type: ignore[override]
        return super().readline() or self.interrupt()

    def interrupt(self) -> str:
        raise KeyboardInterrupt


@pytest.mark.parametrize("answered", [0, 3, 10])
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


def test_cancel_in_the_closing_menu_writes_nothing(
    machine: Machine, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, "\n\n\ncancel\n")
    assert main(["config"]) == 130
    assert capsys.readouterr().out.endswith("nothing was written\n")
    assert not Path(choose_profile().path).exists()


@pytest.mark.parametrize("machine", [M2], indirect=True)
@pytest.mark.parametrize("exit_code", [0, 7])
def test_write_and_test_runs_the_test_under_the_profile_and_says_what_is_next_if_it_passed(
    exit_code: int, machine: Machine, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Mapping[str, Raw] | list[str]] = []

    def run(words: list[str]) -> int:
        calls.extend([words, profile(choose_profile("mine").path)])
        return exit_code

    monkeypatch.setattr(test, "main", run)
    typed(monkeypatch, f"\n\n\n{TEST}\n")
    assert main(["config", "--profile", "mine"]) == exit_code
    assert calls == [["--profile", "mine"], {**CPU, "device": "mps"}]
    assert ("next: headway launch" in capsys.readouterr().out) == (exit_code == 0)


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
heavy = {"torch", "questionary", "prompt_toolkit", "rich", "dataclasses"}
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
    # compiled once, as an installed one
    environ = environment(PYTHONPYCACHEPREFIX=str(tmp_path / "cache"))
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    times: list[float] = []
    while not times or (min(times) >= limit_s and len(times) < 20):
        before = seconds_of_children()  # of computing; others use this machine too
        command = [sys.executable, "-c", IMPORTED, *words]
        done = subprocess.run(command, capture_output=True, text=True, env=environ)
        times.append(seconds_of_children() - before)
        assert (done.returncode, done.stderr) == (0, "[]\n")
    assert min(times) < limit_s


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


def test_an_answer_that_is_not_utf_8_is_asked_again(
    machine: Machine, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, "\n\nyes\n\n\n\n\nl\udcfcg\nlogs\n" + ENTERS)
    assert main(["config"]) == 0
    assert "'l\\udcfcg' is not UTF-8" in capsys.readouterr().out
    assert profile()["log_dir"] == "logs"


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
