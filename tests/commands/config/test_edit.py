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
from tests.commands.running import run
from tests.machines.recorded import FOLDER, load


def test_a_value_that_is_no_text_is_refused_as_what_it_is() -> None:
    Path("mine.yaml").write_text("env: {A: 1}\n")
    code, error = run("config", "set", "--profile", "mine.yaml", "env.A=\udcff")
    assert (code, "is not UTF-8" in error) == (2, True)
    assert Path("mine.yaml").read_text() == "env: {A: 1}\n"


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
    text: str, reason: str | None, here: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_check, "detect_machine", lambda: load(here))
    Path("some.yaml").write_text(text)
    code, said = run("config", "validate", "some.yaml")
    assert code == (0 if reason is None else 1)
    assert (reason or "") in said


def test_idle_gpus_are_sought_by_a_launch_and_not_when_a_profile_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(config_edit, "detect_machine", lambda: load("gpu_2_one_busy"))
    for words, note in {
        "device=gpu devices=idle:2": "",
        "devices=idle:3": "only 2 of 2 GPUs are idle",
        "device=cpu devices=all num_processes=99": "note: 99 processes oversubscribe ",
    }.items():
        code, said = run("config", "set", *words.split())
        assert (code, "note:" in said, note in said) == (0, bool(note), True)


def test_launch_takes_a_profile_by_flag_or_variable_and_says_what_overrules_it() -> None:
    launch = ("launch", "--dry-run", "-m", "this")
    run("config", "set", "--profile", "two", "num_processes=2", "device=cpu")
    assert "2 processes on cpu" in run(*launch, HEADWAY_PROFILE="two")[1]
    Path("headway.yaml").write_text("num_processes: 3\n")
    _, plan = run("launch", "--profile", "two", "--dry-run", "-m", "this")
    assert "3 processes on cpu" in plan
    assert "note: num_processes from user profile ~/.config/headway/two.yaml, line 3" in plan
    code, error = run("launch", "--profile", "tow", "--dry-run", "-m", "this")
    assert (code, "did you mean 'two'?" in error) == (2, True)


def test_control_characters_of_a_profile_do_not_steer_the_terminal() -> None:
    Path("headway.yaml").write_text('log_dir: "logs\\e[2J"\n')
    for command in ("show", "list"):
        code, shown = run("config", command)
        assert (code, r"logs\x1b[2J" in shown, "\x1b" in shown) == (0, True, False)


def test_links_that_go_round_in_circles_are_no_profile() -> None:
    Path("loop.yaml").symlink_to("loop.yaml")
    code, error = run("config", "set", "--profile", "loop.yaml", "device=cpu")
    assert (code, "Too many levels of symbolic links" in error) == (2, True)
    assert Path("loop.yaml").is_symlink()


def test_show_as_json_has_every_setting_with_its_origin() -> None:
    assert run("config", "--yes")[0] == 0
    shown = json.loads(run("config", "show", "--json")[1])
    assert shown.keys() == TABLE.keys()
    assert shown["device"]["value"] == "cpu"
    assert shown["device"]["layer"] == "user profile"
    assert "default.yaml, line " in shown["device"]["origin"]


def test_another_machines_profile_and_settings_are_shown_here() -> None:
    recorded = str(FOLDER / "gpu_8_h100.json")
    shown = json.loads(run("config", "show", "--machine", recorded, "--json")[1])
    assert shown["num_processes"]["value"] == 8
    assert run("config", "get", "num_processes", "--machine", recorded) == (0, "8\n")
    assert "`headway config get num_processes`" in run("config", "get", "num_proceses")[1]
    assert run("config", "--yes", "--machine", recorded)[0] == 0
    assert "num_processes: 8" in Path(choose_profile().path).read_text()


def test_help_and_version_are_answered(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run("--help")
    assert (code, "headway launch --cpu --num-processes 2 train.py" in text) == (0, True)
    assert (run("--version")[0], run()[0]) == (0, 2)
    with pytest.raises(SystemExit):
        main(["config", "set", "--help"])
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in TABLE)
