"""Records of runs that never were, for tests."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headway.history import store
from headway.history.attempts import Attempt
from headway.history.record import RunEnd, RunRecord, StatsSeries
from headway.history.store import Commit, Launch
from headway.ipc.records import OutputPath, StepStats
from headway.ipc.typed import plain

_counter = itertools.count()

START = Launch(
    began_at=1_700_000_000.0,
    pid=1,
    host="elsewhere",
    folder="/work",
    program="train.py",
    script="/work/train.py",
    arguments=("--lr", "0.1", "--data", "data"),
    command=("--cpu", "train.py", "--lr", "0.1", "--data", "data"),
    python=("/usr/bin/python3",),
    settings={"mixed_precision": "no", "num_processes": "1", "device": "cpu", "max_restarts": "0"},
    origins={"device": "flag --cpu"},
    environment={},
    machine={"cores": "8", "gpus": "none", "torch": "2.11.0"},
    variables={"OMP_NUM_THREADS": "4"},
    num_processes=1,
    num_machines=1,
    supervised=None,
    job="",
    snapshot="",
    is_rank=False,
)
EDIT = "diff --git a/net.py b/net.py\n@@ -1 +1 @@\n-width = 8\n+width = 16\n"
COMMIT = Commit("/work", "a" * 40, EDIT)
PACKAGES = {"torch": "2.11.0", "numpy": "2.1.0"}


def write_run(
    code: int | None = 0,
    *,
    report: str = "",
    commit: Commit | None = COMMIT,
    packages: Mapping[str, str] = PACKAGES,
    kept: Sequence[OutputPath] = (),
    rows: Iterable[tuple[int, StepStats]] = (),
    tails: Mapping[int, Sequence[str]] = {},
    attempts: Sequence[Attempt] = (),
    has_ended: bool = True,
    **start: Any,
) -> RunRecord:
    """Write the record of a run that began one minute after the one before it."""
    count = next(_counter)
    letters = "".join(chr(ord("a") + int(digit)) for digit in f"{count:06}")
    name = f"20240101-{count // 60:04}{count % 60:02}-{letters}"
    began_at = START.began_at + 60 * count
    series = StatsSeries()
    for rank, row in rows:
        series.note(rank, row)
    record = RunRecord(
        path=os.path.join(store.runs_folder(), name),
        start=START._replace(**{"began_at": began_at, **start}),
        packages=packages,
        commit=commit,
        kept=tuple(kept),
        ranks=series.ranks(tails),
        attempts=tuple(attempts),
        end=RunEnd(began_at + 30, code, report) if has_ended else None,
    )
    store.write(record.path, plain(record))
    return record


def stats(step: int, **changed: Any) -> StepStats:
    """Return what ten steps took, one second together."""
    usual = StepStats(
        step=step,
        num_steps=10,
        seconds=1.0,
        data_s=0.2,
        forward_s=0.3,
        backward_s=0.4,
        sync_s=0.05,
        save_s=0.0,
        samples=320,
        rss_bytes=2**28,
        device_bytes=None,
        total=1000,
        loss=1.0 / step,
        num_workers=None,
        stolen_s=0.0,
    )
    return usual._replace(**changed)


def record_file(record: RunRecord) -> Path:
    return Path(record.path) / "run.json"


HERE: dict[str, Any] = {"host": os.uname().nodename, "pid": os.getpid()}
"""Of a run that goes on in this process."""
