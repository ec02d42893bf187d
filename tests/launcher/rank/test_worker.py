"""A script crashes in a rank as in plain Python, and does not notice the thread that answers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from headway.ipc.records import Crash, ProgressSnapshot, RankReady, RecordReader, StatusReply
from headway.launcher.diagnosis.stacks import parse_traceback
from headway.launcher.rank.worker import bootstrap_code
from tests.distributed.launching import begin, environment, execute, script

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="the rank asks the system to end with us"),
]

FAILED = "<exception str() failed>"
ODD = "class Odd(Exception):\n    def __str__(self): {}\nraise Odd\n"
REPLACED = "{}\nraise ValueError('boom')\n"
BOOM = ("ValueError", "boom")
NO_NAME = """\
class Meta(type):
    @property
    def __name__(cls): raise KeyError
class Odd(Exception, metaclass=Meta): pass
raise Odd('x')
"""
FROZEN = """\
import dataclasses
@dataclasses.dataclass(frozen=True)
class Odd(Exception):
    n: int
raise Odd(5)
"""
NO_MODULE = "code = compile('1/0', 'odd.py', 'exec')\nexec(code, {'__name__': None})\n"
REPR_RAISES = "class Odd(Exception):\n    def __repr__(self): raise KeyError\nraise Odd('x')\n"
HOOK_RAISES = "import sys\ndef hook(*_): 1/0\nsys.excepthook = hook"
HOOKED = """\
import sys
def hook(frame, event, arg):
    if frame.f_code.co_name.startswith("_report"):
        raise RuntimeError("of the hook")
sys.{}(hook)
raise ValueError('boom')
"""
CRASHES = {  # the script, the kind of its exception, the text
    "its text raises": (ODD.format("raise RuntimeError"), "Odd", FAILED),
    "its text is a number": (ODD.format("return 5"), "Odd", FAILED),
    "its text exits": (ODD.format("raise SystemExit(3)"), "Odd", FAILED),
    "its repr raises": (REPR_RAISES, "Odd", "x"),
    "its class has no name": (NO_NAME, "Odd", "x"),
    "it cannot be changed": (FROZEN, "Odd", "5"),
    "a module without a name": (NO_MODULE, "ZeroDivisionError", "division by zero"),
    "json.dumps is replaced": (REPLACED.format("import json; json.dumps = None"), *BOOM),
    "os.write is replaced": (REPLACED.format("import os; os.write = None"), *BOOM),
    "time.time is an int": (REPLACED.format("import time; time.time = lambda: 5"), *BOOM),
    "time.time is a text": (REPLACED.format("import time; time.time = lambda: 'now'"), *BOOM),
    "a trace function raises": (HOOKED.format("settrace"), *BOOM),
    "a profile function raises": (HOOKED.format("setprofile"), *BOOM),
    "the hook raises": (REPLACED.format(HOOK_RAISES), *BOOM),
}


def run_as_rank(
    name: str, **variables: str
) -> tuple[subprocess.CompletedProcess[str], list[object]]:
    """Run a script as a rank of its own; return how it ended, and the records that it sent."""
    ours, channel = socket.socketpair()
    arguments = [str(channel.fileno()), "script", name]
    with ours, channel:
        process = subprocess.run(
            [sys.executable, "-c", bootstrap_code("rank.worker"), *arguments],
            env=environment(**variables),
            pass_fds=[channel.fileno()],
            capture_output=True,
            text=True,
            timeout=120,
        )
        ours.settimeout(60)
        return process, [*RecordReader().read(ours.recv(2**20))]


def crash_among(sent: list[object]) -> Crash:
    (crash,) = [record for record in sent if isinstance(record, Crash)]
    return crash


@pytest.mark.parametrize("crash", CRASHES)
def test_an_odd_exception_is_shown_as_plain_python_does_and_reported(crash: str) -> None:
    text, kind, message = CRASHES[crash]
    name = script(text)
    plain = execute([sys.executable, name])
    rank, sent = run_as_rank(name)
    assert (rank.returncode, rank.stderr) == (plain.returncode, plain.stderr)
    reported = crash_among(sent)
    assert (reported.kind, reported.message, reported.is_from_headway) == (kind, message, False)
    assert abs(reported.time - time.time()) < 60
    first = parse_traceback(reported.traceback)[0]
    assert (os.path.basename(first.file), first.line) == (name, text.count("\n"))


def test_the_fix_of_an_error_of_headway_is_reported_apart_and_printed_once() -> None:
    text = "from headway.errors import UsageError\n"
    text += "raise UsageError('a', where='b', fix='c', code='HW501')\n"
    rank, sent = run_as_rank(script(text))
    crash = crash_among(sent)
    assert (crash.where, crash.fix) == ("b", "c")
    assert crash.traceback.endswith("UsageError: a [HW501]\n")
    assert rank.stderr == crash.traceback + "  from: b\n  fix:  c\n"
    text = text.replace("code=", "is_of_all_ranks=True, code=")
    rank, _ = run_as_rank(script(text), RANK="1", WORLD_SIZE="2")
    assert rank.stderr == "UsageError: a [HW501], as on rank 0\n"


def test_a_script_that_is_gone_when_its_rank_starts_is_no_error_of_headway() -> None:
    rank, sent = run_as_rank("gone.py")
    crash = crash_among(sent)
    assert (rank.returncode, crash.kind, crash.is_from_headway) == (2, "ConfigError", False)
    assert "gone.py" in rank.stderr
    assert "keep the script" in crash.fix


@pytest.mark.parametrize(
    ("text", "is_ours"),
    [
        ("from headway.settings.table import TABLE\nTABLE['device'].parse(None).x\n", True),
        ("from headway.errors import did_you_mean\ndid_you_mean('a', None)\n", True),
        (
            "from headway.errors import UsageError as E\nraise E('a', where='', fix='', code='')\n",
            False,
        ),
        ("from headway.machine.facts import is_on\nis_on({'A': 'maybe'}, 'A')\n", False),
        pytest.param(
            "from headway import Accelerator\nAccelerator(cpu=True).prepaer\n",
            False,
            marks=pytest.mark.skipif(find_spec("torch") is None, reason="needs torch"),
        ),
        ("def f(:\n", False),
    ],
)
def test_an_error_in_our_own_files_is_told_from_one_in_the_script(text: str, is_ours: bool) -> None:
    crash = crash_among(run_as_rank(script(text))[1])
    assert crash.is_from_headway is is_ours
    assert ("Did you mean: 'prepare'?" in crash.traceback) is ("prepaer" in text)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("random.py", "import tempfile", "cannot import name 'Random' from 'random'"),
        ("queue.py", "import queue\nqueue.Queue()", "module 'queue' has no attribute 'Queue'"),
        ("calendar.py", "import calendar.x", "'calendar' is not a package"),
    ],
)
def test_a_file_that_shadows_a_module_of_the_standard_library_is_named(
    file: str, text: str, message: str
) -> None:
    Path(file).write_text("x = 1\n")
    crash = crash_among(run_as_rank(script(text))[1])
    assert message in crash.message
    assert crash.fix == f"rename {Path(file).resolve()}: it is imported instead of Python's " + (
        f"module {file.removesuffix('.py')}"
    )
    other = crash_among(run_as_rank(script("import queue, random\nraise ValueError('queue')"))[1])
    assert other.fix == ""
    ours = "from headway.errors import did_you_mean\ndid_you_mean('a', None)\n"
    crash = crash_among(run_as_rank(script(f"import calendar\n{ours}"))[1])
    assert crash.is_from_headway
    assert crash.fix.startswith("rename") is (file == "calendar.py")


@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
def test_an_attribute_that_is_missing_while_headway_is_imported_is_named() -> None:
    text = "import random, torch\ndel random.Random\nfrom headway import Accelerator"
    crash = crash_among(run_as_rank(script(text))[1])
    assert crash.kind == "ImportError"
    assert "cannot import headway.Accelerator: module 'random' has no" in crash.message
    assert "AttributeError" in crash.traceback


@pytest.mark.parametrize("end", ["", "raise ValueError", "import sys; sys.exit(3)"])
def test_the_last_step_is_told_also_where_the_second_since_the_one_before_is_not_over(
    end: str,
) -> None:
    name = script(
        f"from headway.ipc.progress import process_progress\nprocess_progress().step = 7\n{end}\n"
    )
    _, sent = run_as_rank(name)
    told = [record for record in sent if isinstance(record, ProgressSnapshot)]
    assert [row.step for row in told] == [7]


START = """
import ctypes, os, signal, sys, threading, time, warnings
from headway.launcher.rank import rank_monitor
rank_monitor.start(int(sys.argv[1]))

def tasks():
    return os.listdir("/proc/self/task")

"""


class Rank:
    """A process with the thread in it, and the launcher's end of its channel."""

    def __init__(self, process: subprocess.Popen[str], channel: socket.socket) -> None:
        self.process = process
        self.channel = channel
        self._records: list[object] = []
        self._reader = RecordReader()
        assert self.receive() == RankReady()

    def receive(self) -> object:
        while not self._records:
            self._records += self._reader.read(self.channel.recv(65536))
        return self._records.pop(0)

    def ask(self) -> StatusReply:
        self.channel.sendall(b"?")
        answer = self.receive()
        assert isinstance(answer, StatusReply)
        return answer

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()


@contextmanager
def rank(script: str) -> Iterator[Rank]:
    ours, theirs = socket.socketpair()
    ours.settimeout(60)
    command = [sys.executable, "-c", START + script, str(theirs.fileno())]
    process = begin(command, pass_fds=[theirs.fileno()], stdin=subprocess.PIPE)
    theirs.close()
    try:
        yield Rank(process, ours)
    finally:
        _, errors = process.communicate("", timeout=120)
        ours.close()
    assert (process.returncode, errors) == (0, "")


FORKS = """
warnings.simplefilter("error")  # Python 3.12 warns of a fork with several threads
for _ in range(20):
    child = os.fork()
    if child == 0:
        grandchild = os.fork()
        if grandchild == 0:
            os._exit(len(tasks()) - 1)
        os._exit(os.waitpid(grandchild, 0)[1] >> 8)
    assert os.waitpid(child, 0)[1] == 0
print("forked", flush=True)
sys.stdin.read()
"""


def test_a_rank_forks_as_a_process_of_one_thread_does_and_answers_afterwards() -> None:
    with rank(FORKS) as one:
        assert one.line() == "forked\n"
        (main,) = one.ask().stacks
        assert (main[-1].file, main[-1].function) == ("<string>", "<module>")


FORKING_THREADS = """
def fork():
    for _ in range(50):
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
threads = [threading.Thread(target=fork) for _ in range(4)]
warnings.simplefilter("ignore")
for one in threads:
    one.start()
for one in threads:
    one.join()
for _ in range(1000):  # a thread that has been joined may still be listed for a moment
    if len(tasks()) > 2:
        time.sleep(0.01)
print("forked", len(tasks()), flush=True)
sys.stdin.read()
"""


def test_threads_that_fork_at_once_leave_one_thread_that_answers() -> None:
    with rank(FORKING_THREADS) as one:
        answers = [one.ask() for _ in range(20)]
        assert one.line() == "forked 2\n"
        assert all(answer.stacks for answer in [*answers, one.ask()])


SLEEPS = """
print("begin", flush=True)
left_s = ctypes.CDLL(None).sleep(3)  # what is left if a signal interrupts it
print(left_s, flush=True)
sys.stdin.read()
"""


def test_a_question_interrupts_no_system_call_in_c_code() -> None:
    with rank(SLEEPS) as one:
        assert one.line() == "begin\n"
        assert one.ask().stacks
        assert one.line() == "0\n"


MASKS = """
signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b"handled\\n"))  # print is not reentrant
for task in tasks():
    with open(f"/proc/self/task/{task}/status") as file:
        print(*[line.split()[1] for line in file if line.startswith("SigBlk")], flush=True)
print(threading.active_count(), flush=True)
sys.stdin.read()
"""


def test_the_thread_takes_no_signal_and_python_does_not_list_it() -> None:
    with rank(MASKS) as one:
        masks = sorted(int(one.line(), 16) for _ in range(2))
        numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM, signal.SIGCHLD]
        assert masks[0] == 0
        assert all(masks[1] >> (number - 1) & 1 for number in numbers)
        assert one.line() == "1\n"
        one.process.send_signal(signal.SIGUSR1)
        assert one.line() == "handled\n"


def test_a_very_long_answer_arrives_whole_between_heartbeats() -> None:
    script = """
from headway.ipc.progress import process_progress
from headway.ipc.records import ProgressSnapshot
def deep(depth):
    if depth:
        return deep(depth - 1)
    time.sleep(1000)
for _ in range(150):
    threading.Thread(target=deep, args=(100,), daemon=True).start()
print("begin", flush=True)
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
while True:
    process_progress().send(ProgressSnapshot(1, "data"))
"""
    with rank(script) as one:
        assert one.line() == "begin\n"
        one.channel.sendall(b"?")
        while not isinstance(received := one.receive(), StatusReply):
            assert type(received).__name__ == "ProgressSnapshot"
        assert len(received.stacks) >= 150
        one.channel.close()
