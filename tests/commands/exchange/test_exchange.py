"""`headway config import` and `export`: nothing that has a meaning here is lost or invented."""

from __future__ import annotations

import shlex
import subprocess
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from headway.commands.main import main
from headway.settings.resolve import environment_layer, profile_layers, resolve
from headway.settings.table import Settings
from tests.machines.recorded import FOLDER as MACHINES
from tests.machines.recorded import load

Capture = pytest.CaptureFixture[str]


def in_profile(**values: str) -> Settings:
    main(["config", "set", *(f"{key}={value}" for key, value in values.items())])
    return resolve(profile_layers(), load("gpu_8_h100"), {})


def export(style: str, machine: str = "gpu_8_h100") -> str:
    recorded = str(MACHINES / f"{machine}.json")
    with redirect_stdout(StringIO()) as out:
        assert main(["config", "export", "--format", style, "--machine", recorded]) == 0
    return out.getvalue()


EVERYTHING: dict[str, str] = {
    "device": "cuda",
    "devices": "1,3",
    "num_processes": "2",
    "mixed_precision": "bf16",
    "gradient_accumulation_steps": "4",
    "threads_per_process": "3",
    "num_machines": "2",
    "machine_rank": "1",
    "main_address": "node0",
    "main_port": "29501",
    "max_restarts": "2",
    "grace_period_s": "60",
    "hang_timeout": "600",
    "log_dir": "/tmp/logs",
    "ranks": "0-1,3",
    "start_method": "exec",
    "env": "A=1 B='two words'",
}


@pytest.mark.parametrize("style", ["env", "sh"])
def test_what_is_exported_to_variables_means_the_same(style: str) -> None:
    settings = in_profile(**EVERYTHING)
    lines = export(style).splitlines()
    if style == "sh":
        lines = [word for line in lines for word in shlex.split(line)[1:]]
    environ = dict(line.split("=", 1) for line in lines)
    assert len(environ) == len(EVERYTHING)
    again = resolve([environment_layer(environ)], load("gpu_8_h100"), {})
    assert {n: v.value for n, v in again.values.items()} == {
        n: v.value for n, v in settings.values.items()
    }


@pytest.mark.processes
def test_a_variable_that_no_shell_can_set_is_kept() -> None:
    in_profile(device="cpu", **{"env.A B": "1", "env.C": "it's $HOME"})
    for style in ("sh", "env"):  # HEADWAY_ENV is one variable, and holds any name
        lines = export(style, "laptop_cpu").splitlines()
        if style == "sh":
            command = ["sh", "-c", "\n".join([*lines, "env"])]
            printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            lines = [line for line in printed.splitlines() if line.startswith("HEADWAY_")]
        settings = resolve(
            [environment_layer(dict(line.split("=", 1) for line in lines))], load("laptop_cpu"), {}
        )
        assert settings.env == {"A B": "1", "C": "it's $HOME"}


def test_an_accelerate_file_of_more_than_memory_holds_is_refused(capsys: Capture) -> None:
    bomb = "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))
    nested = "[" * 5_000 + "]" * 5_000
    for text, reason in (("a0: &a0 [x]\n" + bomb, "anchors"), (nested, "nest")):
        Path("its.yaml").write_text(text)
        assert main(["config", "import", "its.yaml"]) == 2
        assert reason in capsys.readouterr().err
