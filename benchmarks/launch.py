"""What a launch costs, beside the peers, in one run.

    python benchmarks/launch.py                       # both tables, 7 repetitions each
    python benchmarks/launch.py --ranks 1,2,4,8,16    # more group sizes
    python benchmarks/launch.py --json result.json

On the CPU, contenders alternating within each repetition after one warm-up round, so that a noisy
moment falls on all of them:

1. an empty script in one process, from start to end, beyond what `python script.py` takes;
2. N ranks that form a gloo group: from the start of the command to the first finished all-reduce on
   rank 0; with the memory of all ranks (PSS, so that shared pages count once; Linux only).

Profiles and variables of the person who runs this are left out. Ratios are of medians.
For honest figures install what users get, in an environment of its own:

    python -m build --wheel
    pip install dist/*.whl accelerate lightning -c constraints.txt
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

BIN = Path(sys.executable).parent
TIMEOUT_S = 300

EMPTY = "pass\n"
ALL_REDUCE = """\
import os, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == dist.get_world_size()
now = time.time()
if dist.get_rank() == 0:
    open("first_all_reduce", "w").write(str(now))
if os.path.exists("/proc/self/smaps_rollup"):
    with open("/proc/self/smaps_rollup") as file:
        pss = next(line.split()[1] for line in file if line.startswith("Pss:"))
    open(f"pss_{dist.get_rank()}", "w").write(pss)
dist.barrier()
dist.destroy_process_group()
"""

Commands = dict[str, list[str]]


def one_process() -> Commands:
    """Return how each contender runs one process; the first is what all are compared with."""
    torchrun = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "1"]
    return {
        "python": [sys.executable],
        "headway launch": [str(BIN / "headway"), "launch", "--quiet", "--cpu"],
        "accelerate launch": [str(BIN / "accelerate"), "launch", "--cpu"],
        "torchrun": torchrun,
        "fabric run": [str(BIN / "fabric"), "run", "--accelerator", "cpu"],
    }


def many_ranks(count: int) -> Commands:
    """Return how each contender runs `count` CPU ranks in one group."""
    ranks = str(count)
    accelerate = ["launch", "--multi_gpu", "--num_processes", ranks, "--mixed_precision", "no"]
    headway = ["launch", "--quiet", "--cpu", "--supervise", "--num-processes", ranks]
    commands = {
        "torchrun": [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", ranks],
        "headway launch": [str(BIN / "headway"), *headway],
    }
    if count > 1:  # a group of one it refuses to start
        # what really starts several CPU ranks; `--cpu --num_processes N` starts one
        commands["accelerate launch"] = [str(BIN / "accelerate"), *accelerate]
    return commands


def installed(commands: Commands) -> Commands:
    """Leave out the contenders that are not there, and say so."""
    if not Path(commands["headway launch"][0]).exists():
        raise SystemExit(f"headway is not installed beside {sys.executable}: see --help")
    there = {name: words for name, words in commands.items() if Path(words[0]).exists()}
    for name in commands.keys() - there.keys():
        print(f"{name}: not installed, left out")
    return there


def measure(
    commands: Commands, script: str, repeat: int, folder: Path
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return, for each contender, the seconds of each run and the ranks' PSS in MiB.

    Raises:
        subprocess.CalledProcessError: a contender failed; what it printed is shown first.
    """
    (folder / "script.py").write_text(script)
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    memory: dict[str, list[float]] = {name: [] for name in commands}
    settings = ("HEADWAY_", "ACCELERATE_", "HF_", "XDG_")
    environ = {name: text for name, text in os.environ.items() if not name.startswith(settings)}
    environ |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HOME": str(folder)}
    done_at = folder / "first_all_reduce"
    for repetition in range(repeat + 1):
        for name, words in commands.items():
            started, wall = time.perf_counter(), time.time()
            done = subprocess.run(
                [*words, "script.py"],
                cwd=folder,
                env=environ,
                timeout=TIMEOUT_S,
                capture_output=True,
            )
            elapsed = time.perf_counter() - started
            if done_at.exists():
                elapsed = float(done_at.read_text()) - wall
                done_at.unlink()
            if done.returncode:
                print(done.stderr.decode(errors="replace"), file=sys.stderr)
                done.check_returncode()
            sizes = [int(path.read_text()) / 1024 for path in folder.glob("pss_*")]
            for path in folder.glob("pss_*"):
                path.unlink()
            if repetition:  # the first round warms the caches
                seconds[name].append(elapsed)
                memory[name].append(sum(sizes))
    return seconds, memory


def table_of_one(seconds: dict[str, list[float]]) -> list[dict[str, object]]:
    medians = {name: statistics.median(runs) for name, runs in seconds.items()}
    base, ours = medians["python"], medians["headway launch"] - medians["python"]
    print(f"\n{'an empty script':<20}{'median':>10}{'added':>11}{'added / headway':>18}")
    rows: list[dict[str, object]] = []
    for name, median in medians.items():
        added = median - base
        ratio = "" if name == "python" else f"{added / ours:.1f}"
        print(f"{name:<20}{median * 1e3:>7.0f} ms{added * 1e3:>8.0f} ms{ratio:>18}")
        rows.append({"contender": name, "median_s": median, "added_s": added})
    return rows


def table_of_ranks(
    count: int, seconds: dict[str, list[float]], memory: dict[str, list[float]]
) -> list[dict[str, object]]:
    title = f"{count} ranks, all-reduce"
    print(f"\n{title:<20}{'median':>10}{'/ torchrun':>12}{'ranks PSS':>13}{'/ torchrun':>12}")
    rows: list[dict[str, object]] = []
    base = statistics.median(seconds["torchrun"])
    base_memory = statistics.median(memory["torchrun"])
    for name, runs in seconds.items():
        median, pss = statistics.median(runs), statistics.median(memory[name])
        times = f"{median:>8.2f} s{median / base:>12.2f}"
        print(f"{name:<20}{times}{pss:>9.0f} MiB{pss / (base_memory or 1):>12.2f}")
        rows.append({"contender": name, "ranks": count, "median_s": median, "pss_mib": pss})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=7, help="repetitions of each (default 7)")
    parser.add_argument("--ranks", default="1,2,4", help="group sizes (default 1,2,4)")
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    options = parser.parse_args()
    options.repeat = max(1, options.repeat)
    for name in ("headway", "torch", "accelerate", "lightning"):
        try:
            print(f"{name} {version(name)}", end=", ")
        except PackageNotFoundError:
            print(f"no {name}", end=", ")
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, {options.repeat} runs each")
    rows: list[dict[str, object]] = []
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            seconds, _ = measure(installed(one_process()), EMPTY, options.repeat, folder)
            rows += table_of_one(seconds)
            for count in map(int, options.ranks.split(",")):
                contenders = installed(many_ranks(count))
                rows += table_of_ranks(
                    count, *measure(contenders, ALL_REDUCE, options.repeat, folder)
                )
    except subprocess.SubprocessError as error:
        print(f"a contender failed: {error}", file=sys.stderr)
        return 1
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
