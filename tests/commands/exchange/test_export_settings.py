"""`headway config export`: its lines can be run, and what they cannot hold is said."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from headway.commands.main import main
from headway.settings.layers import environment_layer
from headway.settings.profile_files import choose_profile
from headway.settings.resolve import resolve
from tests.commands.exchange.test_convert import Capture, export, in_profile, profile
from tests.machines.recorded import load


def missing(err: str) -> list[str]:
    words = " is not exported: it has no counterpart"
    return [
        line.removeprefix("headway: note: ").removesuffix(words)
        for line in err.splitlines()
        if line.endswith(words)
    ]


def run_in_shell(text: str, show: str) -> str:
    """Run a shell's text in which torchrun is a function that shows something."""
    script = f"torchrun() {{ {show}; }}\n{text}\n"
    return subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout


@pytest.mark.processes
def test_a_shell_can_run_the_exported_line_whatever_the_variables_hold(capsys: Capture) -> None:
    in_profile(device="cpu", **{"env.A": "x y", "env.B": "it's $HOME"})
    capsys.readouterr()
    assert export("torchrun", "laptop_cpu") == 0
    line = capsys.readouterr().out
    assert " A='x y' B=" in line
    assert run_in_shell(line, 'printf "%s|%s" "$A" "$B"') == "x y|it's $HOME"


@pytest.mark.processes
def test_a_variable_that_no_shell_can_set_is_named_for_torchrun_and_kept_for_headway(
    capsys: Capture,
) -> None:
    in_profile(device="cpu", **{"env.A B": "1", "env.C": "2"})
    capsys.readouterr()
    assert export("torchrun", "laptop_cpu") == 0
    streams = capsys.readouterr()
    assert "A B" not in streams.out
    assert missing(streams.err) == ["env.A B"]
    for style in ("sh", "env"):  # HEADWAY_ENV is one variable, and holds any name
        assert export(style, "laptop_cpu") == 0
        streams = capsys.readouterr()
        assert not missing(streams.err)
        lines = streams.out.splitlines()
        if style == "sh":
            lines = run_in_shell(f"{streams.out}env", ":").splitlines()
        environ = dict(line.split("=", 1) for line in lines if line.startswith("HEADWAY_"))
        settings = resolve([environment_layer(environ)], load("laptop_cpu"), {})
        assert settings.env == {"A B": "1", "C": "2"}


@pytest.mark.parametrize(
    ("machine", "settings", "gone"),
    [
        ("gpu_8_h100", {"device": "cuda", "num_processes": "8"}, set()),
        ("gpu_8_h100", {"device": "cuda", "devices": "8"}, {"devices"}),
        ("gpu_8_h100", {"device": "cuda", "devices": "3,"}, set()),
        ("gpu_8_h100", {"device": "cpu", "num_processes": "2"}, set()),
        ("mac_m2", {"device": "mps"}, {"device"}),
        ("laptop_cpu", {"main_address": "a", "main_port": "3"}, {"main_address", "main_port"}),
        ("laptop_cpu", {"log_dir": "logs", "env.A": "1"}, {"log_dir", "env"}),
    ],
)
def test_what_an_accelerate_file_loses_is_said_and_all_else_comes_back(
    machine: str, settings: dict[str, str], gone: set[str], capsys: Capture
) -> None:
    in_profile(**settings)
    before = profile()
    capsys.readouterr()
    assert export("accelerate", machine) == 0
    streams = capsys.readouterr()
    assert set(missing(streams.err)) == gone
    has_cpu_ranks = settings == {"device": "cpu", "num_processes": "2"}
    assert ("Accelerate starts one process on a CPU" in streams.err) == has_cpu_ranks
    Path("its.yaml").write_text(streams.out)
    Path(choose_profile().path).unlink()
    assert main(["config", "import", "its.yaml"]) == 0
    assert before.keys() - profile().keys() == gone


@pytest.mark.parametrize(
    ("machine", "settings", "gone"),
    [
        ("gpu_8_h100", {"device": "cuda", "num_processes": "8"}, {"device"}),
        ("gpu_8_h100", {"device": "cuda", "devices": "8"}, {"device", "devices"}),
        ("gpu_8_h100", {"device": "cuda", "devices": "0,1"}, set()),
        ("gpu_8_h100", {"device": "cpu", "num_processes": "2"}, set()),
        ("mac_m2", {"device": "mps"}, {"device"}),
        ("mac_m2", {"device": "cpu", "mps_fallback": "on"}, {"mps_fallback"}),
        ("laptop_cpu", {"main_address": "a", "main_port": "3"}, {"main_address", "main_port"}),
        ("laptop_cpu", {"log_dir": "logs"}, set()),
    ],
)
def test_what_a_torchrun_line_loses_is_said_and_all_else_comes_back(
    machine: str, settings: dict[str, str], gone: set[str], capsys: Capture
) -> None:
    in_profile(**settings)
    capsys.readouterr()
    assert export("torchrun", machine) == 0
    streams = capsys.readouterr()
    assert set(missing(streams.err)) == gone
    Path(choose_profile().path).unlink()
    assert main(["config", "import", *shlex.split(streams.out)]) == 0
    assert settings.keys() - profile().keys() == gone
    assert "not imported" not in capsys.readouterr().out
