"""Scripts for Accelerate beside themselves with only their imports changed: the same results?

    python benchmarks/moves.py                          # all of tests/migration/scripts
    python benchmarks/moves.py --ranks 1 SCRIPT...      # some, at 1 rank only
    python benchmarks/moves.py --markdown               # the table of docs/reference/accelerate.md

Each script prints one JSON object. `headway adopt --write` changes its imports, once as it is and
once with `--compat`. All run on the CPU, with the variables of torchrun, in forked processes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import multiprocessing
import os
import runpy
import shutil
import socket
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from headway.commands.adopt import main as adopt
from headway.commands.tables import print_table

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "tests" / "migration" / "scripts"
VARIANTS = {"accelerate": None, "headway": ["--write"], "compat": ["--write", "--compat"]}
"""Folder of the scripts -> the words of `headway adopt` that changed them."""
PRELOADED = (
    *("torch", "torch._dynamo", "torch.nn.parallel.distributed", "transformers"),
    *("accelerate", "headway.accelerator", "headway.compat.accelerator"),
)
_ORDER = "a shuffled loader has another order"
WHY = {
    "batch_size_finder": "the batch size is halved; Accelerate multiplies it by 0.9",
    "bf16_autocast": _ORDER,
    "language_model": _ORDER,
    "logger_and_state": "a PartialState() created first connects the ranks; on CPUs, Accelerate's"
    " needs cpu=True for that, otherwise each rank trains alone",
    "resumed_epoch": _ORDER,
    "seedable_sampler": f"{_ORDER}, in all epochs",
    "stream": "the last round is divided evenly",
    "transformers_classifier": f"{_ORDER}; the schedule is in optimizer steps",
    "uneven_metric": _ORDER,
    "uneven_training": f"{_ORDER}; the last round is divided evenly",
    "warmup_schedule": f"{_ORDER}; the schedule is in optimizer steps",
}
"""Script -> why `headway.Accelerator` gives other numbers."""
ALSO_WITH_COMPAT = {"logger_and_state"}
"""Scripts for which `headway.compat` gives other numbers for the same reason."""
TOLERANCE = 1e-6
LIMIT_S = 120


class Move(NamedTuple):
    """One script at one number of ranks.

    Args:
        script: its name.
        ranks: the number of processes.
        headway: the largest difference between numbers, or what is different.
        compat: the same with `--compat`.
    """

    script: str
    ranks: int
    headway: float | str
    compat: float | str

    def said(self, found: float | str) -> str:
        return found if isinstance(found, str) else "same" if found <= TOLERANCE else f"{found:.1g}"


def moves(scripts: Sequence[Path], ranks: Sequence[int]) -> Iterator[Move]:
    """Run scripts under Accelerate and under Headway, and compare what they print."""
    with tempfile.TemporaryDirectory() as folder:
        for variant, words in VARIANTS.items():
            (Path(folder) / variant).mkdir()
            for script in scripts:
                shutil.copy(script, Path(folder) / variant)
            if words is not None:
                with contextlib.redirect_stdout(io.StringIO()):
                    adopt([*words, str(Path(folder) / variant)])
        for script in scripts:
            for number in ranks:
                printed = {
                    variant: printed_by(Path(folder) / variant / script.name, number)
                    for variant in VARIANTS
                }
                expected = printed.pop("accelerate")
                yield Move(
                    script.stem,
                    number,
                    *(difference(expected, found) for found in printed.values()),
                )


def printed_by(script: Path, ranks: int) -> Any:
    """Return the JSON object that a script prints; the traceback if it fails."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    queue = context.SimpleQueue()
    variables = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    processes = []
    for rank in range(ranks):
        own = {"RANK": rank, "LOCAL_RANK": rank} if ranks > 1 else {}
        own |= variables if ranks > 1 else {}
        processes.append(context.Process(target=_run, args=(str(script), own, queue)))
        processes[-1].start()
    for process in processes:
        process.join(LIMIT_S)
    for process in processes:
        process.kill()
    found = []
    while not queue.empty():
        found.append(queue.get())
    failed = [item for item in found if isinstance(item, str)]
    if failed or not any(found):
        return failed[0] if failed else "nothing printed"
    return next(item for item in found if item)


def _run(script: str, variables: dict[str, Any], queue: Any) -> None:
    os.environ.update({name: str(value) for name, value in variables.items()})
    os.environ |= {"ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    sys.argv = [script]
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(script, run_name="__main__")
    except BaseException:
        queue.put(traceback.format_exc())
        raise
    objects = [line for line in printed.getvalue().splitlines() if line.startswith("{")]
    queue.put(json.loads(objects[-1]) if objects else None)


def difference(expected: Any, found: Any) -> float | str:
    """Return the largest difference between the numbers in two objects, or what else differs."""
    if isinstance(expected, str) and expected.startswith("Traceback"):
        return "fails under Accelerate"
    if isinstance(found, str) and found.startswith("Traceback"):
        return f"fails: {found.strip().splitlines()[-1]}"
    parts = list(_differences(expected, found, ""))
    texts = [part for part in parts if isinstance(part, str)]
    return (
        texts[0]
        if texts
        else max((part for part in parts if not isinstance(part, str)), default=0.0)
    )


def _differences(expected: Any, found: Any, path: str) -> Iterator[float | str]:
    if isinstance(expected, dict) and isinstance(found, dict) and expected.keys() == found.keys():
        for key in expected:
            yield from _differences(expected[key], found[key], f"{path}.{key}")
    elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        for index, pair in enumerate(zip(expected, found, strict=True)):
            yield from _differences(*pair, f"{path}[{index}]")
    elif type(expected) is float and type(found) is float and not math.isnan(expected - found):
        yield abs(expected - found)
    elif expected != found and not (_is_nan(expected) and _is_nan(found)):
        yield f"other {path.lstrip('.')}"


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("scripts", nargs="*", type=Path, metavar="SCRIPT")
    parser.add_argument("--ranks", type=int, action="append", help="1 and 2 if not given")
    parser.add_argument("--markdown", action="store_true", help="print the table of the docs")
    parser.add_argument("--json", action="store_true", help="print the differences as JSON")
    parsed = parser.parse_args()
    scripts = parsed.scripts or sorted(SCRIPTS.glob("*.py"))
    rows, found = [], []
    for move in moves(scripts, parsed.ranks or [1, 2]):
        found.append(move._asdict())
        native, compat = move.said(move.headway), move.said(move.compat)
        why = "" if native == "same" else WHY.get(move.script, "")
        rows.append((move.script, str(move.ranks), native, compat, why))
        print(*rows[-1], sep="  ", file=sys.stderr, flush=True)
    head = ("script", "ranks", "`headway`", "`headway.compat`", "why")
    if parsed.json:
        print(json.dumps(found))
    elif parsed.markdown:
        for row in (head, ("---",) * len(head), *rows):
            print(f"| {' | '.join(row)} |")
    else:
        print_table(head, rows)


if __name__ == "__main__":
    main()
