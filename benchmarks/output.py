"""How fast ranks can print into a file, beside the Unix way to add the same prefix, in one run.

    python benchmarks/output.py                       # all tables, 5 repetitions
    python benchmarks/output.py --megabytes 400       # longer ones
    python benchmarks/output.py --json result.json

A writer prints lines of one length, in blocks as a buffered stdout does, and measures how long that
took it:

    pipe      python writer | cat > file
    sed       python writer | sed 's/^/[0] /' > file
    headway   headway launch --num-processes 2 writer > file, and the second rank prints nothing

and the same with 8 writers at once (`pipe` and `sed`: into one pipe). Contenders alternate within
each repetition, after one warm-up round. The rate is that of all writers together, from the first
that begins to the last that ends; ratios are medians of those to `sed` in the same repetition. Of
`headway` every line that arrived is compared with what was written.
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
from collections import Counter
from pathlib import Path

LENGTHS = (100, 2)  # bytes of a line, with its end
MANY = 8
BLOCK = 2**13  # bytes, as Python's stdout has it
TIMEOUT_S = 600
PREFIX = "s/^/[0] /"


def write(length: int, num_bytes: int, result: Path) -> None:
    """Print lines, and note when that began and ended; ranks beyond the writers print nothing."""
    rank = int(os.environ.get("RANK", "0"))
    if rank >= int(os.environ["WRITERS"]):
        return
    block = line_of(length) * max(1, BLOCK // length)
    began = time.time()
    for _ in range(num_bytes // len(block)):
        os.write(1, block)
    Path(f"{result}.{os.getpid()}").write_text(json.dumps([began, time.time()]))


def line_of(length: int) -> bytes:
    return b"x" * (length - 1) + b"\n"


def commands(length: int, num_bytes: int, writers: int, result: Path) -> dict[str, str]:
    """Return how each contender is run by a shell."""
    words = f"{__file__} --as-writer {length} {num_bytes} {result}"
    writer = f"{sys.executable} {words}"
    if writers > 1:
        writer = f"(for i in $(seq {writers}); do {writer} & done; wait)"
    launch = f"{sys.executable} -m headway launch --quiet --cpu"
    return {
        "pipe": f"{writer} | cat",
        "sed": f"{writer} | sed '{PREFIX}'",
        "headway": f"{launch} --num-processes {max(writers, 2)} {words}",
    }


def measure(command: str, writers: int, num_bytes: int, folder: Path) -> float:
    """Return the rate, in bytes per second, at which the writers could write."""
    with open(folder / "out", "wb") as out:
        subprocess.run(
            ["bash", "-c", command],
            stdout=out,
            env={**os.environ, "WRITERS": str(writers)},
            timeout=TIMEOUT_S,
            check=True,
        )
    times = [json.loads(path.read_text()) for path in folder.glob("times.*")]
    for path in folder.glob("times.*"):
        path.unlink()
    assert len(times) == writers, f"{len(times)} of {writers} writers came to their end"
    took_s: float = max(end for _, end in times) - min(began for began, _ in times)
    return num_bytes * writers / took_s


def check_lines(path: Path, length: int, num_bytes: int, writers: int) -> int:
    """Return how many lines arrived; all must be whole, and as many of each rank as it wrote."""
    counts = Counter(path.read_bytes().splitlines(keepends=True))
    of_block = max(1, BLOCK // length)
    expected = num_bytes // (of_block * length) * of_block
    wanted = {f"[{rank}] ".encode() + line_of(length): expected for rank in range(writers)}
    assert counts == wanted, f"lines are torn or lost: {counts.most_common(20)}"
    return counts.total()


def table(length: int, writers: int, options: argparse.Namespace) -> list[dict[str, object]]:
    num_bytes = options.megabytes * 10**6 // (1 if length == max(LENGTHS) else 5) // writers
    rates: dict[str, list[float]] = {}
    lines = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        contenders = commands(length, num_bytes, writers, folder / "times")
        for repetition in range(options.repetitions + 1):
            for contender, command in contenders.items():
                rate = measure(command, writers, num_bytes, folder)
                if repetition:
                    rates.setdefault(contender, []).append(rate)
            lines = check_lines(folder / "out", length, num_bytes, writers)
    title = f"{length}-byte lines, {writers} {'rank' if writers == 1 else 'ranks at once'}"
    print(f"\n{title:<34}{'rate':>14}{'/ sed':>10}")
    rows: list[dict[str, object]] = []
    for contender, figures in rates.items():
        pairs = zip(figures, rates["sed"], strict=True)
        median, ratio = statistics.median(figures), statistics.median(a / b for a, b in pairs)
        print(f"{contender:<34}{median / 1e6:>9.1f} MB/s{ratio:>10.2f}")
        row = {"length": length, "writers": writers, "contender": contender}
        rows.append({**row, "bytes_per_s": median, "ratio": ratio})
    print(f"whole lines of headway: {lines}", flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=5, help="rounds (default 5)")
    parser.add_argument(
        "--megabytes", type=int, default=200, help="in all; a fifth for short lines (default 200)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    parser.add_argument("--as-writer", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_writer:
        length, num_bytes, result = options.as_writer
        write(int(length), int(num_bytes), Path(result))
        return 0
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores", flush=True)
    rows = [
        row
        for writers in (1, MANY)
        for length in LENGTHS
        for row in table(length, writers, options)
    ]
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
