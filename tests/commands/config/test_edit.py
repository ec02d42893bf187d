"""The subcommands of `headway config` beside their transcripts (../transcripts/config.txt)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headway.commands.config import check as config_check
from headway.commands.config import edit as config_edit
from headway.commands.main import main
from headway.settings.profile import choose_profile
from headway.settings.table import TABLE
from tests.commands.conftest import PROFILE
from tests.machines.recorded import FOLDER, load


def test_a_value_that_is_no_text_is_refused_as_what_it_is(
    profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "set", "env.A=\udcff"]) == 2
    assert "is not UTF-8" in capsys.readouterr().err
    assert profile.read_text() == PROFILE


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("ranks: [0, 7]\n", None),  # a machine with eight GPUs has rank 7
        ("ranks: [0, 7]\nnum_processes: 4\n", "ranks contains rank 7, but ranks are 0 to 3"),
        ("debug_rank: 0\nnum_machines: 2\nmain_address: a\nnum_processes: 2\n", "debug_rank is 0"),
        ("device: gpu\ndevices: 0-3\n", None),
        ("device: mps\ndevices: 0-3\n", "selects GPUs, but device is 'mps'"),
        ("hang_timeout: 0\n", "invalid value '0' for hang_timeout: must be 1 or more"),
        ("start_method: off\n", "must be one of auto, fork, exec"),
        ("device: mps\nnum_processes: 2\n", "MPS supports only one process"),
        ("device: gpu\nnum_processes: 2\n", None),
    ],
)
@pytest.mark.parametrize("here", ["laptop_cpu", "gpu_1", "mac_m2"])
def test_validate_knows_what_can_be_on_some_machine(
    text: str,
    reason: str | None,
    here: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(config_check, "detect_machine", lambda: load(here))
    Path("some.yaml").write_text(text)
    assert main(["config", "validate", "some.yaml"]) == (0 if reason is None else 1)
    assert (reason or "") in capsys.readouterr().err


def test_idle_gpus_are_sought_by_a_launch_and_not_when_a_profile_is_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_edit, "detect_machine", lambda: load("gpu_2_one_busy"))
    assert main(["config", "set", "device=gpu", "devices=idle:2"]) == 0
    assert not capsys.readouterr().err
    assert main(["config", "set", "devices=idle:3"]) == 0
    assert "only 2 of 2 GPUs are idle" in capsys.readouterr().err
    assert main(["config", "set", "device=cpu", "devices=all", "num_processes=99"]) == 0
    assert "note: 99 processes oversubscribe " in capsys.readouterr().err


def test_launch_takes_a_profile_by_flag_or_variable_and_says_what_overrules_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["config", "set", "--profile", "two", "num_processes=2", "device=cpu"])
    monkeypatch.setenv("HEADWAY_PROFILE", "two")
    assert main(["launch", "--dry-run", "-m", "this"]) == 0
    assert "2 processes on cpu" in capsys.readouterr().out
    monkeypatch.delenv("HEADWAY_PROFILE")
    Path("headway.yaml").write_text("num_processes: 3\n")
    assert main(["launch", "--profile", "two", "--dry-run", "-m", "this"]) == 0
    out = capsys.readouterr().out
    assert "3 processes on cpu" in out
    assert "note: num_processes from user profile ~/.config/headway/two.yaml, line 3" in out
    assert main(["launch", "--profile", "tow", "--dry-run", "-m", "this"]) == 2
    assert "did you mean 'two'?" in capsys.readouterr().err


def test_control_characters_of_a_profile_do_not_steer_the_terminal(
    profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile.write_text('log_dir: "logs\\e[2J"\n')
    assert main(["config", "show"]) == 0
    assert main(["config", "list"]) == 0
    out = capsys.readouterr().out
    assert out.count(r"logs\x1b[2J") == 2
    assert "\x1b" not in out


def test_links_that_go_round_in_circles_are_no_profile(capsys: pytest.CaptureFixture[str]) -> None:
    Path("loop.yaml").symlink_to("loop.yaml")
    assert main(["config", "set", "--profile", "loop.yaml", "device=cpu"]) == 2
    assert "Too many levels of symbolic links" in capsys.readouterr().err
    assert Path("loop.yaml").is_symlink()


def test_an_unknown_key_is_answered_by_a_command_that_lists_them(
    profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "set", "colour=1"]) == 2
    assert "`headway config set --help` lists all settings" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["config", "set", "--help"])
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in TABLE)


def test_yes_writes_a_profile_that_show_reads(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--yes"]) == 0
    written = Path(choose_profile().path)
    assert "device: cpu" in written.read_text()
    assert "next: headway launch" in capsys.readouterr().out
    assert main(["config", "show", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown.keys() == TABLE.keys()
    assert shown["device"]["value"] == "cpu"
    assert shown["device"]["layer"] == "user profile"
    assert "default.yaml, line " in shown["device"]["origin"]


def test_another_machines_profile_and_settings_are_shown_here(
    capsys: pytest.CaptureFixture[str],
) -> None:
    recorded = str(FOLDER / "gpu_8_h100.json")
    assert main(["config", "show", "--machine", recorded, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_processes"]["value"] == 8
    assert main(["config", "get", "num_processes", "--machine", recorded]) == 0
    assert capsys.readouterr().out == "8\n"
    assert main(["config", "get", "num_proceses"]) == 2
    assert "`headway config get num_processes`" in capsys.readouterr().err
    assert main(["config", "--yes", "--machine", recorded]) == 0
    assert "num_processes: 8" in Path(choose_profile().path).read_text()


def test_help_and_version_are_answered(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert main(["--version"]) == 0
    out = capsys.readouterr().out
    assert "headway launch --cpu --num-processes 2 train.py" in out
    assert main([]) == 2
