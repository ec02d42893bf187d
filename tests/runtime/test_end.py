"""A run ends in one order, whatever it is in the middle of."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from headway import accelerator as module  # noqa: E402
from headway.checkpoint import background, saving  # noqa: E402
from headway.checkpoint.tensors import save_tensors  # noqa: E402
from headway.distributed import call_barrier  # noqa: E402
from headway.errors import CheckpointError  # noqa: E402
from tests.runtime.resumed_training import CHECKPOINTS, Training, names  # noqa: E402
from tests.waiting import wait_until  # noqa: E402

ORDER = ["checkpoint", "signals", "trackers", "process group"]


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> tuple[Training, list[str]]:
    """Return a training with a tracker, and the list in which it notes what it ends."""
    ended: list[str] = []
    training = Training(log_with="jsonl")
    training.accelerator.init_trackers("mine")
    parts = training.accelerator.parts

    def noted(name: str, call: Callable[[], None]) -> Callable[[], None]:
        def note() -> None:
            ended.append(name)
            call()

        return note

    for owner, call, name in (
        (parts.preemption, "release", ORDER[1]),
        (parts.checkpoints, "close", ORDER[0]),
        (parts.tracking, "finish", ORDER[2]),
        (module, "leave_world", ORDER[3]),
    ):
        monkeypatch.setattr(owner, call, noted(name, getattr(owner, call)))
    return training, ended


def after_an_exception(training: Training) -> None:
    try:
        training.train_to(3, every=1)
        raise ValueError("the script's own")
    except ValueError:
        training.accelerator.end_training()


def twice(training: Training) -> None:
    training.train_to(3, every=1)
    training.accelerator.end_training()
    training.accelerator.end_training()


def without_a_checkpoint(training: Training) -> None:
    training.accelerator.end_training()


def while_a_save_runs(training: Training) -> None:
    training.train_to(3, every=1, wait=False)
    training.accelerator.end_training()
    assert len(names()) == 2, "all are there"


def asked_to_stop(training: Training) -> None:
    training.train_to(3, every=1)
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught:
        training.train_to(1000, every=1)
    assert caught.value.code == 75


@pytest.mark.parametrize(
    ("how", "times"),
    [
        (after_an_exception, 1),
        (twice, 2),
        (without_a_checkpoint, 1),
        (while_a_save_runs, 1),
        (asked_to_stop, 1),
    ],
)
def test_a_run_ends_in_one_order(
    how: Callable[[Training], None], times: int, training: tuple[Training, list[str]]
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    how(training[0])
    assert training[1] == ORDER * times
    assert not [thread for thread in threading.enumerate() if thread.name == "headway-checkpoint"]
    if how is not asked_to_stop:  # which ignores signals from there on
        assert signal.getsignal(signal.SIGTERM) == before


def test_the_rest_is_ended_where_the_checkpoint_could_not_be_saved(
    training: tuple[Training, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise CheckpointError("no", where=str(Path()), fix="none", code=None)

    with monkeypatch.context() as patch:
        patch.setattr(saving, "save_tensors", fail)
        training[0].accelerator.save_state(CHECKPOINTS / "own", wait=False)
        with pytest.raises(CheckpointError):
            training[0].accelerator.end_training()
    assert training[1] == ORDER
    assert not names()


@pytest.mark.parametrize("how", ["end_training", "exit"])
def test_what_ends_the_process_does_so_once_the_last_checkpoint_is_written(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes, waits, main = list[int](), threading.Event(), threading.get_ident()
    interrupt = partial(signal.pthread_kill, main, signal.SIGINT)

    def write_late(*words: Any) -> Any:
        if how == "exit":
            wait_until(waits.is_set)
            interrupt()
        wait_until(lambda: signal.getsignal(signal.SIGINT) != signal.default_int_handler)
        interrupt()
        return save_tensors(*words)

    monkeypatch.setattr(saving, "save_tensors", write_late)
    monkeypatch.setattr(background, "_exit_with", codes.append)
    accelerator = Training().accelerator
    accelerator.save_state(CHECKPOINTS / "own", wait=False)
    if how == "exit":
        with pytest.raises(KeyboardInterrupt):
            waits.set() or accelerator.wait_for_checkpoint()  # type: ignore[func-returns-value]
        accelerator.parts.checkpoints.save_due_at_exit()
        assert codes == [130]
    else:
        with pytest.raises(KeyboardInterrupt):
            accelerator.end_training()
    assert names() == ["own"]


def test_a_checkpoint_that_is_due_at_exit_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = list[Any]()
    monkeypatch.setattr("atexit.register", lambda hook, *_: hooks.append(hook))
    accelerator = (training := Training()).accelerator
    accelerator.resume()
    for _ in training.batches():
        accelerator.checkpoint(every=5, wait=False)
    assert hooks[-1].__self__ is accelerator.parts.checkpoints  # kept after main() has returned
    hooks[-1]()
    assert names() == ["step_00000005"]


class Store:
    """The ranks' store, and what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    def add(self, key: str, number: int) -> int:
        self.asked.append(("add", key))
        return number

    def set(self, key: str, _: bytes) -> None:
        self.asked.append(("set", key))

    def clone(self) -> Store:
        return self

    def delete_key(self, key: str) -> bool:
        self.asked.append(("delete_key", key))
        return True


def test_the_last_rank_to_come_asks_the_store_nothing_once_the_others_may_leave_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = Store()
    monkeypatch.setattr(call_barrier, "default_store", lambda: store)
    monkeypatch.setattr(call_barrier, "rank_and_size", lambda: (0, 1))
    monkeypatch.setattr(torch.distributed, "PrefixStore", lambda _, store: store)
    leaves: dict[Callable[[], None], None] = {}
    monkeypatch.setattr(call_barrier, "before_leaving", leaves)
    barriers = call_barrier._CallBarriers()
    assert barriers.enter("end_training") is None
    for leave in [*leaves]:
        leave()
    at = store.asked.index(("set", "1/go"))
    assert ("delete_key", "-1") in store.asked[:at]
    assert all(key.startswith("where/") for _, key in store.asked[at + 1 :])
