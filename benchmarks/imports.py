"""What `from headway import Accelerator` and `Accelerator()` cost beyond `import torch`.

    python benchmarks/imports.py                       # 30 runs of each, alternating
    python benchmarks/imports.py --json result.json

Each run is a fresh interpreter. Its CPU time (user and system) is counted, so that other programs
on the machine matter less. Printed are the medians and their ratios to `import torch`, beside those
of Accelerate where it is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PROGRAMS = {
    "import torch": "import torch",
    "headway": "from headway import Accelerator; Accelerator(cpu=True)",
    "accelerate": "from accelerate import Accelerator; Accelerator(cpu=True)",
}
COUNT_CPU_TIME = "\nimport os; times = os.times(); print(times.user + times.system)"
SETTINGS = ("HEADWAY_", "ACCELERATE_", "PET_")


def cpu_seconds(program: str) -> float:
    """Return the CPU time that a fresh interpreter takes for a program."""
    environ = {name: text for name, text in os.environ.items() if not name.startswith(SETTINGS)}
    command = [sys.executable, "-c", program + COUNT_CPU_TIME]
    done = subprocess.run(
        command,
        env={**environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return float(done.stdout.splitlines()[-1])


def installed() -> list[str]:
    """Leave out Accelerate where it is not there, and say so."""
    try:
        version("accelerate")
    except PackageNotFoundError:
        print("accelerate: not installed, left out", file=sys.stderr)
        return [name for name in PROGRAMS if name != "accelerate"]
    return list(PROGRAMS)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=30, help="runs of each (default 30)")
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    options = parser.parse_args()
    names = installed()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for repetition in range(options.repeat + 1):
        for name in names:
            taken = cpu_seconds(PROGRAMS[name])
            if repetition:  # the first round warms the caches
                seconds[name].append(taken)
    medians = {name: statistics.median(runs) for name, runs in seconds.items()}
    print(f"Python {platform.python_version()}, {options.repeat} runs of each")
    print(f"\n{'a fresh interpreter':<22}{'CPU time':>10}{'/ import torch':>17}")
    for name, median in medians.items():
        print(f"{name:<22}{median:>8.3f} s{median / medians['import torch']:>17.3f}")
    if options.json:
        Path(options.json).write_text(json.dumps(medians, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
