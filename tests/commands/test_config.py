"""`headway config`: writes what was found, shows where everything comes from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headway.commands import config
from headway.commands.main import main
from headway.machine import Gpu, Machine
from headway.profile import user_profile_path
from headway.settings import TABLE
from tests.machines.recorded import FOLDER

H100 = Gpu("NVIDIA H100", "GPU-0", 80 * 2**30, (9, 0))
T4 = Gpu("Tesla T4", "GPU-1", 16 * 2**30, (7, 5))
MAC = Machine(system="Darwin", mps=True, mps_reason="Apple silicon")


@pytest.mark.parametrize(
    ("machine", "device", "processes", "precision"),
    [
        (Machine(), "cpu", 1, "no"),
        (Machine(gpus=(H100,) * 8), "cuda", 8, "bf16"),
        (Machine(gpus=(T4, T4._replace(uuid="GPU-2"))), "cuda", 2, "no"),
        (MAC, "mps", 1, "no"),
    ],
)
def test_the_profile_fits_the_machine(
    machine: Machine, device: str, processes: int, precision: str
) -> None:
    machine = machine._replace(
        gpus=tuple(g._replace(uuid=f"{i}") for i, g in enumerate(machine.gpus))
    )
    values, reasons = config.detected_profile(machine)
    assert values == {
        "device": device,
        "num_processes": processes,
        "mixed_precision": precision,
    }
    assert all(reasons)


def test_yes_writes_a_profile_that_show_reads(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--yes"]) == 0
    written = Path(user_profile_path())
    assert "device: cpu" in written.read_text()
    assert "next: headway launch" in capsys.readouterr().out
    assert main(["config", "show", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown.keys() == TABLE.keys()
    assert shown["device"]["value"] == "cpu"
    assert shown["device"]["layer"] == "user profile"
    assert "default.yaml, line " in shown["device"]["origin"]


def test_yes_again_says_what_it_changed(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(user_profile_path())
    path.parent.mkdir(parents=True)
    path.write_text("device: cuda\nmax_restarts: 3\n")
    assert main(["config", "--yes"]) == 0
    out = capsys.readouterr().out
    assert "device: cpu  (was cuda)" in out
    assert "max_restarts: removed  (was 3)" in out
    path.write_text("- broken")
    assert main(["config", "--yes"]) == 0
    assert "broken" in capsys.readouterr().err


def test_show_prints_every_setting_its_value_and_its_origin(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWAY_MIXED_PRECISION", "bf16")
    assert main(["config", "show"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(TABLE)
    (line,) = [line for line in lines if line.startswith("mixed_precision")]
    assert line.split(maxsplit=2)[1:] == ["bf16", "environment HEADWAY_MIXED_PRECISION"]


def test_another_machines_profile_and_settings_are_shown_here(
    capsys: pytest.CaptureFixture[str],
) -> None:
    recorded = str(FOLDER / "gpu_8_h100.json")
    assert main(["config", "show", "--machine", recorded, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_processes"]["value"] == 8
    assert main(["config", "--yes", "--machine", recorded]) == 0
    assert "num_processes: 8" in Path(user_profile_path()).read_text()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["confg"], "did you mean 'config'"),
        (["train.py"], "headway launch train.py"),
        (["config"], "cannot ask questions yet"),
        (["config", "shw"], "did you mean 'show'"),
        (["config", "show", "extra"], "not expected"),
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
