"""A run with restarts left goes on, whatever failed: the script, or what starts its ranks."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import psutil
import pytest

from headway.commands.runs import restarts
from headway.history.record import find
from tests.distributed.families import survivors
from tests.distributed.launching import executed, launch, on_linux, script, start
from tests.waiting import wait_for_lines, wait_until

pytestmark = on_linux

NO_DELAY = ["--set", "restart_delay=0"]


def test_the_same_exception_each_time_is_tried_as_often_as_was_asked_for() -> None:
    name = script("print('tried')\nraise ValueError('always')")
    done = launch("-q", "--cpu", "--supervise", "--max-restarts", "3", *NO_DELAY, name)
    assert done.stdout.count("tried") == 4
    assert "rank 0 failed with ValueError; restart 3 of 3" in done.stderr
    assert done.returncode == 1


@pytest.mark.parametrize(
    ("number", "code", "by"),
    [
        (signal.SIGTERM, 143, "stopped by SIGTERM"),
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGUSR1, 138, "stopped by SIGUSR1"),
    ],
)
def test_a_stop_signal_during_the_delay_of_a_restart_ends_the_run(
    number: int, code: int, by: str
) -> None:
    words = ["--supervise", "--max-restarts", "1", "--set", "restart_delay=60"]
    process = start("-q", "--cpu", *words, script("print('tried')\nraise SystemExit(7)"))
    wait_for_lines(process, "restart 1 of 1 in 60 s")
    process.send_signal(number)
    out, errors = process.communicate(timeout=50)  # before the delay is over
    assert (out, process.returncode) == ("tried\n", code)
    assert f"headway: {by} before restart 1 of 1; rank 0 exited with code 7\n" in errors


def test_a_rank_that_a_forwarded_signal_ends_is_not_restarted_and_the_report_says_so() -> None:
    name = script("import time\nprint('tried', flush=True)\ntime.sleep(300)")
    process = start("-q", "--cpu", "--supervise", "--max-restarts", "3", *NO_DELAY, name)
    assert next(iter(process.stdout or ())) == "tried\n"
    process.send_signal(signal.SIGUSR1)
    out, errors = process.communicate(timeout=50)
    assert (out, process.returncode) == ("", 138)
    assert "rank 0 was killed by SIGUSR1" in errors
    assert "fix:  the launcher received SIGUSR1 and forwarded it to the ranks" in errors


KILLING = """
import os, signal, sys, time
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["RANK"] == "1":
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(300)
print("done")
"""


def test_a_fork_server_that_was_killed_is_started_again_where_restarts_are_left() -> None:
    words = ["-q", "--cpu", "--num-processes", "2", *NO_DELAY]
    done = launch(*words, "--max-restarts", "1", script(KILLING))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == 2
    assert "the launcher's fork server was killed by SIGKILL; restart 1 of 1" in done.stderr


PRELOADED = """
import os, sys, time
import psutil
import torch
found = [f"torch.{name}" in sys.modules for name in ("distributed.checkpoint", "_dynamo")]
added = "TORCHINDUCTOR_CACHE_DIR" in os.environ  # by the import
if os.environ["RANK"] in sys.argv[1:]:
    os.environ["CHANGED"] = "1"
torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    server, until = psutil.Process(os.getppid()), time.monotonic() + 60
    before = server.memory_info().rss
    while server.memory_info().rss < before + 2**22 and time.monotonic() < until:
        time.sleep(0.1)
    raise SystemExit(1)
print(found, added)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("changing", "has_compiler"), [((), True), (("0", "1"), False), (("1",), False)]
)
def test_readers_of_checkpoints_and_the_compiler_are_imported_while_the_ranks_train(
    changing: tuple[str, ...], has_compiler: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    words = ["-q", "--cpu", "--num-processes", "2", "--max-restarts", "1"]
    with executed():
        done = launch(*words, script(PRELOADED), *changing)
    for folder in Path(tempfile.gettempdir()).glob("torchinductor_*"):
        shutil.rmtree(folder)  # torch has created it
    assert done.stdout.count(f"[True, {has_compiler}] False") == 2, done.stderr


def kill_the_server_at_once(process: subprocess.Popen[str]) -> None:
    """Kill the fork server before it has started a rank."""
    servers: list[psutil.Process] = []

    def has_server() -> bool:
        children = psutil.Process(process.pid).children()
        guardians = [child for child in children if "guardian of" in " ".join(child.cmdline())]
        servers[:] = [child for guardian in guardians for child in guardian.children()]
        return bool(servers)

    wait_until(has_server, process, every_s=0)
    servers[0].kill()


@pytest.mark.parametrize(
    ("restarts", "code"), [pytest.param("0", 137, marks=pytest.mark.long), ("1", 0)]
)
def test_a_fork_server_that_was_killed_before_it_started_a_rank_counts_too(
    restarts: str, code: int
) -> None:
    words = ["-q", "--cpu", "--num-processes", "2", "--max-restarts", restarts, *NO_DELAY]
    process = start(*words, script("print('done')"))
    kill_the_server_at_once(process)
    out, errors = process.communicate(timeout=120)
    assert process.returncode == code, errors
    expected = {"[0] done", "[1] done"} if restarts == "1" else set()
    assert expected <= {*out.splitlines()}  # the server may have started a rank before
    assert "the launcher's fork server was killed by SIGKILL" in errors
    assert not survivors()


TRAINING = """
import os, sys
import torch
from torch.utils.data import DataLoader
from headway import Accelerator
how = sys.argv[1]
accelerator = Accelerator(cpu=True, project_dir="project")
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(torch.ones(40, 1)))
step = accelerator.resume().step
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
fails_at = {"hopeless": 5, "forward": 3 + attempt}[how]
print("tried", accelerator.process_index)
if how == "forward" and attempt < 2 and accelerator.is_main_process:
    raise ConnectionRefusedError("not yet")
for batch in loader:
    optimizer.zero_grad()
    accelerator.backward(model(batch).sum())
    optimizer.step()
    step += 1
    if step == fails_at and accelerator.process_index == 1:
        raise ValueError("boom")
    accelerator.checkpoint(every=1)
"""


def train(how: str, max_restarts: int, *words: str) -> subprocess.CompletedProcess[str]:
    restarts = ["--max-restarts", str(max_restarts), *NO_DELAY]
    return launch("-q", "--cpu", "--num-processes", "2", *restarts, *words, script(TRAINING), how)


def test_a_failure_that_is_the_one_before_it_again_ends_the_run_and_the_next_one_at_once() -> None:
    done = train("hopeless", 2)
    assert (done.returncode, done.stdout.count("tried 0")) == (76, 2), done.stderr
    assert re.search("^error: .{,80}; repeated failure$", done.stderr, re.MULTILINE)
    *_, cause = (line for line in done.stderr.splitlines() if "exit code 76" in line)
    assert cause.startswith("  exit code 76, not the rank's own 1: ValueError at ")
    end = "as in the previous failure, with no new step in between; 1 of 2 restarts used"
    assert cause.endswith(f"after step 5, {end}")
    assert restarts(find(None)) == [
        "1 of 2 restarts used",
        "rank 1 of 2 failed with ValueError at step 5",
    ]
    assert "--restart-anyway restarts the ranks regardless" in done.stderr
    again = train("hopeless", 2)
    assert (again.returncode, again.stdout.count("tried 0")) == (76, 1), again.stderr
    anyway = train("hopeless", 2, "--restart-anyway")
    assert (anyway.returncode, anyway.stdout.count("tried 0")) == (1, 3), anyway.stderr


def test_refused_connections_and_failures_with_progress_between_them_use_all_restarts() -> None:
    done = train("forward", 4)
    assert (done.returncode, done.stdout.count("tried 0")) == (1, 5), done.stderr


KNOWN = """
import os, time
import torch
from torch.utils.data import DataLoader, Dataset
from headway import Accelerator
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
class Slow(Dataset):
    def __len__(self):
        return 20
    def __getitem__(self, index):
        time.sleep(0.1)
        return torch.ones(1)
accelerator = Accelerator(cpu=True, project_dir="project")
accelerator.register_save_state_pre_hook(lambda *_: time.sleep(0.8))
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Slow()))
if attempt:
    accelerator.load_state("saved")
for step, batch in enumerate(loader, 7 if attempt else 1):
    accelerator.backward(model(batch).sum())
    time.sleep(0.2)
    optimizer.step()
    with open(f"ends-{attempt}", "a") as ends:
        print(time.time(), file=ends)
    if step == 6:
        accelerator.save_state("saved")
    if step == 10 and not attempt:
        raise ValueError("boom")
accelerator.save_state("end")
"""


def test_the_shares_of_the_wall_time_are_those_of_known_sleeps_and_a_restart_says_its_cost() -> (
    None
):
    done = launch("--cpu", "--supervise", "--max-restarts", "1", *NO_DELAY, script(KNOWN))
    assert done.returncode == 0, done.stderr
    (cost,) = re.findall(r"restart 1 of 1: (.*) s to step 11, 4 steps repeated", done.stderr)
    record = find(None)
    assert record.shares is not None
    assert record.end is not None
    wall_s = record.end.time - record.start.began_at
    before, after = ([*map(float, Path(f"ends-{n}").read_text().split())] for n in (0, 1))
    known = {"start": before[0] - record.start.began_at, "recovery": after[0] - before[-1]}
    known |= {"repeated steps": after[3] - after[0], "saving": 2 * 0.8}
    known |= {"training": 19 * 0.2, "waiting for data": 19 * 0.1}  # 2 to 10 and 11 to 20
    assert sum(record.shares.values()) == pytest.approx(1)
    for name, seconds in known.items():
        near = pytest.approx(seconds / wall_s, abs=0.02 + 0.3 / wall_s)  # a report may come late
        assert record.shares[name] == near, name
    assert float(cost) == pytest.approx(after[4] - before[-1], abs=1)


VICTIMS = """
import os, signal, sys, time
from pathlib import Path
import torch
from headway import Accelerator
FAILS = 3
rank, is_saving = int(os.environ["RANK"]), len(sys.argv) > 1
if rank == 1:
    signal.signal(signal.SIGTERM, lambda *_: print("told", flush=True))
accelerator = Accelerator(cpu=True, project_dir="project")
accelerator.resume()
accelerator.checkpoint()
if rank == 2:
    signal.signal(signal.SIGTERM, lambda *_: print("told", flush=True))
def wait(*_):
    if rank != FAILS:
        Path(f"waits_{rank}").touch()
        time.sleep(300)
    while len([*Path().glob("waits_?")]) < FAILS:
        time.sleep(0.01)
    os._exit(3)
if is_saving:
    accelerator.register_save_state_pre_hook(wait)
    accelerator.checkpoint()
wait()
"""


@pytest.mark.parametrize(("words", "awaited"), [([], "ranks 1-2"), (["saving"], "ranks 0-2")])
def test_a_rank_that_has_nothing_to_do_after_anothers_failure_is_killed_at_once(
    words: list[str], awaited: str
) -> None:
    """Ranks 1 and 2 have a handler of their own, from before and after that of checkpoint()."""
    done = launch("-q", "--cpu", "--num-processes", "4", script(VICTIMS), *words)
    assert "rank 3 of 4 exited with code 3" in done.stderr
    assert f"{awaited} were killed because they had not stopped after 5 s" in done.stderr
    assert sorted(done.stdout.splitlines()) == ["[1] told", "[2] told"]
