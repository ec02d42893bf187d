"""The line below the output of a real run, on a screen, with a progress bar, pdb and a resize."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.terminal import Terminal

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


def test_the_line_stays_below_a_bar_gives_way_to_pdb_and_is_gone_at_the_end(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINS)
    words = ("launch", "--cpu", "--num-processes", "2", str(script))
    with Terminal(None, *words, rows=12, columns=90) as run:

        def lines() -> list[str]:
            return [line for line in run.text.splitlines() if line]

        def ends_with(*starts: str) -> bool:
            last = lines()[-len(starts) :]
            return len(last) == len(starts) and all(map(str.startswith, last, starts))

        run.wait_until(lambda: "headway: 2 ranks ready in " in run.text)
        run.wait_until(lambda: ends_with("[0] bar", "step "))
        run.resize(12, 40)
        run.wait_until(lambda: ends_with("[0] bar", "step ") and len(lines()[-1]) < 40)
        run.resize(12, 90)
        run.wait_until(lambda: ends_with("[0] (Pdb)"))
        run.press("p 6 * 7\r")
        run.wait_until(lambda: ends_with("[0] (Pdb) p 6 * 7", "[0] 42", "[0] (Pdb)"))
        run.press("c\r")
        run.wait_until(lambda: ends_with("[0] bar", "step "))
        assert run.exit_code() == 0
        assert ends_with("[0] trained")
        assert not any("step " in line and "bar" in line for line in lines())
