"""`headway estimate`: what it prints, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from headway.commands.estimate import Report
from headway.errors import ConfigError, LaunchError
from headway.estimate.planner import (
    ROWS,
    Devices,
    Planner,
    RowEstimate,
    Trial,
    TrialResult,
    devices_of,
    parse_devices,
    required_memory,
    rows_for,
)
from headway.ipc.stderr import size
from headway.machine.facts import Machine, load_machine
from tests.commands.running import run
from tests.distributed.launching import environment, wait_for_end
from tests.docs.test_screens import ROOT
from tests.estimate.following import warm_planners
from tests.waiting import wait_until

MACHINE = str(ROOT / "tests" / "machines" / "gpu_8_h100.json")
TRAINING = """
import argparse
import torch
parser = argparse.ArgumentParser()
parser.add_argument("--bs", type=int, default=4)
size = parser.parse_args().bs
net = torch.nn.Linear(1000, 1000)
if torch.cuda.is_available():
    net.cuda()
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(2):
    net(torch.ones(size, 1000, device=net.weight.device)).sum().backward()
    optimizer.step()
"""
ENVIRON = {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8xH100-80GB", (8, 1, 80 * 10**9)),
        ("2x8xA100-40GB", (8, 2, 40 * 10**9)),
        ("24GiB", (1, 1, 24 * 2**30)),
        ("4xMyGPU-1.5GB", (4, 1, 1_500_000_000)),
    ],
)
def test_devices_are_read(text: str, expected: tuple[int, int, int]) -> None:
    found = parse_devices(text, Machine())
    assert (found.per_machine, found.machines, found.memory_bytes) == expected
    assert found.kind == "cuda"


@pytest.mark.parametrize("text", ["", "8", "0xH100", "H1000", "A100", "8xx80GB", "cpu"])
def test_devices_that_say_too_little_are_refused_with_what_to_write(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_devices(text, Machine())  # whose own memory is not known
    assert refused.value.problems[0].fix


def test_cpu_ranks_share_the_memory_of_their_machine() -> None:
    found = parse_devices("4xcpu-64GB", Machine())
    assert (found.kind, found.world_size, found.bytes_per_rank) == ("cpu", 4, 16 * 10**9)


def test_the_devices_of_a_recorded_machine_are_its_gpus() -> None:
    found = devices_of(load_machine(MACHINE))
    assert (found.kind, found.per_machine, found.memory_bytes) == ("cuda", 8, 85_899_345_920)


def test_a_peak_fits_with_its_margin_and_a_failure_is_never_said_to() -> None:
    devices = Devices("cuda", "GPU", 10 * 2**30)
    assert required_memory(TrialResult(8 * 2**30), devices)[1] is True
    assert required_memory(TrialResult(9 * 2**30), devices)[1] is False
    assert required_memory(TrialResult(failed_at="script.py, line 1: KeyError"), devices)[1] is None


def test_one_rank_has_nothing_to_shard() -> None:
    assert not any(row.sharded for row in rows_for(1))
    assert rows_for(2) == ROWS


def test_the_cheapest_strategy_that_fits_is_the_one_to_launch() -> None:
    rows = [
        RowEstimate(ROWS[0], TrialResult(9), 9, False),
        RowEstimate(ROWS[1], TrialResult(5), 5, True),
        RowEstimate(ROWS[2], TrialResult(3), 3, True),
    ]
    devices = Devices("cuda", "GPU", 8, 4, 2)
    report = Report(Trial("train.py", ("--x", "a b")), devices, rows)
    assert report.chosen is rows[1]
    start = "headway launch --num-machines 2 --num-processes 4"
    rows += [RowEstimate(ROWS[3], TrialResult(1), 1, True)]
    assert [report.launch_line(row) for row in rows] == [
        f"{start} train.py --x 'a b'",
        f"{start} --strategy fsdp train.py --x 'a b'",
        f"{start} --activation-checkpointing train.py --x 'a b'",
        f"{start} --strategy fsdp --activation-checkpointing train.py --x 'a b'",
    ]


@pytest.fixture
def warm(warm_pythons: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fork the process that follows a script."""
    monkeypatch.setattr(sys, "orig_argv", ["headway"])  # a worker of xdist has flags
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    with warm_planners():
        yield


@pytest.mark.processes
@pytest.mark.usefixtures("warm")
def test_the_report_has_the_peak_its_parts_what_fits_and_the_line_to_launch() -> None:
    pytest.importorskip("torch")
    Path("script.py").write_text(TRAINING)
    flags = ["--gradient-accumulation-steps", "2"]
    code, printed = run("estimate", "--devices", "2xGPU-2GB", *flags, "script.py", "--bs", "4")
    assert code == 0, printed
    lines = printed.splitlines()
    parameters = next(line for line in lines if line.startswith("  parameters"))
    assert size(4 * 1_001_000) in parameters
    rows = {line.split()[0]: line for line in lines if line.startswith(("ddp", "fsdp"))}
    assert [*rows] == [row.name for row in ROWS]
    assert all(row.endswith("  fits") for row in rows.values())
    assert f"headway launch --num-processes 2 {' '.join(flags)} script.py --bs 4" in lines
    assert "this requires a script that divides its data, as accelerator.prepare() does" in lines
    assert "checked against CPU runs only" in printed


@pytest.mark.processes
@pytest.mark.usefixtures("warm")
def test_a_script_that_fails_is_refused_with_its_last_lines() -> None:
    pytest.importorskip("torch")
    Path("scripts").mkdir()
    Path("scripts/uneven.py").write_text(
        "from headway import Accelerator\nAccelerator(global_batch_size=3)"
    )
    words = ("--devices", "2x24GB", "--strategy", "ddp", "scripts/uneven.py")
    code, printed = run("estimate", *words)
    assert (code, printed.count("fix:")) == (2, 2), printed
    assert "scripts/uneven.py, line 2" in printed


@pytest.mark.processes
@pytest.mark.parametrize("reads", [True, False])
def test_a_child_that_ends_without_an_answer_is_an_error_that_says_so(
    tmp_path: Path, reads: bool
) -> None:
    python, closed = tmp_path / "python", tmp_path / "closed"
    last = "read line" if reads else "exec <&-"
    python.write_text(f"#!/bin/sh\n{last}\n> {closed}\nexit 7\n")
    python.chmod(0o755)
    with Planner([str(python)], os.environ) as planner:
        if not reads:  # nobody reads what is written from here on
            wait_until(closed.exists)
        with pytest.raises(LaunchError) as refused:
            planner.run(Trial("script.py", ()))
    assert refused.value.problems[0].where == "script.py"
    assert "7" in refused.value.problems[0].what


@pytest.mark.processes
@pytest.mark.usefixtures("warm")
def test_the_time_limit_is_waited_for_once() -> None:
    pytest.importorskip("torch")
    Path("endless.py").write_text(f"{TRAINING[: TRAINING.index('for')]}import time; time.sleep(99)")
    attempt = Trial("endless.py", (), time_limit_s=1, world_size=2)
    with Planner([sys.executable], environment()) as planner:
        devices = Devices("cpu", "CPU", 2**40, 2)
        [found] = planner.run_all(ROWS, attempt, devices)
    assert "no second optimizer step within 1 s" in found.result.failed_at


OUT_OF_THIS_FOLDER = """
import sys
del sys.path[0]
from headway.commands.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.processes
@pytest.mark.parametrize("killed", ["the estimate", "its child"])
def test_what_is_killed_takes_the_script_with_it(killed: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    Path("folder").mkdir()
    Path("random.py").write_text("open('imported', 'w').close()")  # not to be found
    Path("folder/endless.py").write_text("import time; open('begun', 'w').close(); time.sleep(600)")
    words = ["estimate", "--devices", "24GB", "folder/endless.py"]
    command = [sys.executable, "-c", OUT_OF_THIS_FOLDER, *words]
    environ = {**ENVIRON, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: any(tmp_path.glob("headway-estimate-*/**/begun")))
        started = psutil.Process(process.pid).children(recursive=True)
        (process if killed == "the estimate" else started[0]).kill()
        _, said = process.communicate()
    assert len(started) == 2
    wait_for_end(*(process.pid for process in started))
    if killed == "the estimate":
        assert not [*tmp_path.glob("headway-estimate-*")]
    else:
        assert "error:" in said
        assert "Traceback" not in said
    assert not Path("imported").exists()


@pytest.mark.processes
@pytest.mark.usefixtures("warm")
def test_a_script_that_leaves_its_model_on_the_cpu_is_not_said_to_fit_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("torch")
    Path("script.py").write_text(TRAINING.replace("    net.cuda()\n", "    pass\n"))
    code, printed = run("estimate", "--devices", "24GB", "--strategy", "ddp", "script.py")
    assert code == 2
    assert "script.py keeps its model on the CPU" in printed
    assert "fits" not in printed
    with_gpus = load_machine(MACHINE)
    monkeypatch.setattr("headway.commands.estimate.detect_machine", lambda full: with_gpus)
    assert run("estimate", "--cpu", "--strategy", "ddp", "script.py")[0] == 0
