"""What is said and kept of a run that failed holds no secret of the profile's `env`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launching import launch, on_linux, script

pytestmark = on_linux

SECRET = "hf_Sq9"
FAILING = """
import os, signal, sys, time
token = os.environ["HF_TOKEN"]
assert len(token) == 6
def train(token):
    if os.environ["RANK"] == "0":
        {end}
    time.sleep(1000)
train(token)
"""
ENDS = {  # how a rank fails, further flags, and the exit code of the run
    "exception": ("raise ValueError('boom')", ("--max-restarts", "1"), 1),
    "signal": ("os.kill(os.getpid(), signal.SIGKILL)", (), 137),
    "hang": ("pass", ("--hang-timeout", "3"), 124),
}


@pytest.mark.parametrize("end", ENDS)
def test_the_report_and_the_logs_of_a_failed_run_hold_no_secret(end: str) -> None:
    text, words, code = ENDS[end]
    Path("headway.yaml").write_text(
        f"env: {{HF_TOKEN: {SECRET}, HTTPS_PROXY: 'http://jane:{SECRET}@proxy:80'}}\n"
        "num_processes: 2\nlog_dir: logs\nrestart_delay: 0\n"
    )
    done = launch("--cpu", *words, script(FAILING.format(end=text)), code=code)
    kept = {path.name: path.read_text() for path in Path("logs").glob("*/*")}
    assert "rank_0_attempt_0.log" in kept
    for shown in (done.stdout, done.stderr, *kept.values()):
        assert SECRET not in shown
