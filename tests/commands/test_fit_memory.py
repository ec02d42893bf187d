"""`headway launch --fit-memory`: which strategy it takes, and what it refuses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.commands.running import run
from tests.commands.test_estimate import MACHINES

SCRIPT = """
import torch
from headway import Accelerator
accelerator = Accelerator()
width = {width}
net = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(8)])
optimizer = torch.optim.AdamW(net.parameters())
net, optimizer = accelerator.prepare(net, optimizer)
for _ in range(2):
    accelerator.backward(net(torch.ones(4, width, device=accelerator.device)).sum())
    optimizer.step()
"""
ON = ("--machine", str(MACHINES / "gpu_8_h100.json"), "--dry-run", "--fit-memory")


@pytest.mark.processes
@pytest.mark.wording
def test_the_cheapest_strategy_that_fits_is_taken_and_named() -> None:
    pytest.importorskip("torch")
    Path("small.py").write_text(SCRIPT.format(width=100))
    code, printed = run("launch", *ON, "small.py")
    assert code == 0, printed
    assert "--fit-memory: ddp takes" in printed
    Path("large.py").write_text(SCRIPT.format(width=25_000))  # 20 GB of weights
    code, printed = run("launch", *ON, "large.py")
    assert code == 0, printed
    assert "--fit-memory: fsdp takes" in printed
    assert re.search(r"strategy +fsdp +flag --fit-memory", printed), printed
    code, printed = run("launch", *ON, "--strategy", "ddp", "large.py")
    assert (code, "no strategy fits 80.00 GiB on each rank: ddp " in printed) == (2, True), printed


def test_what_cannot_be_estimated_is_refused() -> None:
    Path("script.py").write_text("raise SystemExit('was run')")
    for words in (["--strategy", "hsdp", "--shard-size", "2", "script.py"], ["--no-python", "ls"]):
        code, printed = run("launch", *ON, *words)
        assert (code, "whose memory is not estimated" in printed) == (2, True), printed
        assert "was run" not in printed
