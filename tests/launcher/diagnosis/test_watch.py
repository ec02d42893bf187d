"""The status channel of a rank: a script may write anything to it, and the launcher goes on."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from headway.ipc.records import (
    LOGS,
    Collective,
    Frame,
    Group,
    OutputPath,
    ProgressSnapshot,
    RankReady,
    Record,
    ScriptEnd,
    StatusReply,
    StepStats,
)
from headway.ipc.typed import encode
from headway.launcher.diagnosis import watch
from headway.launcher.diagnosis.hang import NoStack, RankStatus, describe_stacks, explain
from headway.launcher.diagnosis.watch import Watch
from tests.history.runs import stats
from tests.waiting import wait_until


class Rank:
    """One rank's end of its channel, and the launcher's watch over it."""

    def __init__(self, num_ranks: int = 1) -> None:
        self.stats: list[StepStats] = []
        self.watch = Watch(None, lambda: 0.0, lambda _, stats: self.stats.append(stats))
        ours, self.channel = socket.socketpair()
        self.watch.begin_attempt(num_ranks)
        self.watch.add(0, os.getpid(), ours.detach())

    def tell(self, *records: Record) -> None:
        self.channel.sendall(b"".join(map(encode, records)))

    def close(self) -> None:
        self.watch.end(0, 0)
        self.watch.close()
        self.channel.close()


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank()
    yield made
    made.close()


def test_garbage_on_the_channel_is_said_once_and_what_comes_after_it_is_read(
    rank: Rank, capfd: pytest.CaptureFixture[str]
) -> None:
    rank.channel.sendall(b"hello\n\xff\xfe\n[]\n" + b"[" * 100_000 + b"\n")
    rank.tell(ProgressSnapshot(3, "data"))
    wait_until(lambda: rank.watch.statuses()[0].progress == ProgressSnapshot(3, "data"))
    assert rank.watch.step() == 3
    assert capfd.readouterr().err.count("rank 0 wrote to the launcher's status channel") == 1


@pytest.mark.parametrize(("data_s", "step"), [(0.2, 20), (0.0, 0)])
def test_steps_that_a_script_counts_in_its_process_are_none_of_the_training(
    rank: Rank, data_s: float, step: int
) -> None:
    spent = {"data_s": data_s, "forward_s": 0.0, "backward_s": 0.0, "total": 0}
    rank.tell(stats(20, **spent))
    wait_until(lambda: bool(rank.stats))
    assert rank.watch.step() == step


def test_how_a_rank_left_is_what_it_reported_and_the_code_of_its_process(rank: Rank) -> None:
    end = ScriptEnd(1.0, 0, "", Frame("train.py", 3, "main"), (Group("0", (0,), ()),))
    rank.tell(end)
    assert rank.watch.end(0, 5) == [end]
    (status,) = rank.watch.statuses()
    assert str(status.exit) == "exit code 5, by sys.exit at train.py:3 in main"
    assert status.groups == end.groups
    left = Rank()  # without a word
    assert left.watch.end(0, -9) == []
    assert str(left.watch.statuses()[0].exit) == "exit code -9"
    left.close()


def test_control_characters_in_a_place_are_shown_as_text(rank: Rank) -> None:
    place = Frame("a\n\x1b[2Jb.py", 3, "main")
    rank.tell(ScriptEnd(1.0, 0, "", place, ()))
    rank.watch.end(0, 5)
    (status,) = rank.watch.statuses()
    assert str(status.exit) == "exit code 5, by sys.exit at a\\n\\x1b[2Jb.py:3 in main"
    group = Group("0", (0, 1), (Collective(1, "all\n\x1breduce", "[4]", False, 0.0),))
    waiting = RankStatus(1, stacks=((place,),), groups=(group,))
    report = "\n".join([*explain([status, waiting]), describe_stacks([status, waiting])])
    assert "\x1b" not in report
    assert "all\\n\\x1breduce" in report
    assert 'File "a\\n\\x1b[2Jb.py"' in report


def test_millions_of_empty_lines_hold_up_neither_the_rank_nor_the_launcher(
    rank: Rank, capfd: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    rank.channel.sendall(b"\n" * 5_000_000)
    rank.watch.end(0, 0)
    assert time.monotonic() - began < 60  # byte by byte it takes minutes
    assert capfd.readouterr().err.count("status channel") == 1


@pytest.mark.parametrize("junk", [b"\n", b"x"])
def test_a_rank_that_never_stops_to_write_can_be_ended_at_any_time(rank: Rank, junk: bytes) -> None:
    def write() -> None:
        with suppress(OSError):
            while True:
                rank.channel.sendall(junk * 100_000)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    time.sleep(1)
    rank.watch.end(0, 0)
    writer.join(60)
    assert not writer.is_alive()


def test_it_is_known_once_when_the_last_rank_is_ready() -> None:
    rank, told = Rank(num_ranks=2), list[int]()
    rank.watch.on_ready = lambda: told.append(rank.watch.step())
    rank.tell(RankReady(), ProgressSnapshot(1))
    wait_until(lambda: rank.watch.step() == 1)
    assert not told
    ours, theirs = socket.socketpair()
    rank.watch.add(1, os.getpid(), ours.detach())
    theirs.sendall(encode(ProgressSnapshot(2)) + encode(RankReady()))
    wait_until(lambda: told == [2])
    rank.watch.end(1, 0)
    theirs.close()
    rank.close()


@pytest.mark.parametrize("groups", [(), (Group("0", (0, 1), ()),)])
def test_ranks_without_a_process_group_are_noticed_while_they_run(
    groups: tuple[Group, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "NO_GROUP_AFTER_S", 0)
    rank, told = Rank(), list[bool]()
    rank.watch.on_no_group = lambda: told.append(True)
    rank.tell(stats(20), RankReady())
    assert rank.channel.recv(1) == b"?"
    rank.tell(StatusReply(groups, ProgressSnapshot(), 1, ()), OutputPath(LOGS, "logs"))
    wait_until(rank.watch.kept)
    rank.close()  # which waits for the thread
    assert told == [True] * (not groups)


def test_a_rank_that_was_asked_and_closed_its_channel_is_not_said_to_hang(rank: Rank) -> None:
    collective = Collective(1, "all_reduce", "[4]", True, 0.0)
    place = Frame("train.py", 3, "main")
    groups = (Group("0", (0, 1), (collective,)),)
    rank.tell(RankReady())
    rank.tell(StatusReply(groups, ProgressSnapshot(), 1, ((place,),)))

    def close_when_asked() -> None:
        rank.channel.recv(1)
        rank.channel.shutdown(socket.SHUT_RDWR)

    closing = threading.Thread(target=close_when_asked)
    closing.start()
    while closing.is_alive():
        (status,) = rank.watch.statuses()
    (status,) = rank.watch.statuses()
    assert status.no_stack is NoStack.UNCONNECTED
    assert status.groups is None
    assert not status.is_absent


@pytest.mark.slow
def test_a_rank_that_is_asked_in_vain_is_described_by_its_kernel_state(rank: Rank) -> None:
    rank.tell(RankReady())
    (status,) = rank.watch.statuses()
    while status.no_stack is NoStack.UNCONNECTED:
        (status,) = rank.watch.statuses()
    assert status.no_stack is NoStack.SILENT
    assert status.process is not None
    assert status.process.letter in "RSD"


def test_steps_after_the_last_stats_are_known_by_a_heartbeat(rank: Rank) -> None:
    stats = StepStats(2, 2, 1.0, 0.1, 0.2, 0.3, 0.2, 0.1, 16, 2**20, None, 0, 0.5, None, 0.0)
    rank.tell(stats, ProgressSnapshot(98, loss=0.25))
    wait_until(lambda: len(rank.stats) == 2)
    told, moved = rank.stats
    assert told == stats
    assert (moved.step, moved.loss, moved.num_steps, moved.seconds) == (98, 0.25, 0, 0)
    assert rank.watch.step() == 98
