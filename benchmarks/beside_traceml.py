"""Four ranks, one of them slow: what TraceML and Headway say of it, and what they cost a step.

    python benchmarks/beside_traceml.py                 # 5 rounds
    python benchmarks/beside_traceml.py --rounds 20     # narrower intervals

The same training by DDP and gloo, on the CPU: "plain" under torchrun; under `traceml run`, with
the two lines that TraceML asks for; and under `headway launch`, with an Accelerator. First rank 2
sleeps 20 ms in each step, and the sentences are printed; then no rank does, all take turns, and the
median steps of each round are compared to plain's. Needs traceml-ai, which `.[dev]` has.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from step import interval
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

RANKS, SLOW_RANK, SLOW_S = 4, 2, 0.02
BATCH, WIDTH = 16, 256
PYTHON = (sys.executable, "-m")
LAUNCHES = {
    "plain": (*PYTHON, "torch.distributed.run", "--nproc-per-node", str(RANKS)),
    "traceml": (*PYTHON, "traceml_ai.launcher.cli", "run", "--nproc-per-node", str(RANKS)),
    "headway": (*PYTHON, "headway", "launch", "--cpu", "--num-processes", str(RANKS)),
}
PLACES = ("loader", "forward", "between")  # where rank 2 sleeps; between: after its optimizer step


class Data(Dataset[torch.Tensor]):
    """Samples, the first of each batch of which takes `slow_s`."""

    def __init__(self, slow_s: float) -> None:
        self._slow_s = slow_s

    def __len__(self) -> int:
        return 64 * BATCH

    def __getitem__(self, index: int) -> torch.Tensor:
        if index % BATCH == 0:
            time.sleep(self._slow_s)
        return torch.ones(WIDTH)


def train(kind: str, place: str, steps: int) -> float:
    """Train in this rank, and return the median seconds of a step."""
    slow_s = SLOW_S if int(os.environ["RANK"]) == SLOW_RANK else 0.0
    torch.set_num_threads(1)
    model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
    model.register_forward_pre_hook(lambda *_: time.sleep(slow_s * (place == "forward")))
    optimizer: Any = torch.optim.AdamW(model.parameters())
    loader: Any = DataLoader(Data(slow_s * (place == "loader")), BATCH)
    backward: Any = torch.Tensor.backward
    step_of: Any = nullcontext
    if kind == "headway":
        from headway import Accelerator

        accelerator = Accelerator()
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        backward = accelerator.backward
    else:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    if kind == "traceml":
        import traceml_ai

        traceml_ai.init(mode="auto")
        step_of = traceml_ai.trace_step
    seconds = []
    began = time.perf_counter()
    for x in batches(loader, steps):
        with step_of(model):
            backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        time.sleep(slow_s * (place == "between"))
        ended = time.perf_counter()
        seconds.append(ended - began)
        began = ended
    if kind == "headway":
        accelerator.end_training()
    else:
        dist.destroy_process_group()
    return statistics.median(seconds[steps // 4 :])


def batches(loader: Any, steps: int) -> Iterator[Any]:
    while True:
        for batch in loader:
            yield batch
            steps -= 1
            if not steps:
                return


def launch(kind: str, place: str, steps: int) -> tuple[float, str]:
    """Return the seconds that a step took, and what was said of the run."""
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_STATE_HOME": folder}
        logs = ("--logs-dir", folder, "--run-name", "run") if kind == "traceml" else ()
        words = ("--args",) if kind == "traceml" else ()
        own = ("--kind", kind, "--place", place, "--steps", str(steps), "--to", f"{folder}/step")
        command = [*LAUNCHES[kind], *logs, __file__, *words, *own]
        done = subprocess.run(command, env=environ, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
        said = [line for line in done.stderr.splitlines() if "delays all ranks" in line]
        if kind == "traceml":
            summary = json.loads(Path(folder, "run", "final_summary.json").read_text())
            told = summary["primary_diagnosis"]
            said = [f"{told['status']}: {told['summary']}"]
        return float(Path(folder, "step").read_text()), "; ".join(said) or "nothing"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="of the comparison (default 5)")
    parser.add_argument("--steps", type=int, default=400, help="of each training (default 400)")
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    for own in ("--kind", "--place", "--to"):
        parser.add_argument(own, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.kind:
        step_s = train(options.kind, options.place, options.steps)
        if os.environ["RANK"] == "0":
            Path(options.to).write_text(str(step_s))
        return 0
    if find_spec("traceml_ai") is None:
        raise SystemExit("traceml-ai is not installed: pip install 'headway[dev]'")
    rows: list[dict[str, object]] = []
    for place in PLACES:
        print(f"rank {SLOW_RANK} sleeps {SLOW_S * 1e3:.0f} ms of each step, {place}")
        for kind in ("traceml", "headway"):
            said = launch(kind, place, options.steps)[1]
            print(f"  {kind:<9}{said}", flush=True)
            rows.append({"place": place, "kind": kind, "said": said})
    seconds: dict[str, list[float]] = {kind: [] for kind in LAUNCHES}
    for number in range(options.rounds):
        for kind in sorted(LAUNCHES, reverse=number % 2 == 0):
            seconds[kind].append(launch(kind, "", options.steps)[0])
    print(f"\n{'':<9}{'a step':>11}{'/ plain':>9}{'95% interval':>19}")
    for kind, taken in seconds.items():
        step_s, (low, high) = statistics.median(taken), interval(taken, seconds["plain"])
        ratio = step_s / statistics.median(seconds["plain"])
        print(f"{kind:<9}{step_s * 1e3:>8.2f} ms{ratio:>9.3f}{low:>10.3f} -{high:>7.3f}")
        rows.append({"kind": kind, "step_s": step_s, "ratio": ratio, "low": low, "high": high})
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
