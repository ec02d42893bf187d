"""`headway doctor` names what is wrong, with its fix; `headway env` prints facts to replay."""

from __future__ import annotations

import io
import json
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.commands import doctor, flags
from headway.commands.doctor import ERROR, OK, SKIPPED, WARNING, Check, machine_problems
from headway.commands.main import main
from headway.machine.detection import detect_machine
from headway.machine.devices import parse_devices
from headway.machine.facts import NEWEST_TORCH, Machine, load_machine
from headway.machine.source import Source
from headway.settings.resolve import environment_layer, resolve
from tests.commands.running import run
from tests.conftest import REPOSITORY
from tests.machines.recorded import (
    FOLDER,
    RECORDINGS,
    Recorded,
    Recording,
    changed,
    gpus,
    mac,
    server,
)
from tests.machines.recorded import answer as answer_of
from tests.machines.recorded import torch as version_file


def found(recording: Recording | str, **variables: str) -> list[Check]:
    """Return what is wrong with a recorded machine, with more variables than it had."""
    if isinstance(recording, str):
        recording = RECORDINGS[recording]
    environ = {**recording.environ, **variables}
    machine = detect_machine(environ, Recorded(recording), full=True)
    return [check for check in machine_problems(machine) if check.status != OK]


@pytest.mark.parametrize(
    ("machine", "variable", "status", "what"),
    [
        ("gpu_4", "CUDA_VISIBLE_DEVICES=1,9,2", WARNING, "is ignored from 9 on"),
        ("gpu_4", "CUDA_VISIBLE_DEVICES=0-2", WARNING, "CUDA reads 0-2 as index 0"),
        ("gpu_4", "CUDA_VISIBLE_DEVICES=0,-1,1", WARNING, "is ignored from -1 on"),
        ("gpu_4", "CUDA_VISIBLE_DEVICES=0,,1,", WARNING, "is ignored from the empty entry on"),
        *(("gpu_4", f"CUDA_VISIBLE_DEVICES={mask}", OK, "") for mask in ("0,1,", "0, -1,", "0,,")),
        ("laptop_cpu", "OMP_NUM_THREADS=64", WARNING, "more than the 8 usable cores"),
        ("laptop_cpu", "OMP_NUM_THREADS=64,2", WARNING, "more than the 8 usable cores"),
        *(
            ("laptop_cpu", f"OMP_NUM_THREADS={text}", WARNING, "is not a number of threads")
            for text in ("0", "-1", "abc", "")
        ),
        *(("laptop_cpu", f"OMP_NUM_THREADS={text}", OK, "") for text in ("8", "4,2", " 2 , 64")),
        ("gpu_4", "RANK=0", WARNING, "left over from another launch"),
    ],
)
def test_a_variable_that_is_wrong_is_found_and_others_are_left_alone(
    machine: str, variable: str, status: str, what: str
) -> None:
    name, _, text = variable.partition("=")
    findings = found(machine, **{name: text})
    assert [finding.status for finding in findings] == ([] if status == OK else [status])
    for finding in findings:
        assert what in finding.what
        assert name in finding.what
        assert name in finding.fix


def test_a_gpu_to_leave_out_is_named_so_that_a_mask_changes_nothing() -> None:
    uuids = [gpu.uuid for gpu in load_machine(str(FOLDER / "gpu_exclusive.json")).gpus]
    (finding,) = found("gpu_exclusive", CUDA_VISIBLE_DEVICES="1,0")
    assert finding.fix == f"`--devices {uuids[1]}`"
    masked = load_machine(str(FOLDER / "gpu_exclusive.json"))._replace(mask="1,0")
    spec = parse_devices(finding.fix.strip("`").removeprefix("--devices "))
    assert spec.select(masked.visible_gpus).indices == (0,)


@pytest.mark.parametrize("name", ["gpu_exclusive", "gpu_prohibited", "gpu_ecc_errors"])
def test_a_gpu_that_no_training_sees_is_no_finding(name: str) -> None:
    assert found(name, CUDA_VISIBLE_DEVICES="1") == []


def test_a_gpu_without_kernels_in_the_torch_build_is_an_error_that_names_a_build() -> None:
    for capability, is_found in (((7, 0), True), ((7, 5), False)):
        card = gpus(1, "Tesla V100-SXM2-32GB", 32, capability)
        kernels = [check for check in found(server(card, cores=16)) if check.check == "kernels"]
        assert [check.status for check in kernels] == [ERROR] * is_found
        for check in kernels:
            assert "sm_70, but PyTorch's builds for CUDA 13.0" in check.what
            assert "whl/cu126" in check.fix


def test_a_missing_or_read_only_dev_shm_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    (finding,) = found(RECORDINGS["laptop_cpu"]._replace(shm=0))
    assert (finding.check, finding.status) == ("/dev/shm", WARNING)
    assert finding.what.startswith("missing or read-only")
    assert "--shm-size" in finding.fix
    there = os.statvfs("/")
    assert Source("/").disk_size("") == there.f_frsize * there.f_blocks
    assert Source("/").disk_size("does/not/exist") == 0
    read_only = SimpleNamespace(f_flag=os.ST_RDONLY, f_frsize=4096, f_blocks=9)
    monkeypatch.setattr(os, "statvfs", lambda _: read_only)
    assert Source("/").disk_size("") == 0


def test_a_torch_that_is_too_old_is_an_error() -> None:
    (finding,) = found(mac(torch=version_file("2.7.1")))
    assert finding.what == "torch 2.7.1 is older than 2.8, which Headway requires"
    assert finding.fix == "`pip install -U torch`"
    recorded = load_machine(str(FOLDER / "laptop_cpu.json"))
    assert recorded.torch is not None
    known, newer = (
        machine_problems(recorded._replace(torch=recorded.torch._replace(version=version)))[0].what
        for version in ("2.13.1", "2.14.0")
    )
    assert "tested" not in known
    assert newer.endswith("; Headway is tested with torch up to 2.13")
    text = (REPOSITORY / "constraints.txt").read_text()
    assert f"torch=={'.'.join(map(str, NEWEST_TORCH))}." in text


def test_an_error_makes_the_exit_code_1_and_json_holds_machine_and_checks() -> None:
    recorded = str(FOLDER / "driver_too_old.json")
    code, text = run("doctor", "--machine", recorded, "--json")
    told = json.loads(text)
    assert code == 1
    assert told["machine"]["driver"] == "535.129.03"
    skipped = [check["check"] for check in told["checks"] if check["status"] == SKIPPED]
    assert skipped == list(doctor.LIVE)


def live(monkeypatch: pytest.MonkeyPatch, machine: str = "laptop_cpu", **torch: Any) -> str:
    """Return the findings of the live checks as text; the child Python answers as told."""
    gpus = [{"name": "one"}] * torch.get("count", 0)
    answer: Any = torch.pop("answered", answer_of(*gpus, error=torch.get("error", "")))
    is_error = isinstance(answer, OSError)
    said: Any = failing(answer) if is_error else lambda *_, **__: answer
    monkeypatch.setattr(Source, "output_of", said)
    findings = doctor._live_checks(load_machine(str(FOLDER / f"{machine}.json")))
    return "\n".join(f"{f.status} {f.check} {f.what} {f.fix}" for f in findings)


def test_a_machine_without_faults_passes_the_live_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    text = live(monkeypatch)
    for check in doctor.LIVE:
        assert check in text
    assert "error" not in text


@pytest.mark.parametrize(
    ("machine", "torch", "what"),
    [
        ("gpu_4", {"count": 2}, "torch sees 2 of 4 GPUs"),
        ("intel_4", {"count": 3}, "torch sees 3 of 4 GPUs"),
        ("gpu_4", {"count": 4, "error": "CUDA error: busy"}, "the first fails: CUDA error: busy"),
        ("mac_m2", {"error": "not linked with mps"}, "use MPS on this Mac: not linked with mps"),
        (
            "laptop_cpu",
            {"answered": OSError("ImportError: libcudart")},
            "cannot import torch in a child process: ImportError: libcudart",
        ),
    ],
)
def test_what_only_torch_knows_is_asked_of_a_child(
    machine: str, torch: dict[str, Any], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert what in live(monkeypatch, machine, **torch)


def test_doctor_names_the_pip_of_its_own_python_for_this_machine_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded = str(FOLDER / "cpu_torch_on_gpu_box.json")
    monkeypatch.setattr(doctor, "_live_checks", lambda _: [])
    assert "`pip install --force-reinstall torch" in run("doctor", "--machine", recorded)[1]
    monkeypatch.setattr(flags, "detect_machine", lambda *_, **__: load_machine(recorded))
    assert f"{sys.executable} -m pip install --force-reinstall torch" in run("doctor")[1]


def test_mig_slices_are_one_gpu_for_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "error" not in live(monkeypatch, "gpu_mig", count=1)


def failing(error: OSError) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def test_a_working_folder_that_is_gone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = Path("gone").absolute()
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    what = "the working directory is not available: No such file or directory `cd`"
    assert f"error torch runs {what}" in live(monkeypatch)


def test_without_a_writable_temporary_folder_headway_test_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reason = "No usable temporary directory found in ['/tmp']"
    monkeypatch.setattr(tempfile, "gettempdir", failing(FileNotFoundError(2, reason)))
    code, error = run("test")
    assert (code, "export TMPDIR=FOLDER" in error) == (3, True)


@pytest.mark.parametrize("command", ["test --cpu", f"estimate --devices 4xcpu {__file__}"])
def test_a_training_without_torch_is_refused_before_it_starts(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setattr("headway.commands.main._PACKAGES", ("torch",))
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("it was started"))
    words = command.split()
    code, error = run(*words)
    assert code == 3
    assert error.startswith(f"error: `headway {words[0]}` requires torch, which is not installed")
    assert f"`{sys.executable} -m pip install torch`" in error


@pytest.mark.parametrize(
    ("child", "what"),
    [
        (None, "cannot start a child Python process: No such file or directory"),
        (
            "#!/bin/sh\nprintf 'no \\377 torch' >&2\nexit 1\n",
            "cannot import torch in a child process: no \ufffd torch",
        ),
    ],
)
@pytest.mark.processes
def test_a_python_that_does_not_start_or_says_nothing_sensible_is_an_error(
    child: str | None, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if child is not None:
        Path("python").write_text(child)
        Path("python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(Path("python").absolute()))
    finding = doctor._ask_torch(Machine())
    assert (finding.status, finding.what) == (ERROR, what)
    assert finding.fix


@pytest.mark.parametrize(
    "command", ["doctor --machine there.json", "launch --machine there.json --dry-run -m this"]
)
@pytest.mark.parametrize(
    ("encoding", "shown"),
    [("ascii", rb"1 GPU (\xe9 \ud800)"), ("utf-8", b"1 GPU (\xc3\xa9 \\ud800)")],
)
def test_characters_that_the_terminal_cannot_show_are_escaped(
    command: str, encoding: str, shown: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("there.json").write_text(json.dumps(changed("gpu_1", "gpus[0].name", "é \ud800")))
    terminal = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(terminal, encoding))
    assert main(command.split()) == 0
    assert shown in terminal.getvalue()


def test_a_home_that_is_no_place_is_not_looked_for() -> None:
    recorded = str(FOLDER / "laptop_cpu.json")
    assert "no NVIDIA driver" in run("doctor", "--machine", recorded, HOME="o")[1]


@pytest.mark.parametrize("no_colour", ["", "1"])
def test_on_a_terminal_the_table_has_a_head_and_colours_unless_they_are_unwanted(
    no_colour: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", no_colour)
    main(["doctor", "--machine", str(FOLDER / "gpu_prohibited.json")])
    out = capsys.readouterr().out
    assert "finding" in out
    assert "-c DEFAULT" in " ".join(out.split())
    assert ("\x1b[33mwarning" in out) == (not no_colour)


def test_through_a_pipe_nothing_is_coloured_wrapped_or_cut() -> None:
    code, out = run("env", NCCL_TOPO_FILE="/a folder" * 50, FORCE_COLOR="1", COLUMNS="40")
    assert code == 0
    assert f" {'/a folder' * 50!r}\n" in out
    assert "\x1b" not in out
    assert " \n" not in out


def test_on_a_narrow_terminal_nothing_of_a_table_is_cut_off(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("NCCL_TOPO_FILE", "0123456789" * 9)
    main(["env"])
    assert "0123456789" * 9 in "".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("words", [["env"], ["env", "--json"], ["doctor", "--json"]])
def test_secrets_addresses_and_the_home_folder_are_told_to_nobody(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_live_checks", lambda _: [Check("x", OK, "in /home/jane/x")])
    variables = {
        "HOME": "/home/jane",
        "NVIDIA_API_KEY": "nvapi-1",
        "TORCH_HOME": "/home/jane/torch",
        "MASTER_ADDR": "gpu7.example.org",
        "HEADWAY_MAIN_ADDRESS": "gpu7.example.org",
        "SLURM_STEP_NODELIST": "gpu[7-9]",
        "HEADWAY_ENV": "'HF_TOKEN=hf_1' 'A=hf_1 b'",
    }
    _, out = run(*words, **variables)
    for secret in ("nvapi-1", "NVIDIA_API_KEY", "jane", "gpu7", "gpu[7", "hf_1"):
        assert secret not in out
    assert socket.gethostname() not in out.split()
    assert "~/torch" in out


def test_a_snapshot_with_hidden_values_can_be_replayed() -> None:
    text = run("env", "--json", HEADWAY_MAIN_ADDRESS="gpu7.example.org")[1]
    Path("machine.json").write_text(text)
    host = load_machine("machine.json").host
    assert host is not None
    settings = resolve([environment_layer(host.variables)], Machine(), {})
    assert settings.main_address == "hidden"


def test_env_as_json_is_this_machine_again() -> None:
    code, text = run("env", "--json")
    assert code == 0
    Path("machine.json").write_text(text)
    assert load_machine("machine.json") == detect_machine(full=True)


@pytest.mark.parametrize(
    ("profile", "what"),
    [
        ("devise: cpu\n", "error profile unknown setting 'devise'; did you mean 'device'?"),
        ("devise: cpu\n", "headway.yaml, line 1"),
        ("device: cuda\n", "device is 'cuda', but no GPU is visible"),
        ("ranks: 0,1\n", "error profile ranks contains rank 1, but the only rank is 0"),
    ],
)
def test_a_profile_that_no_launch_here_could_use_is_an_error(
    profile: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("headway.yaml").write_text(profile)
    assert what in live(monkeypatch)
