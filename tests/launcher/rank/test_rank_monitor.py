"""The thread that answers the launcher: the script around it behaves as if it were not there."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from headway.contract.records import Answer, Ready, RecordReader
from tests.distributed.launching import begin

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="the fork server is for Linux"),
]

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
        assert self.receive() == Ready()

    def receive(self) -> object:
        while not self._records:
            self._records += self._reader.read(self.channel.recv(65536))
        return self._records.pop(0)

    def ask(self) -> Answer:
        self.channel.sendall(b"?")
        answer = self.receive()
        assert isinstance(answer, Answer)
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
from headway.contract.progress import process_progress
from headway.contract.records import Heartbeat, ProgressSnapshot
def deep(depth):
    if depth:
        return deep(depth - 1)
    time.sleep(1000)
for _ in range(150):
    threading.Thread(target=deep, args=(100,), daemon=True).start()
print("begin", flush=True)
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
while True:
    process_progress().send(Heartbeat(ProgressSnapshot(1, "data")))
"""
    with rank(script) as one:
        assert one.line() == "begin\n"
        one.channel.sendall(b"?")
        while not isinstance(received := one.receive(), Answer):
            assert type(received).__name__ == "Heartbeat"
        assert len(received.stacks) >= 150
        one.channel.close()
