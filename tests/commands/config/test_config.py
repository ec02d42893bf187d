"""`headway config`: writes what was found, shows where everything comes from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headway.commands.main import main
from headway.settings.profile_files import choose_profile
from headway.settings.table import TABLE
from tests.machines.recorded import FOLDER


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


def test_yes_again_says_what_it_changed_and_keeps_the_rest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = Path(choose_profile().path)
    path.parent.mkdir(parents=True)
    path.write_text("# mine\ndevice: cuda  # the big one\nmax_restarts: 3\n")
    assert main(["config", "--yes"]) == 0
    out = capsys.readouterr().out
    assert "device: cpu  (was cuda)" in out
    assert path.read_text().startswith("# mine\ndevice: cpu  # the big one\nmax_restarts: 3\n")
    path.write_text("- broken")
    assert main(["config", "--yes"]) == 2
    assert "is a list" in capsys.readouterr().err
    assert path.read_text() == "- broken"


@pytest.mark.wording
def test_show_prints_every_setting_and_with_origin_where_it_comes_from(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWAY_MIXED_PRECISION", "bf16")
    for flags, columns in (
        ([], ["bf16"]),
        (["--origin"], ["bf16", "environment HEADWAY_MIXED_PRECISION"]),
    ):
        assert main(["config", "show", *flags]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines] == list(TABLE)
        (line,) = [line for line in lines if line.startswith("mixed_precision")]
        assert line.split(maxsplit=2)[1:] == columns


def test_another_machines_profile_and_settings_are_shown_here(
    capsys: pytest.CaptureFixture[str],
) -> None:
    recorded = str(FOLDER / "gpu_8_h100.json")
    assert main(["config", "show", "--machine", recorded, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_processes"]["value"] == 8
    assert main(["config", "--yes", "--machine", recorded]) == 0
    assert "num_processes: 8" in Path(choose_profile().path).read_text()


def test_show_says_when_a_launch_here_would_be_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("headway.yaml").write_text("device: mps\n")
    recorded = str(FOLDER / "gpu_1.json")
    assert main(["config", "show", "--json", "--machine", recorded]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["device"]["value"] == "mps"
    assert err.startswith("headway: note: a launch would be refused: device is 'mps'")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["confg"], "did you mean 'config'"),
        (["train.py"], "headway launch train.py"),
        (["config", "shw"], "did you mean 'show'"),
        (["config", "show", "extra"], "unexpected argument 'extra'"),
        (["config", "--yess"], "did you mean --yes"),
    ],
)
def test_mistakes_are_answered_with_a_way_out(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert reason in capsys.readouterr().err


def test_help_and_version_are_answered(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert main(["--version"]) == 0
    out = capsys.readouterr().out
    assert "headway launch --cpu --num-processes 2 train.py" in out
    assert main([]) == 2
