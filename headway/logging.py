"""Loggers for multi-rank jobs, which log on rank 0, on every rank, or on all ranks in order."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

from headway.distributed.call_barrier import barrier
from headway.distributed.world import group_device, rank_and_size_without_group, require_group
from headway.errors import Code, UsageError
from headway.ipc.run_contract import read_log_level


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """Return the logger `name`, which logs on rank 0 only by default.

    The logger's methods accept `main_process_only` and `in_order`; see `MultiProcessAdapter.log`.
    Before an Accelerator is created, the rank is read from the launcher's environment variables.

    Args:
        name: usually `__name__`.
        log_level: the level of this logger and of the root logger, such as "INFO"; defaults to
            the environment variable HEADWAY_LOG_LEVEL or ACCELERATE_LOG_LEVEL. If no level is set,
            the loggers' levels do not change.

    Raises:
        UsageError: the level is unknown.

    Examples:
        >>> from headway.logging import get_logger
        >>> logger = get_logger(__name__, log_level="INFO")
        >>> logger.info("once for all ranks")
        >>> logger.info("on every rank", main_process_only=False)
    """
    where, level = "the script's get_logger(...)", log_level
    if level is None and (found := read_log_level()) is not None:
        where, level = f"environment {found[0]}", found[1]
    logger = logging.getLogger(name)
    if level is not None:
        try:
            logger.setLevel(level.upper())
        except ValueError:
            raise UsageError(
                f"{level!r} is not a level of the logging module",
                where=where,
                fix="use DEBUG, INFO, WARNING, ERROR or CRITICAL",
                code=Code.BAD_ARGUMENT,
            ) from None
        logging.root.setLevel(level.upper())
    return MultiProcessAdapter(logger, {})


class MultiProcessAdapter(logging.LoggerAdapter):  # type: ignore[type-arg]
    """A logger adapter for multi-rank jobs.

    With several ranks, messages that are not limited to rank 0 are prefixed with the rank.

    Args:
        logger: the wrapped logger.
        extra: attributes added to every record.

    Examples:
        >>> import logging
        >>> from headway.logging import MultiProcessAdapter
        >>> logger = MultiProcessAdapter(logging.getLogger("training"), {"run": "first"})
        >>> logger.log(logging.DEBUG, "%d samples", 5, main_process_only=False)
        >>> logger.process("a message", {})
        ('a message', {'extra': {'run': 'first'}, 'stacklevel': 2})
    """

    def __init__(self, logger: logging.Logger, extra: dict[str, Any] | None = None) -> None:
        super().__init__(logger, extra or {})
        self._warned: set[str] = set()

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        """Add `extra`, and a stack level that attributes records to the script's line."""
        kwargs["extra"] = {**(self.extra or {}), **(kwargs.get("extra") or {})}
        kwargs.setdefault("stacklevel", 2)
        return msg, kwargs

    def log(self, level: int, msg: Any, *args: Any, **kwargs: Any) -> None:
        """Log `msg % args`; `info`, `warning` and so on accept the same keyword arguments.

        Args:
            level: such as `logging.INFO`.
            main_process_only: log on rank 0 only (the default).
            in_order: log on every rank in rank order; a collective call that overrides
                `main_process_only`.

        Raises:
            UsageError: `in_order` is set before the process group is initialized.
        """
        main_process_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        if not in_order and not self.isEnabledFor(level):
            return
        rank, size = rank_and_size_without_group()
        if rank > 0 and main_process_only and not in_order:
            return
        msg, kwargs = self.process(msg, kwargs)  # type: ignore[assignment]
        if size > 1 and (in_order or not main_process_only):
            msg = f"[RANK {rank}] {msg}"
        if not in_order:
            self.logger.log(level, msg, *args, **kwargs)
            return
        require_group("log(..., in_order=True)")
        for turn in range(size):  # even if this rank's level is higher: the other ranks wait for it
            if turn == rank:
                self.logger.log(level, msg, *args, **kwargs)
            barrier(group_device())

    def warning_once(self, msg: Any, *args: Any, **kwargs: Any) -> None:
        """Log a warning, unless this logger has already logged the same text.

        Accepts the same arguments as `log`, except for the level.

        Examples:
            >>> from headway.logging import get_logger
            >>> logger = get_logger("headway.examples", log_level="ERROR")
            >>> for _ in range(3):
            ...     logger.warning_once("the last batch has %d samples", 3)
        """
        text = str(msg) % args if args else str(msg)
        if text not in self._warned:
            self._warned.add(text)
            kwargs.setdefault("stacklevel", 3)  # attribute the record to the script's line
            self.log(logging.WARNING, msg, *args, **kwargs)
