"""How long a training stands still to be saved, beside the peers, in one run.

    python benchmarks/checkpoint.py                    # a state of 400 MB, 7 rounds
    python benchmarks/checkpoint.py --folder /scratch  # on another disk
    python benchmarks/checkpoint.py --json result.json

A model and its AdamW, on the CPU, in one process. All contenders save and load the same tensors and
take turns, in an order that changes; what one has written is on disk before the next begins.
Printed are the medians over the rounds, and the median ratio to plain torch.distributed.checkpoint
(DCP) in the same round. `save_state(wait=False)` is measured from the second save on, as the call
returns; its writing is waited for, but not counted. torch.save and Accelerate do not wait until
their files are on disk; DCP and Headway do. Only Headway verifies when it loads.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from headway import Accelerator
from headway.checkpoint.manifest import verify

PARAMETER_BYTES = 12  # fp32, and AdamW's two averages
WIDTH = 1024
REFERENCE = "DCP"


class Contender(NamedTuple):
    """One way to save and load.

    Args:
        save: writes to a path; timed.
        load: reads it; timed.
        settle: what is left to do after a save; not timed.
        verify: looks for damage; timed.
    """

    save: Callable[[Path], object]
    load: Callable[[Path], object] | None = None
    settle: Callable[[], object] = bool
    verify: Callable[[Path], object] | None = None


def trained(megabytes: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer, whose states are this large together."""
    layers = max(megabytes * 10**6 // (PARAMETER_BYTES * WIDTH * WIDTH), 1)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def contenders(megabytes: int) -> dict[str, Contender]:
    """Return all that are installed."""
    model, optimizer = trained(megabytes)

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load_plain(path: Path) -> None:
        loaded = torch.load(path)
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])

    def load_dcp(path: Path) -> None:
        loaded = state()
        load(loaded, checkpoint_id=path)
        optimizer.load_state_dict(loaded["optimizer"])

    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model, optimizer)
    aside = Accelerator(cpu=True)
    aside.prepare(model, optimizer)
    found = {
        REFERENCE: Contender(lambda path: save(state(), checkpoint_id=path), load_dcp),
        "torch.save": Contender(lambda path: torch.save(state(), path), load_plain),
        "headway": Contender(
            lambda path: accelerator.save_state(path),
            lambda path: accelerator.load_state(path),
            verify=verify,
        ),
        "headway, wait=False": Contender(
            lambda path: aside.save_state(path, wait=False), settle=aside.wait_for_checkpoint
        ),
    }
    try:
        version("accelerate")
    except PackageNotFoundError:
        print("accelerate: not installed, left out", file=sys.stderr)
        return found
    import accelerate

    theirs = accelerate.Accelerator(cpu=True)
    theirs.prepare(model, optimizer)
    found["accelerate"] = Contender(
        lambda path: theirs.save_state(str(path)), lambda path: theirs.load_state(str(path))
    )
    return found


def seconds(action: Callable[[Path], object], path: Path) -> float:
    begin = time.perf_counter()
    action(path)
    return time.perf_counter() - begin


def flush(path: Path) -> None:
    """Wait until the files of a save are on disk, so that the next one has it to itself."""
    for file in [path, *path.rglob("*")]:
        if file.is_file():
            with open(file, "rb") as opened:
                os.fsync(opened.fileno())


def measured(ways: dict[str, Contender], folder: Path, repeat: int) -> dict[str, list[float]]:
    """Return the seconds of each round, for each contender and what it did."""
    taken: dict[str, list[float]] = {}
    names = list(ways)
    for repetition in range(repeat + 1):
        for name in names[repetition % len(names) :] + names[: repetition % len(names)]:
            way, path = ways[name], folder / "saved"
            times = {f"save: {name}": seconds(way.save, path)}
            way.settle()
            flush(path)
            if way.verify is not None:
                times[f"verify: {name}"] = seconds(way.verify, path)
            if way.load is not None:
                times[f"load: {name}"] = seconds(way.load, path)
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
            if repetition:  # the first round warms the caches
                for what, time_s in times.items():
                    taken.setdefault(what, []).append(time_s)
    return taken


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=400, help="of the state (default 400)")
    parser.add_argument("--repeat", type=int, default=7, help="rounds (default 7)")
    parser.add_argument("--folder", help="where to write (default: the folder for temporary files)")
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        taken = measured(contenders(options.megabytes), Path(folder), options.repeat)
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {options.repeat} rounds")
    print(f"\n{f'a state of {options.megabytes} MB':<30}{'median':>10}{'/ DCP':>8}")
    result = {}
    for what, runs in sorted(taken.items(), key=lambda item: item[0], reverse=True):
        kind = "load" if what.startswith("verify") else what.partition(":")[0]
        others = taken[f"{kind}: {REFERENCE}"]
        ratio = statistics.median(run / other for run, other in zip(runs, others, strict=True))
        median = statistics.median(runs)
        result[what] = {"median_s": median, "ratio": ratio}
        print(f"{what:<30}{median:>8.3f} s{ratio:>8.2f}")
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
