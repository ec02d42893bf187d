"""Records of runs that never were, for tests."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from headway.contract.records import Figures
from headway.history import store
from headway.history.place import runs_folder
from headway.history.record import End, Line, Record, Row, Start, Surroundings

_counter = itertools.count()

START = Start(
    began_at=1_700_000_000.0,
    pid=1,
    host="elsewhere",
    folder="/work",
    kind="script",
    program="train.py",
    script="/work/train.py",
    arguments=("--lr", "0.1", "--data", "data"),
    command=("--cpu", "train.py", "--lr", "0.1", "--data", "data"),
    python=("/usr/bin/python3",),
    settings={"mixed_precision": "no", "num_processes": "1", "device": "cpu"},
    origins={"device": "flag --cpu"},
    environment={},
    machine={"cores": "8", "gpus": "none", "torch": "2.11.0"},
    variables={"OMP_NUM_THREADS": "4"},
    others={"DATA_SEED": "00aa"},
    num_processes=1,
    num_machines=1,
)
SURROUNDINGS = Surroundings(
    packages={"torch": "2.11.0", "numpy": "2.1.0"},
    sources={"train.py": "aa", "model.py": "bb", "conf/model.yaml": "cc"},
    text="lr = 0.1\nepochs = 3\n",
    inputs={"data": "/work/data: a folder of 4 entries, 100 bytes"},
)


def write_run(
    *lines: Line, code: int | None = 0, report: str = "", rows: Iterable[Row] = (), **start: Any
) -> Record:
    """Write the record of a run that ended, one minute after the one before it; read it back."""
    count = next(_counter)
    path = os.path.join(runs_folder(), f"20240101-{count // 60:04}{count % 60:02}-{count:06x}")
    began_at = START.began_at + 60 * count
    store.create(path)
    store.append(path, START._replace(**{"began_at": began_at, **start}))
    for line in lines or (SURROUNDINGS,):
        store.append(path, line)
    store.append(path, End(began_at + 30, code, report, 0))
    if rows := [*rows]:
        store.replace_figures(path, rows)
    return store.read_record(path)


def figures(step: int, **changed: Any) -> Figures:
    """Return what ten steps took, one second together."""
    usual = Figures(
        time=START.began_at + step,
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
    )
    return usual._replace(**changed)


def record_file(record: Record) -> Path:
    return Path(record.path) / "record.jsonl"


HERE: dict[str, Any] = {"host": socket.gethostname(), "pid": os.getpid()}
"""Of a run that goes on in this process."""
