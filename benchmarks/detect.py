"""What it costs to find out what this machine is.

    python benchmarks/detect.py                  # a table, 15 repetitions
    python benchmarks/detect.py --json result.json

Each repetition is a fresh interpreter, so that imports count; the contenders alternate, so that a
noisy moment falls on all of them. Times are of the call and the imports that it needs, without the
interpreter's own start.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

_IMPORT = "from headway.machine.detection import detect_machine"
CONTENDERS = {
    "what a launch needs": f"{_IMPORT}; detect_machine()",
    "the full snapshot": f"{_IMPORT}; detect_machine(full=True)",
    "import torch; torch.cuda.is_available()": "import torch; torch.cuda.is_available()",
}
TIMED = """\
import time
began = time.perf_counter()
{code}
print((time.perf_counter() - began) * 1000)
"""


def measure(code: str) -> float:
    """Return how many milliseconds `code` takes in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", TIMED.format(code=code)], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--json", help="also write all measurements to this file")
    options = parser.parse_args()
    times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for repetition in range(options.repetitions + 1):
        for name, code in CONTENDERS.items():
            milliseconds = measure(code)
            if repetition:  # the first round warms the disk's cache up
                times[name].append(milliseconds)
    print(f"{'detection':<42}{'median':>10}{'fastest':>10}")
    for name, taken in times.items():
        print(f"{name:<42}{statistics.median(taken):>7.1f} ms{min(taken):>7.1f} ms")
    if options.json:
        Path(options.json).write_text(json.dumps(times, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
