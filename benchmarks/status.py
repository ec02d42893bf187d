"""What it costs a step that a run can be seen: with the figures of its steps, and without.

    python benchmarks/status.py                       # one process, and DDP on two ranks
    python benchmarks/status.py --pairs 40            # narrower intervals
    python benchmarks/status.py --launches 20         # and what it costs to start one process

The tiny step of `step.py`. Processes with and without take turns, since Python would keep what it
has learned of one kind of clock from helping the other in the same process. Of each, that block
counts which a tenth of the blocks are faster than, and the ratios of pairs are compared. "off" is
the same runtime with a clock that nobody reads. "on" sends records as under a launcher, or writes
them to the file of a process without one.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from step import RANKS, REBUILT_EVERY, Case, headway, interval

from headway.ipc.progress import process_progress

STEP = Case("a step")


def measure(kind: str, blocks: int, steps: int) -> float:
    """Return the seconds that a step takes in this process, with figures on or off."""
    if hasattr(os, "sched_setaffinity"):  # not on a Mac
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(os.environ.get("RANK", "0")) % len(cores)]})
    torch.set_num_threads(1)
    progress = process_progress()
    if not progress.is_connected:
        progress.report_to(lambda _: None)  # now: it begins the clock
    progress.is_watched = kind == "on"
    now = time.perf_counter if dist.is_initialized() else time.process_time
    seconds = []
    for block in range(blocks):
        if block % REBUILT_EVERY == 0:  # where objects lie in memory is worth some percent
            loop = headway(STEP, steps)
            gc.collect()
            loop()
        if dist.is_initialized():
            dist.barrier()
        began = now()
        loop()
        seconds.append((now() - began) / steps)
    return statistics.quantiles(seconds, n=10)[0]  # when other programs leave it alone


def compare(title: str, num_processes: int, options: argparse.Namespace) -> dict[str, float | str]:
    """Return the ratio of a step with figures to one without, and its interval."""
    seconds: dict[str, list[float]] = {"on": [], "off": []}
    launch = [sys.executable, "-m", "headway", "launch", "--quiet", "--cpu"]
    ranks = ["--num-processes", str(num_processes), "--ranks", "0", "--output", "raw"]
    sizes = ["--blocks", str(options.blocks), "--steps", str(options.steps)]
    for pair in range(options.pairs):
        for kind in sorted(seconds, reverse=pair % 2 == 0):
            command = [*launch, *ranks, __file__, "--kind", kind, *sizes]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            seconds[kind].append(float(done.stdout.split()[-1]))
    low, high = interval(seconds["on"], seconds["off"])
    step_s = statistics.median(seconds["on"])
    ratio = step_s / statistics.median(seconds["off"])
    print(f"{title:<16}{step_s * 1e6:>8.0f} us{ratio:>9.4f}{low:>10.4f} -{high:>7.4f}", flush=True)
    return {"case": title, "step_s": step_s, "ratio": ratio, "low": low, "high": high}


def measure_launch(times: int) -> float:
    """Return the median seconds from `headway launch` of one process to its first line."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.write_text("import time; print(time.time())")
        command = [sys.executable, "-m", "headway", "launch", "--cpu", "--quiet", str(script)]
        taken = []
        for _ in range(times):
            began = time.time()
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            taken.append(float(done.stdout) - began)
    print(f"launch of one process to its first line: {statistics.median(taken) * 1e3:.1f} ms")
    return statistics.median(taken)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=10, help="processes of each (default 10)")
    parser.add_argument("--blocks", type=int, default=40, help="blocks in each (default 40)")
    parser.add_argument("--steps", type=int, default=60, help="steps in a block (default 60)")
    parser.add_argument("--launches", type=int, default=0, help="launches to time (default 0)")
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    parser.add_argument("--kind", choices=["on", "off"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.kind:
        if int(os.environ["WORLD_SIZE"]) > 1:
            dist.init_process_group("gloo")
        print(measure(options.kind, options.blocks, options.steps))
        return 0
    print(f"{'':<16}{'a step':>11}{'on / off':>9}{'95% interval':>19}")
    rows = [compare("one process", 1, options), compare(f"DDP, {RANKS} ranks", RANKS, options)]
    if options.launches:
        rows.append({"case": "launch", "seconds": measure_launch(options.launches)})
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
