"""What steps are told to take, by a clock and files of the system that the test sets."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.devices.table import Cuda
from headway.ipc import step_clock
from headway.ipc.progress import Channel, Progress
from headway.ipc.records import ProgressSnapshot, Record, StepStats
from headway.ipc.step_clock import (
    BACKWARD,
    DATA,
    FORWARD,
    SAVE,
    SCRIPT,
    SYNC,
    DeviceTimer,
    Event,
    StepClock,
)


class Time:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(step_clock, "_now", time)
    return time


def progress_of(clock: StepClock) -> Progress:
    progress = Progress()
    progress.clock = clock
    return progress


def run_step(clock: StepClock, time: Time, step: int) -> bool:
    """Let a step take 1 s for data, 2 forward, 3 backward, 4 of waiting, 5 of saving, 6 else."""
    clock.enter(DATA)
    time.now += 1
    progress = progress_of(clock)
    progress.begin_forward(8)
    time.now += 2
    clock.enter(BACKWARD)
    time.now += 1
    time.now += 2
    clock.begin_exchange()
    time.now += 4
    progress.end_backward()
    with clock.counting(SAVE):
        time.now += 5
    time.now += 6
    return clock.end_step(step)


def taken(clock: StepClock, total: int = 0, loss: float | None = None) -> StepStats:
    stats = clock.take(total, loss)
    assert stats is not None
    return stats


def test_every_moment_of_a_step_counts_once(time: Time) -> None:
    clock = StepClock()
    assert run_step(clock, time, 1)
    assert clock.take(0, None) is None  # it warms up
    assert run_step(clock, time, 2)
    stats = taken(clock, 10, 0.5)
    assert (stats.data_s, stats.forward_s, stats.backward_s) == (1, 2, 3)
    assert (stats.sync_s, stats.save_s, stats.seconds) == (4, 5, 21)
    assert (stats.step, stats.num_steps, stats.samples) == (2, 1, 8)
    assert (stats.total, stats.loss) == (10, 0.5)
    assert stats.rss_bytes > 0


def test_a_record_is_due_once_a_second(time: Time) -> None:
    clock = StepClock()
    for step in (1, 2):
        assert clock.end_step(step)
        clock.take(0, None)
    time.now += 0.9
    assert not clock.end_step(3)
    time.now += 0.2
    assert clock.end_step(4)


def test_two_optimizers_make_one_step_and_a_step_set_back_counts_what_was_done(time: Time) -> None:
    clock = StepClock()
    clock.end_step(5)
    clock.take(0, None)
    for step in (6, 6, 7, 7):
        clock.end_step(step)
    stats = taken(clock)
    assert (stats.num_steps, stats.step) == (2, 7)
    clock.end_step(1)  # an older checkpoint was loaded
    stats = taken(clock)
    assert (stats.num_steps, stats.step) == (1, 1)


def test_waiting_amid_saving_is_waiting(time: Time) -> None:
    clock = StepClock()
    with clock.counting(SAVE):
        time.now += 1
        with clock.counting(SYNC):
            time.now += 2
        time.now += 3
    assert (clock.tally.spent[SAVE], clock.tally.spent[SYNC]) == (4, 2)


def test_a_count_that_cannot_be_read_for_a_while_is_no_loss_then_or_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "schedstat"  # of this thread: on its core, waiting for it, turns
    monkeypatch.setattr(step_clock, "_SCHEDSTAT", str(path))
    monkeypatch.setattr(step_clock, "_EVERY_S", 0.0)
    clock, stolen_s = StepClock(), []
    for step, text in enumerate(("7000000000 1000000000 42", "", "7 1000000000 42", "7 15e8 4")):
        path.write_text(text.replace("15e8", "1500000000"))
        clock.end_step(step)
        stats = clock.take(0, None)
        stolen_s.append(None if stats is None else stats.stolen_s)
    assert stolen_s == [None, 0, 0, 0.5]


class Device:
    """A device that does what is queued one after the other, while the script goes on."""

    def __init__(self, time: Time) -> None:
        self.time = time
        self.free_at = time.now
        self.is_capturing = False
        self.error: str | None = None  # of its work
        self.num_events = 0

    def queue(self, seconds: float) -> None:
        self.free_at = max(self.free_at, self.time.now) + seconds

    def record(self, event: Event | None) -> Event | None:
        if self.error is not None:
            raise RuntimeError(self.error)
        if self.is_capturing:
            return None
        if event is None:
            event = DeviceEvent(self)
            self.num_events += 1
        assert isinstance(event, DeviceEvent)
        event.at = max(self.free_at, self.time.now)
        return event


class DeviceEvent:
    def __init__(self, device: Device) -> None:
        self.device, self.at = device, 0.0

    def query(self) -> bool:
        if self.device.error is not None:
            raise RuntimeError(self.device.error)
        assert not self.device.is_capturing, "asked while a graph is captured"
        return self.at <= self.device.time.now

    def elapsed_time(self, end: Event) -> float:
        assert isinstance(end, DeviceEvent)
        assert self.query()
        assert end.query()
        return 1e3 * (end.at - self.at)


@pytest.fixture
def device(time: Time) -> Device:
    return Device(time)


@pytest.fixture
def clock(device: Device) -> StepClock:
    clock = StepClock()
    clock.queue = DeviceTimer(device.record)
    return clock


def queue_step(clock: StepClock, device: Device, step: int, data_s: float = 0.0) -> bool:
    """Wait for data, and queue 2 s forward, 3 backward, 4 of waiting for others, 1 of the script.

    To queue it takes 0.1 s, all of it in the forward pass.
    """
    clock.enter(DATA)
    device.time.now += data_s
    progress = progress_of(clock)
    progress.begin_forward(8)
    device.time.now += 0.1
    device.queue(2)
    clock.enter(BACKWARD)
    device.queue(3)
    clock.begin_exchange()
    device.queue(4)
    progress.end_backward()
    device.queue(1)
    return clock.end_step(step)


def warm_up(clock: StepClock, device: Device) -> None:
    assert queue_step(clock, device, 1, data_s=1000)
    assert clock.take(0, None) is None  # nor is it timed
    device.time.now = device.free_at


def test_what_a_device_takes_counts_and_not_what_it_takes_to_queue_it(
    clock: StepClock, device: Device
) -> None:
    warm_up(clock, device)
    queue_step(clock, device, 2, data_s=5)  # of a device that has nothing else to do
    queue_step(clock, device, 3, data_s=5)  # while it has 10 s to do
    assert clock.take(0, None) is None  # neither has been done
    device.time.now = device.free_at
    queue_step(clock, device, 4)
    stats = taken(clock, 9, None)
    assert (stats.step, stats.num_steps, stats.total) == (3, 2, 9)  # the two that are done
    assert stats.samples == 16
    assert stats.data_s == pytest.approx(5)
    assert stats.forward_s == pytest.approx(2 * 2 + 0.1)  # the first one's began late
    assert (stats.backward_s, stats.sync_s) == pytest.approx((2 * 3, 2 * 4))
    assert stats.seconds == pytest.approx(2 * 10 + 5.1)
    device.time.now = device.free_at
    queue_step(clock, device, 5)
    stats = taken(clock, 9, None)
    assert (stats.step, stats.num_steps, stats.samples) == (4, 1, 8)
    assert stats.forward_s == pytest.approx(2.1)


def test_steps_that_are_captured_in_a_graph_are_not_timed_and_ask_the_device_nothing(
    clock: StepClock, device: Device
) -> None:
    warm_up(clock, device)
    queue_step(clock, device, 2)
    device.time.now = device.free_at
    device.is_capturing = True
    queue_step(clock, device, 3, data_s=70)
    queue_step(clock, device, 4, data_s=70)
    device.is_capturing = False
    queue_step(clock, device, 5, data_s=70)  # it began in the graph
    device.time.now = device.free_at
    queue_step(clock, device, 6)
    device.time.now = device.free_at
    queue_step(clock, device, 7)
    stats = taken(clock)
    assert (stats.step, stats.num_steps) == (6, 2)  # the last one has just been queued
    assert stats.data_s == 0
    assert stats.sync_s == pytest.approx(2 * 4)


@pytest.mark.parametrize("asks", ["record", "query"])
def test_an_error_of_the_device_is_left_to_the_script(
    clock: StepClock, device: Device, asks: str
) -> None:
    warm_up(clock, device)
    if asks == "record":
        device.error = "device-side assert"
        queue_step(clock, device, 2, data_s=70)
    else:
        queue_step(clock, device, 2, data_s=30)
        assert clock.queue is not None
        clock.queue.mark(DATA)
        device.error = "device-side assert"
        clock.end_step(3)
    queue_step(clock, device, 4, data_s=70)
    assert clock.take(0, None) is None


def test_a_step_with_a_long_evaluation_is_not_timed_and_events_are_used_again(
    clock: StepClock, device: Device
) -> None:
    warm_up(clock, device)
    for _ in range(10_000):
        clock.enter(DATA)
        clock.enter(FORWARD)
        device.queue(0.002)
    device.time.now = device.free_at
    num_events = 0
    for step in range(2, 40):
        queue_step(clock, device, step)
        device.time.now = device.free_at
        num_events = num_events or device.num_events
    stats = taken(clock)
    assert (stats.num_steps, stats.samples) == (36, 36 * 8)  # the last was just queued
    assert stats.forward_s == pytest.approx(36 * 2.1)
    assert device.num_events < num_events + 20


def test_what_waits_for_the_device_is_made_in_a_timed_step_and_called_once_it_is_done(
    clock: StepClock, device: Device
) -> None:
    queue = clock.queue
    assert queue is not None
    called: list[str] = []
    queue.when_done(lambda: pytest.fail("made before any step is timed"))
    warm_up(clock, device)
    queue.when_done(lambda: lambda: called.append("second"))
    queue_step(clock, device, 2)
    assert called == []
    device.is_capturing = True
    device.time.now = device.free_at
    clock.enter(SCRIPT)
    queue.when_done(lambda: pytest.fail("made while a graph is captured"))
    device.is_capturing = False
    queue_step(clock, device, 3)
    device.time.now = device.free_at
    queue_step(clock, device, 4)
    assert called == ["second"]


class ChannelTo(Channel):
    """A channel whose records a test reads."""

    def __init__(self, sent: list[Record]) -> None:
        self.sent = sent

    def send(self, record: Record) -> None:
        self.sent.append(record)


def test_a_heartbeat_tells_how_far_a_rank_is_while_its_device_is_behind(
    clock: StepClock, device: Device
) -> None:
    sent: list[Record] = []
    progress = progress_of(clock)
    progress.connect(ChannelTo(sent))
    warm_up(clock, device)
    for step in (2, 3):
        clock.enter(DATA)
        device.queue(1000)
        device.time.now += 2
        progress.follow(step, 9, None)
    assert [type(record).__name__ for record in sent] == 2 * ["ProgressSnapshot"]
    assert sent[-1] == ProgressSnapshot(3, "script", 9, None)


class CudaPart:
    """The names of `torch.cuda` that are used, as they are called on a machine without a GPU."""

    is_capturing = False

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing
            self.streams: list[object] = []

        def record(self, stream: object) -> None:
            self.streams.append(stream)

    def is_current_stream_capturing(self) -> bool:
        return self.is_capturing

    def current_stream(self, device: object) -> object:
        return f"the current stream of {device}"


def test_events_are_put_into_the_current_stream_of_the_device_that_trains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    part = CudaPart()
    monkeypatch.setattr(Cuda, "_part", part)
    device: Any = "cuda:1"  # torch's need not be there
    record = Cuda().event_recorder(device)
    event = record(None)
    assert record(event) is event
    assert event.streams == 2 * ["the current stream of cuda:1"]
    part.is_capturing = True
    assert record(event) is None
    assert len(event.streams) == 2


def test_a_cpu_has_no_queue_and_what_the_script_takes_counts() -> None:
    clock = StepClock()
    clock.watch_device(SimpleNamespace(type="cpu"))
    assert clock.queue is None
    assert clock.device_bytes() is None


def test_some_short_steps_are_split_and_stand_for_all(time: Time) -> None:
    clock = StepClock()
    clock.split_at = 0.0
    num_split = 0
    for step in range(201):
        clock.enter(BACKWARD)
        time.now += 0.0006
        if clock.splits_backward:
            num_split += 1
            clock.begin_exchange()
        time.now += 0.0004
        clock.enter(SCRIPT)
        clock.end_step(step)
    assert 200 / 60 < num_split < 200 / 45
    stats = taken(clock)
    backward_s, sync_s = stats.backward_s, stats.sync_s
    assert (backward_s / stats.num_steps, sync_s / stats.num_steps) == pytest.approx((6e-4, 4e-4))
