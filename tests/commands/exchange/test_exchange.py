"""`headway config import` and `export`: nothing that has a meaning here is lost or invented."""

from __future__ import annotations

import shlex
import subprocess
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import yaml

from headway.commands.main import main
from headway.settings.layers import environment_layer, profile_layers
from headway.settings.profile_files import choose_profile
from headway.settings.resolve import resolve
from headway.settings.table import Settings
from tests.commands.exchange.accelerate_files import FOLDER, KINDS
from tests.commands.running import profile
from tests.machines.recorded import FOLDER as MACHINES
from tests.machines.recorded import load

Capture = pytest.CaptureFixture[str]


def in_profile(**values: str) -> Settings:
    main(["config", "set", *(f"{key}={value}" for key, value in values.items())])
    return resolve(profile_layers(), load("gpu_8_h100"), {})


def export(style: str, machine: str = "gpu_8_h100") -> tuple[str, str]:
    """Return what an export of the profile prints, and what is said beside it."""
    recorded = str(MACHINES / f"{machine}.json")
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        assert main(["config", "export", "--format", style, "--machine", recorded]) == 0
    return out.getvalue(), err.getvalue()


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
    lines = export(style)[0].splitlines()
    if style == "sh":
        lines = [word for line in lines for word in shlex.split(line)[1:]]
    environ = dict(line.split("=", 1) for line in lines)
    assert len(environ) == len(EVERYTHING)
    again = resolve([environment_layer(environ)], load("gpu_8_h100"), {})
    assert {n: v.value for n, v in again.values.items()} == {
        n: v.value for n, v in settings.values.items()
    }


@pytest.mark.parametrize("style", ["torchrun", "accelerate"])
def test_what_is_exported_to_another_tool_is_imported_as_the_same(style: str) -> None:
    in_profile(**EVERYTHING)
    before = profile()
    out, err = export(style)
    Path(choose_profile().path).unlink()
    Path("theirs").write_text(out)
    words = shlex.split(out) if style == "torchrun" else ["theirs"]
    assert main(["config", "import", *words]) == 0
    after = profile()
    assert after.pop("devices") == ["1", "3"]
    before.pop("devices")
    missing = {line.split()[2] for line in err.splitlines()}
    assert missing == before.keys() - after.keys()
    assert missing == {"hang_timeout", "ranks", "start_method"} | (
        {"env", "threads_per_process", "max_restarts", "log_dir", "grace_period_s"}
        | {"gradient_accumulation_steps"}
        if style == "accelerate"
        else set()
    )
    assert {key: after[key] for key in before.keys() - missing} == {
        key: raw for key, raw in before.items() if key not in missing
    }


@pytest.mark.parametrize(
    ("machine", "settings", "words", "gpu_ids"),
    [
        ("gpu_8_h100", {"devices": "^0"}, "CUDA_VISIBLE_DEVICES=1,2,3,4,5,6,7 ", "1,2,3,4,5,6,7"),
        ("slurm_node", {"devices": "1,3"}, "CUDA_VISIBLE_DEVICES=5,7 ", "5,7"),
        ("gpu_8_h100", {"num_processes": "8"}, "OMP_NUM_THREADS=8 ", "all"),
        ("mac_m2", {"mps_fallback": "strict"}, "PYTORCH_ENABLE_MPS_FALLBACK=0 ", None),
    ],
)
def test_exported_gpus_and_fallback_are_those_of_a_launch_on_that_machine(
    machine: str, settings: dict[str, str], words: str, gpu_ids: str | None
) -> None:
    in_profile(**settings)
    line, _ = export("torchrun", machine)
    assert line.startswith(words)
    assert yaml.safe_load(export("accelerate", machine)[0]).get("gpu_ids") == gpu_ids
    assert main(["config", "import", "--profile", "again", *shlex.split(line)]) == 0
    again = resolve(profile_layers(profile="again"), load(machine), {})
    assert settings.get("mps_fallback", again.mps_fallback) == again.mps_fallback


def test_ranks_of_one_machine_are_shown_by_torchrun_too() -> None:
    in_profile(device="cpu", num_processes="4", ranks="0,2-3")
    out, err = export("torchrun", "laptop_cpu")
    assert " --local-ranks-filter 0,2,3 your_script.py" in out
    assert not err
    main(["config", "import", *shlex.split(out)])
    assert profile()["ranks"] == "0,2,3"


def test_accelerate_reads_what_is_exported_for_it() -> None:
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    in_profile(**EVERYTHING)
    Path("theirs.yaml").write_text(export("accelerate")[0])
    config = config_args.load_config_from_file("theirs.yaml")
    assert (config.num_processes, config.num_machines, config.gpu_ids) == (4, 2, "1,3")
    assert config.distributed_type == "MULTI_GPU"


def test_the_files_are_what_accelerates_own_classes_write() -> None:
    for kind, answers in KINDS.items():
        written = yaml.safe_load((FOLDER / f"{kind}.yaml").read_text())
        assert {key: written[key] for key in answers} == answers


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
def test_a_shell_can_run_the_exported_line_whatever_the_variables_hold() -> None:
    in_profile(device="cpu", **{"env.A": "x y", "env.B": "it's $HOME"})
    line, _ = export("torchrun", "laptop_cpu")
    assert " A='x y' B=" in line
    assert run_in_shell(line, 'printf "%s|%s" "$A" "$B"') == "x y|it's $HOME"


@pytest.mark.processes
def test_a_variable_that_no_shell_can_set_is_named_for_torchrun_and_kept_for_headway() -> None:
    in_profile(device="cpu", **{"env.A B": "1", "env.C": "2"})
    out, err = export("torchrun", "laptop_cpu")
    assert "A B" not in out
    assert missing(err) == ["env.A B"]
    for style in ("sh", "env"):  # HEADWAY_ENV is one variable, and holds any name
        out, err = export(style, "laptop_cpu")
        assert not missing(err)
        lines = out.splitlines()
        if style == "sh":
            lines = run_in_shell(f"{out}env", ":").splitlines()
        environ = dict(line.split("=", 1) for line in lines if line.startswith("HEADWAY_"))
        settings = resolve([environment_layer(environ)], load("laptop_cpu"), {})
        assert settings.env == {"A B": "1", "C": "2"}


ON_EIGHT = {"device": "cuda", "num_processes": "8"}
CPU_RANKS = {"device": "cpu", "num_processes": "2"}
ADDRESS = {"main_address": "a", "main_port": "3"}


@pytest.mark.parametrize(
    ("style", "machine", "settings", "gone"),
    [
        ("accelerate", "gpu_8_h100", ON_EIGHT, set()),
        ("accelerate", "gpu_8_h100", {"device": "cuda", "devices": "8"}, {"devices"}),
        ("accelerate", "gpu_8_h100", {"device": "cuda", "devices": "3,"}, set()),
        ("accelerate", "gpu_8_h100", CPU_RANKS, set()),
        ("accelerate", "mac_m2", {"device": "mps"}, {"device"}),
        ("accelerate", "laptop_cpu", ADDRESS, ADDRESS.keys()),
        ("accelerate", "laptop_cpu", {"log_dir": "logs", "env.A": "1"}, {"log_dir", "env"}),
        ("torchrun", "gpu_8_h100", ON_EIGHT, {"device"}),
        ("torchrun", "gpu_8_h100", {"device": "cuda", "devices": "8"}, {"device", "devices"}),
        ("torchrun", "gpu_8_h100", {"device": "cuda", "devices": "0,1"}, set()),
        ("torchrun", "gpu_8_h100", CPU_RANKS, set()),
        ("torchrun", "mac_m2", {"device": "mps"}, {"device"}),
        ("torchrun", "mac_m2", {"device": "cpu", "mps_fallback": "on"}, {"mps_fallback"}),
        ("torchrun", "laptop_cpu", ADDRESS, ADDRESS.keys()),
        ("torchrun", "laptop_cpu", {"log_dir": "logs"}, set()),
    ],
)
def test_what_another_tool_loses_is_said_and_all_else_comes_back(
    style: str, machine: str, settings: dict[str, str], gone: set[str], capsys: Capture
) -> None:
    in_profile(**settings)
    before = profile()
    out, err = export(style, machine)
    assert set(missing(err)) == gone
    is_told = style == "accelerate" and settings == CPU_RANKS
    assert ("Accelerate starts one process on a CPU" in err) == is_told
    Path("its.yaml").write_text(out)
    Path(choose_profile().path).unlink()
    capsys.readouterr()
    words = shlex.split(out) if style == "torchrun" else ["its.yaml"]
    assert main(["config", "import", *words]) == 0
    assert before.keys() - profile().keys() == gone
    assert style == "accelerate" or "not imported" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("torchrun", "required: training_script"),
        ("torchrun --nporc-per-node=2 t.py", "--nporc-per-node=2; did you mean --nproc-per-node"),
        ("torchrun --use-env t.py", "--use-env"),  # of the old launcher alone
        ("torchrun --nnodes", "expected one argument"),
        ("torchrun --max-restarts x t.py", "--max-restarts"),
    ],
)
def test_what_torchrun_would_not_take_is_refused_with_its_reason(
    line: str, reason: str, capsys: Capture
) -> None:
    assert main(["config", "import", *line.split()]) == 2
    assert reason in capsys.readouterr().err
    assert not Path(choose_profile().path).exists()


def test_an_accelerate_file_of_more_than_memory_holds_is_refused(capsys: Capture) -> None:
    bomb = "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))
    for text, reason in (("a0: &a0 [x]\n" + bomb, "anchors"), ("[" * 100_000, "nest")):
        Path("its.yaml").write_text(text)
        assert main(["config", "import", "its.yaml"]) == 2
        assert reason in capsys.readouterr().err
