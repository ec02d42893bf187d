"""Loggers for several ranks, seen from one; tests/distributed has the ranks."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator

import pytest

from headway.errors import UsageError
from headway.logging import get_logger


@pytest.fixture(autouse=True)
def own_levels() -> Iterator[None]:
    level = logging.root.level
    yield
    logging.root.setLevel(level)
    logging.getLogger("script").setLevel(logging.NOTSET)


def be_rank(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")


def test_one_process_logs_the_message_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    get_logger("script").warning("%d samples", 3, extra={"epoch": 1})
    (record,) = caplog.records
    assert (record.name, record.getMessage()) == ("script", "3 samples")
    assert vars(record)["epoch"] == 1


def test_before_the_accelerator_the_variables_say_which_rank_logs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in (0, 1):
        be_rank(rank, monkeypatch)
        get_logger("script").warning("once")
        get_logger("script").warning("everywhere", main_process_only=False)
    assert caplog.messages == ["once", "[RANK 0] everywhere", "[RANK 1] everywhere"]


def test_an_order_without_a_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    be_rank(1, monkeypatch)
    with pytest.raises(UsageError):
        get_logger("script").warning("in turn", in_order=True)


def test_a_record_has_the_line_of_the_script(caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger("script")
    frame = inspect.currentframe()
    assert frame is not None
    line = frame.f_lineno
    logger.warning("a")
    logger.log(logging.WARNING, "b")
    logger.warning_once("c")
    logger.error("d", in_order=True)
    assert [record.lineno - line for record in caplog.records] == [1, 2, 3, 4]


def test_a_warning_once_is_told_by_its_text(caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger("script")
    for value in (1, [1], [1], 1):
        logger.warning_once("got %s", value)
    assert caplog.messages == ["got 1", "got [1]"]


def test_the_level_is_the_arguments_then_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "error")
    assert get_logger("script").logger.level == logging.root.level == logging.ERROR
    monkeypatch.setenv("HEADWAY_LOG_LEVEL", "warning")
    assert get_logger("script").logger.level == logging.root.level == logging.WARNING
    assert get_logger("script", log_level="INFO").logger.level == logging.INFO
    assert logging.root.level == logging.INFO


def test_an_unknown_level_is_refused_with_its_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_LOG_LEVEL", "loud")
    with pytest.raises(UsageError) as refused:
        get_logger("script")
    assert "HEADWAY_LOG_LEVEL" in refused.value.problems[0].where
