"""What comes at an unlucky moment, while processes start and end, is neither lost nor misread."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from headway.history.record import read_all
from headway.launcher.diagnosis.watch import Watch
from tests.distributed.launching import (
    HEADWAY,
    environment,
    finished,
    launch,
    on_linux,
    run,
    script,
    start,
    wait_for_end,
)
from tests.waiting import wait_for_lines, wait_until

pytestmark = on_linux


def run_python(text: str) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, script(text, "python.py")], environment())


def _catches_quit(pid: int) -> bool:
    rows = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(rows["SigCgt"], 16) >> (signal.SIGQUIT - 1) & 1)


def test_a_launcher_that_is_asked_for_stacks_all_the_time_starts_all_the_same() -> None:
    process = start("-q", "--cpu", "--num-processes", "2", script("print('done')"))
    wait_until(lambda: _catches_quit(process.pid), process, every_s=0)
    asked = 0
    while process.poll() is None:
        process.send_signal(signal.SIGQUIT)
        asked += 1
        time.sleep(0.02)
    out, errors = process.communicate()
    assert process.returncode == 0, errors
    assert out.count("done") == 2
    assert asked > 5


STUCK_AT_EXIT = """
import atexit, os, time
if os.environ["RANK"] == "1":
    atexit.register(time.sleep, 300)
    raise ValueError("boom")
time.sleep(300)  # as in a collective
"""


def test_a_rank_that_fails_and_hangs_in_its_exit_does_not_hold_the_run_up() -> None:
    words = ["-q", "--cpu", "--num-processes", "2", "--grace-period-s", "1"]
    done = launch(*words, script(STUCK_AT_EXIT), code=1)
    assert "rank 1 failed, but did not exit within 1 s" in done.stderr
    assert "error: rank 1 of 2 failed with ValueError; rank 0 stopped after" in done.stderr


IN_AN_IMPORT = """
import os, signal
from types import SimpleNamespace
from headway.launcher.run import exit_on_stop_signals
with exit_on_stop_signals(SimpleNamespace(close=lambda: print("closed", flush=True))):
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # as the C code of numpy and torch does
        pass
    print("swallowed", flush=True)
"""


IN_AN_IMPORT_OF_OURS = """
import sys
class Finder:
    def find_spec(self, name, *_):
        if name == "headway.commands.main":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Finder())
sys.modules.pop("headway.commands.main", None)
from headway.__main__ import run
run()
"""
STOPPED_IN_IT = IN_AN_IMPORT_OF_OURS.replace("raise KeyboardInterrupt", "signal.raise_signal(15)")
WHILE_A_TOOL_RUNS = """
from headway.commands import main
from headway.machine.source import Source
import os, signal, subprocess
class Popen(subprocess.Popen):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        with open("tool.pid", "w") as file:
            file.write(str(self.pid))
        os.kill(os.getpid(), signal.SIGTERM)  # the caller does not have this object yet
subprocess.Popen = Popen
main._dispatch = lambda _: Source().output_of(["sleep", "300"])
from headway.__main__ import run
run()
"""


@pytest.mark.parametrize(
    ("text", "number", "out"),
    [
        (IN_AN_IMPORT, signal.SIGINT, "closed\n"),
        (IN_AN_IMPORT.replace("SIGINT", "SIGHUP"), signal.SIGHUP, "closed\n"),
        (IN_AN_IMPORT_OF_OURS, signal.SIGINT, ""),
        ("import signal" + STOPPED_IN_IT, signal.SIGTERM, ""),
        ("import signal" + STOPPED_IN_IT.replace("15", "1"), signal.SIGHUP, ""),
        (WHILE_A_TOOL_RUNS.replace("SIGTERM", "SIGHUP"), signal.SIGHUP, ""),
        (WHILE_A_TOOL_RUNS, signal.SIGTERM, ""),
    ],
)
def test_a_stop_signal_before_ranks_start_is_one_line_and_leaves_no_process(
    text: str, number: signal.Signals, out: str
) -> None:
    done = run_python(text)
    line = "interrupted" if number == signal.SIGINT else f"stopped by {number.name}"
    assert (done.returncode, done.stdout) == (128 + number, out)
    assert done.stderr == f"headway: {line}\n"
    wait_for_end(*(int(path.read_text()) for path in Path.cwd().glob("tool.pid")))


SLOW_TORCH = """
import os, sys, time
open(f"importing_{os.getpid()}", "w").close()
if "SLOW" in os.environ:
    time.sleep(1000)
sys.path.remove(os.path.abspath("slow"))
del sys.modules["torch"]
import torch
"""


@pytest.mark.parametrize(
    ("moment", "number", "said"),
    [
        ("both import torch", signal.SIGTERM, "stopped by SIGTERM"),
        ("the fork server imports torch", signal.SIGINT, "interrupted"),
    ],
)
def test_a_stop_signal_amid_an_import_of_torch_ends_launcher_and_fork_server_at_once(
    moment: str, number: signal.Signals, said: str
) -> None:
    Path("slow/torch").mkdir(parents=True)
    Path("slow/torch/__init__.py").write_text(SLOW_TORCH)
    is_both = moment == "both import torch"
    words = ["--cpu", "--num-processes", "2", "--grace-period-s", "300"]
    process = subprocess.Popen(
        [*HEADWAY, *words, "--env", "SLOW=1", script("")],
        env=environment(**({"SLOW": "1"} if is_both else {}))
        | {"PYTHONPATH": os.pathsep.join([os.path.abspath("slow"), *filter(None, sys.path)])},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    awaited = "the import of torch" if is_both else "the launcher's fork server"
    wait_for_lines(process, awaited)
    wait_until(lambda: len(list(Path.cwd().glob("importing_*"))) == 2, process)
    importing = list(Path.cwd().glob("importing_*"))
    if not is_both:  # a suspended server would not reply
        pids = {int(path.name.rpartition("_")[2]) for path in importing}
        server = psutil.Process(*pids - {process.pid})
        server.suspend()
        wait_until(lambda: server.status() != psutil.STATUS_STOPPED, process)
    process.send_signal(number)
    _, errors = finished(process, 128 + number)
    assert errors == f"headway: {said}\n"
    assert f"exit_code={128 + number}, report={said!r}" in str(read_all()[0])
    wait_for_end(*(int(path.name.rpartition("_")[2]) for path in importing))


WHILE_RANKS_START = """
import os, signal, sys
from headway.launcher.output.pipes import Output
usual = Output.MOMENT
def stopped(*args, **kwargs):
    usual(*args, **kwargs)
    os.kill(os.getpid(), signal.SIGNUMBER)
Output.MOMENT = stopped
sys.argv = ["headway", "launch", "-q", "--cpu", "--num-processes", "2", "script.py"]
from headway.commands.main import run_command
run_command()
"""


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("begin", signal.SIGTERM),
        ("add", signal.SIGINT),
        pytest.param("begin", signal.SIGINT, marks=pytest.mark.long),
        pytest.param("add", signal.SIGTERM, marks=pytest.mark.long),
    ],
)
def test_a_stop_signal_while_the_ranks_are_started_is_no_success(
    moment: str, number: signal.Signals
) -> None:
    script("import time; time.sleep(60)")
    text = WHILE_RANKS_START.replace("MOMENT", moment).replace("SIGNUMBER", number.name)
    done = run_python(text)
    assert done.returncode == 128 + number, done.stderr
    words = "interrupted" if number == signal.SIGINT else "stopped by SIGTERM"
    assert done.stderr == f"headway: {words}\n"


AMID_A_START = """
import os, signal, sys, time
from headway.launcher.processes.starter import Starter
usual = Starter._next_reply
def interrupted(*args):
    pid = usual(*args)
    if os.path.exists("second"):
        while not (os.path.exists("up_0") and os.path.exists("up_1")):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)
    open("second", "w").close()
    return pid
Starter._next_reply = interrupted
sys.argv = ["headway", "launch", "-q", "--cpu", "--num-processes", "2", "script.py"]
from headway.commands.main import run_command
run_command()
"""
SAVES = """
import os, signal, time
def save(*_):
    open("saved_" + os.environ["RANK"], "w").close()
    os._exit(0)
signal.signal(signal.SIGINT, save)
open("up_" + os.environ["RANK"], "w").close()
while True:
    time.sleep(0.05)
"""


def test_a_rank_that_starts_while_the_run_is_stopped_is_stopped_like_the_others() -> None:
    script(SAVES)
    done = run_python(AMID_A_START)
    assert done.returncode == 130, done.stderr
    assert Path("saved_0").exists()
    assert Path("saved_1").exists()


SWALLOWED = """
import os, signal
from types import SimpleNamespace
from torch.distributed.elastic.multiprocessing.api import SignalException
from headway.launcher.processes.supervise import _signals
ranks = SimpleNamespace(is_stopping=False, defer_stop=lambda _: False)
ranks.end_grace_period = lambda: print("end_grace_period")
agent = SimpleNamespace(
    ranks=ranks,
    forward_interrupt=lambda: False,
    signals_received=set(),
    handler=SimpleNamespace(report_stop=lambda _, ends_grace: None, forwards_stop=False),
)
with _signals(agent):
    for _ in range(2):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except SignalException:  # as a __del__ does
            print("swallowed")
    agent.ranks.is_stopping = True
    os.kill(os.getpid(), signal.SIGTERM)
    print("still saving")
    os.kill(os.getpid(), signal.SIGINT)
"""


def test_a_stop_signal_may_come_again_and_only_ctrl_c_ends_the_grace_period_then() -> None:
    lines = run_python(SWALLOWED).stdout.splitlines()
    assert lines == ["swallowed", "swallowed", "still saving", "end_grace_period"]


FORWARDED = (
    SWALLOWED.partition("with _signals")[0]
    + """
with _signals(agent):
    agent.handler.forwards_stop = True
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except SignalException:
        agent.ranks.is_stopping, agent.handler.forwards_stop = True, False
    os.kill(os.getpid(), signal.SIGINT)
    print("still saving")
    os.kill(os.getpid(), signal.SIGINT)
"""
)


def test_a_scheduler_that_signals_all_machines_ends_no_grace_period_of_a_forwarded_stop() -> None:
    lines = run_python(FORWARDED).stdout.splitlines()
    assert lines == ["still saving", "end_grace_period"]


FORK = """
import os, signal, time
from headway.launcher.processes import server
from headway.launcher.rank import worker
for number in worker.STOP_SIGNALS:  # as the server does
    signal.signal(number, lambda *_: None)
pid = server._fork()
if pid == 0:
    time.sleep(0.5)  # the signal comes meanwhile
    server._init_rank(os.getppid(), server.Rank({}, [os.dup(0), os.dup(1), os.dup(2)]))
    worker.run_program("script", "script.py", [], blocked=worker.STOP_SIGNALS)
    os._exit(0)
os.kill(pid, signal.SIGNUMBER)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGQUIT, signal.SIGINT])
def test_a_stop_signal_to_a_rank_that_was_only_just_forked_is_not_lost(
    number: signal.Signals,
) -> None:
    script("import time; time.sleep(60)")
    done = run_python(FORK.replace("SIGNUMBER", number.name))
    assert done.stdout == f"{1 if number == signal.SIGINT else -number}\n", done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("count", "code"), [("1", -signal.SIGTERM), ("2", 143)])
def test_a_stop_signal_that_the_parent_of_the_launcher_has_blocked_stops_the_ranks(
    count: str, code: int
) -> None:
    blocked = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])"
    sleeping = script("import sys, time\nsys.stderr.write('ready\\n')\ntime.sleep(20)")
    process = start("-q", "--cpu", "--num-processes", count, sleeping, first=blocked)
    wait_for_lines(process, *["ready"] * int(count))
    process.send_signal(signal.SIGTERM)
    finished(process, code)


def test_neither_the_time_until_a_rank_starts_nor_a_stop_is_a_hang() -> None:
    running, stopping = (Watch(3, lambda: 0.0) for _ in range(2))
    fds = [os.pipe() for _ in range(2)]
    try:
        for watch in (running, stopping):
            watch.begin_attempt(1)
        time.sleep(3.2)  # torch is being imported
        for watch, (reading, _) in zip((running, stopping), fds, strict=True):
            watch.add(0, os.getpid(), reading)
        stopping.begin_stop()  # a rank may take its time to save
        time.sleep(0.5)
        assert running.hang is None
        wait_until(lambda: running.hang)
        time.sleep(0.5)
        assert stopping.hang is None
    finally:
        for watch, pipe in zip((running, stopping), fds, strict=True):
            watch.close()
            for fd in pipe:
                os.close(fd)
