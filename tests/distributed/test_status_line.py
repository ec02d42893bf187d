"""The line below the output of a real run, on a screen, with a progress bar, pdb and a resize."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pexpect
import pyte
import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.long]

TRAINS = """
import sys, time, torch
from headway import Accelerator
accelerator = Accelerator(cpu=True)
data = torch.utils.data.TensorDataset(torch.ones(100_000, 4))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(data, batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for number, (x,) in enumerate(loader):
    time.sleep(0.02)
    accelerator.backward(model(x).mean())
    optimizer.step()
    if accelerator.is_main_process:
        print(f"\\rbar {number}", end="", file=sys.stderr, flush=True)
        if number == 500:
            print(file=sys.stderr, flush=True)
            breakpoint()
    if number == 800:
        break
accelerator.print("\\ntrained", file=sys.stderr)
"""


class Watched:
    """A run on a terminal."""

    def __init__(self, script: Path) -> None:
        self._screen = pyte.Screen(90, 12)
        self._stream = pyte.ByteStream(self._screen)
        words = ["-m", "headway", "launch", "--cpu", "--num-processes", "2", str(script)]
        self.child = pexpect.spawn(
            sys.executable,
            words,
            dimensions=(12, 90),
            env={**os.environ, "TERM": "xterm-256color"},
        )

    def lines(self) -> list[str]:
        """Return the lines that are not empty."""
        return [line.rstrip() for line in self._screen.display if line.strip()]

    def resize(self, rows: int, columns: int) -> None:
        self.child.setwinsize(rows, columns)
        self._screen.resize(rows, columns)

    def wait_until(self, is_so: Callable[[], bool], within_s: float = 60) -> None:
        deadline = time.monotonic() + within_s
        while not is_so():
            assert time.monotonic() < deadline, self.lines()
            try:
                self._stream.feed(self.child.read_nonblocking(65536, timeout=0.2))
            except pexpect.TIMEOUT:
                pass
            except pexpect.EOF:
                self.child.wait()
                assert is_so(), self.lines()[-4:]


def test_the_line_stays_below_a_bar_gives_way_to_pdb_and_is_gone_at_the_end(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINS)
    run = Watched(script)

    def ends_with(*starts: str) -> bool:
        last = run.lines()[-len(starts) :]
        return len(last) == len(starts) and all(map(str.startswith, last, starts))

    run.wait_until(lambda: ends_with("[0] bar", "step "))
    run.resize(12, 40)
    run.wait_until(lambda: ends_with("[0] bar", "step ") and len(run.lines()[-1]) < 40)
    run.resize(12, 90)
    run.wait_until(lambda: ends_with("[0] (Pdb)"))
    run.child.send("p 6 * 7\r")
    run.wait_until(lambda: ends_with("[0] (Pdb) p 6 * 7", "[0] 42", "[0] (Pdb)"))
    run.child.send("c\r")
    run.wait_until(lambda: ends_with("[0] bar", "step "))
    run.wait_until(lambda: ends_with("[0] trained") and not run.child.isalive())
    assert not any("step " in line and "bar" in line for line in run.lines())
    assert run.child.exitstatus == 0
