"""`headway test` really trains on the ranks of the plan, and fails where something is wrong."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from headway.commands.main import main
from headway.history.record import read_all
from tests.distributed.launching import environment, run

CHECKS = [
    *("start", "ranks", "all-reduce", "precision", "data loader"),
    *("training step", "total"),
]


def call(command: list[str]) -> int:
    done = run(command, environment(), timeout_s=120)
    print(done.stderr, file=sys.stderr)
    return done.returncode


@pytest.fixture
def forked_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["headway"])  # a worker of xdist has flags
    monkeypatch.setattr(subprocess, "call", call)


def test_the_help_has_the_flags_of_device_ranks_and_machines_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["test", "--help"])
    flags = re.findall(r"^  (--[a-z-]+)", capsys.readouterr().out, re.MULTILINE)
    assert {"--device", "--num-processes", "--num-machines"} <= {*flags}
    assert not {"--resume", "--partition", "--ranks", "--debug-rank", "--log-dir"} & {*flags}


@pytest.mark.distributed
@pytest.mark.usefixtures("forked_launch")
def test_two_ranks_exchange_sums_and_step_as_one_process_would(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADWAY_MIXED_PRECISION", "bf16")
    code = main(["test", "--cpu", "--num-processes", "2", "--json"])
    shown = capsys.readouterr()
    assert code == 0, shown.err
    assert "note:" not in shown.err
    checks = json.loads(shown.out)["checks"]
    assert [check["check"] for check in checks] == CHECKS
    assert {check["status"] for check in checks} == {"ok"}
    told = {check["check"]: check["what"] for check in checks}
    assert told["ranks"] == "ranks 0, 1 of 2"
    assert "sum correct, bus bandwidth" in told["all-reduce"]
    assert "bfloat16" in told["precision"]
    assert told["data loader"] == "25 samples, each once"
    assert read_all() == ([], [])


@pytest.mark.distributed
@pytest.mark.usefixtures("forked_launch")
def test_write_and_test_in_the_questionnaire_trains_on_the_ranks_of_the_new_profile(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("no\nwrite and test\n"))
    words = ["--profile", "two", "--set", "device=cpu", "--set", "num_processes=2"]
    assert main(["config", *words]) == 0
    shown = capsys.readouterr().out
    assert "wrote ~/.config/headway/two.yaml" in shown
    assert "ranks 0, 1 of 2" in shown


@pytest.mark.processes
@pytest.mark.usefixtures("forked_launch")
def test_one_process_is_tested_in_a_table_with_timings_and_a_refused_plan_is_as_its_launch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["test"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(CHECKS)
    assert all(line.startswith("ok ") and " s  " in line for line in lines)
    if not os.path.exists("/proc/driver/nvidia"):
        assert main(["test", "--device", "cuda", "--num-processes", "4"]) == 3
        assert "no GPU is visible" in capsys.readouterr().err


@pytest.mark.processes
def test_a_wrong_result_is_an_error_that_says_how_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (
        "import sys, headway.smoke as smoke\n"
        "row = smoke.PRECISIONS['no']\n"
        "smoke.PRECISIONS['no'] = row._replace(tolerance=-1.0)\n"
        "smoke.CHECKS['data loader'] = lambda _: smoke.Outcome(False, 'sample 3 came twice')\n"
        "smoke.main(sys.argv[1])"
    )
    checks_wrong = [sys.executable, "-c", text]
    monkeypatch.setattr(subprocess, "call", lambda command: call([*checks_wrong, command[-1]]))
    assert main(["test", "--json"]) == 1
    checks = json.loads(capsys.readouterr().out)["checks"]
    wrong = {check["check"]: check["what"] for check in checks if check["status"] == "error"}
    assert wrong.keys() == {"training step", "data loader"}
    assert "rank 0: weights differ by" in wrong["training step"]
    assert wrong["data loader"] == "rank 0: sample 3 came twice"
