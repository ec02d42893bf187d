"""Loader workers outlive a request to stop, but not their rank."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.utils.data import DataLoader, Dataset

from headway.data.loader import PreparedDataLoader
from headway.ipc import signals
from tests.data.streams import Stream

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere they end"),
]
REQUESTS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class BlocksTerm(Dataset[bool]):
    """Each sample: whether a program that the worker starts has SIGTERM blocked."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> bool:
        status = subprocess.run(
            ["cat", "/proc/self/status"], capture_output=True, text=True, check=True
        ).stdout
        (blocked,) = (int(line.split()[1], 16) for line in status.splitlines() if "SigBlk" in line)
        return bool(blocked >> (signal.SIGTERM - 1) & 1)


class Own(DataLoader[Any]):
    def __iter__(self) -> Any:
        return super().__iter__()


@pytest.fixture
def saving_rank() -> Iterator[None]:
    with signals.trapped(lambda *_: None, signal.SIGTERM):
        yield


def send(number: signal.Signals) -> None:
    """Let another process send a signal to all workers of this one."""
    pids = [str(child.pid) for child in multiprocessing.active_children()]
    assert len(pids) == 2
    subprocess.run(["kill", f"-{number.name}", *pids], check=True)


@pytest.mark.usefixtures("saving_rank")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_serve_on_after_every_request_and_end_when_their_rank_ends_them(
    method: str,
) -> None:
    options: dict[str, Any] = {"multiprocessing_context": method, "persistent_workers": True}
    loader = PreparedDataLoader(DataLoader(BlocksTerm(), num_workers=2, **options))
    for _ in range(2):
        batches = iter(loader)
        taken = [next(batches)]
        for number in REQUESTS:
            send(number)
        taken += batches
        assert len(taken) == 12
        assert not any(map(bool, taken)), "programs that a worker starts can be ended"
    workers = multiprocessing.active_children()
    with signals.trapped(signal.SIG_IGN, signal.SIGTERM):  # as at the rank's exit
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.join(30)
    assert [worker.exitcode for worker in workers] == [0, 0]


@pytest.mark.usefixtures("saving_rank")
@pytest.mark.parametrize("kind", [DataLoader, Own])
def test_the_workers_of_streams_and_of_loaders_with_an_own_iter_serve_on(kind: Any) -> None:
    called = multiprocessing.get_context("fork").SimpleQueue()
    batches = iter(
        PreparedDataLoader(kind(Stream(range(12)), num_workers=2, worker_init_fn=called.put))
    )
    taken = [next(batches)]
    send(signal.SIGTERM)
    assert len([*taken, *batches]) == 12
    assert {called.get(), called.get()} == {0, 1}, "the script's worker_init_fn is called, too"


def test_where_no_request_is_acted_on_workers_end_as_ever() -> None:
    batches = iter(PreparedDataLoader(DataLoader(Stream(range(12)), num_workers=2)))
    next(batches)
    workers = multiprocessing.active_children()
    # torch's handler raises wherever it is run, or not at all where join() was the first to know
    of_torch = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        send(signal.SIGTERM)
        for worker in workers:
            worker.join(30)
    finally:
        signal.signal(signal.SIGCHLD, of_torch)
    assert [worker.exitcode for worker in workers] == [-signal.SIGTERM, -signal.SIGTERM]


_AT_EXIT = """
import signal, sys, time
from torch.utils.data import DataLoader
from headway.ipc import signals
from headway.data.loader import PreparedDataLoader

class Slow:
    def __len__(self):
        return 8
    def __getitem__(self, index):
        time.sleep(600 * (index == 2))
        return index

signals.trap(lambda *_: None, signal.SIGTERM)
loader = PreparedDataLoader(DataLoader(Slow(), num_workers=2, persistent_workers=True))
batches = iter(loader)
print(next(batches))
sys.exit(75)
"""


def test_workers_that_are_left_at_the_exit_of_their_rank_do_not_hold_it_up() -> None:
    rank = subprocess.run(
        [sys.executable, "-c", _AT_EXIT],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (rank.returncode, rank.stderr) == (75, "")


_EARLY_ORPHANS = """
import multiprocessing, os, signal, sys, time
from pathlib import Path
from torch.utils.data import DataLoader
from headway.data.loader import PreparedDataLoader

def end_rank(worker):
    rank = multiprocessing.parent_process().pid
    Path(f"worker-{worker}.tmp").write_text(str(os.getpid()))
    os.rename(f"worker-{worker}.tmp", f"worker-{worker}")
    if worker == 1:
        while not Path("worker-0").exists():
            time.sleep(0.01)
        os.kill(rank, signal.SIGKILL)
    while os.getppid() == rank:
        time.sleep(0.01)

if __name__ == "__main__":
    loader = DataLoader(
        range(8), num_workers=2, worker_init_fn=end_rank, multiprocessing_context=sys.argv[1]
    )
    next(iter(PreparedDataLoader(loader)))
"""


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_workers_whose_rank_is_killed_while_they_begin_end_too(method: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_EARLY_ORPHANS)
    rank = subprocess.run(
        [sys.executable, str(script), method],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.DEVNULL,
        cwd=tmp_path,
    )
    assert rank.returncode == -signal.SIGKILL
    pids = [int(path.read_text()) for path in tmp_path.glob("worker-?")]
    workers = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    left = psutil.wait_procs(workers, timeout=60)[1]
    for process in left:
        process.kill()
    assert not left
