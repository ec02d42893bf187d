"""Profiling with `accelerator.profile()`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from headway.distributed.collectives import wait_for_everyone
from headway.distributed.handler import KwargsHandler, check_choice
from headway.errors import Code, UsageError


@dataclass
class ProfileKwargs(KwargsHandler):
    """Configures `accelerator.profile()`; most arguments are those of `torch.profiler.profile`.

    Args:
        activities: names of torch's profiler activities, such as `cpu`, `cuda`, `mtia` or `xpu`;
            None records all available activities.
        schedule_option: arguments for `torch.profiler.schedule`: `wait`, `warmup`, `active` and
            `skip_first`, each a number of `profiler.step()` calls, and `repeat` (cycles).
        on_trace_ready: called with the profiler after each recorded cycle of the schedule or,
            without a schedule, once at the end.
        record_shapes: record the shapes of inputs.
        profile_memory: record allocations.
        with_stack: record source lines.
        with_flops: estimate the floating-point operations of matrix products and convolutions.
        with_modules: record module names; torch supports this only for TorchScript.
        output_trace_dir: a folder for the ranks' traces, `profile_<rank>.json`, which Chrome's
            tracing and Perfetto can open.

    Examples:
        >>> import torch
        >>> from headway import ProfileKwargs
        >>> handler = ProfileKwargs(activities=["cpu"], record_shapes=True)
        >>> with handler.build() as profiler:
        ...     product = torch.ones(2, 3) @ torch.ones(3, 4)
        >>> "aten::mm" in {one.key for one in profiler.key_averages()}
        True
    """

    activities: list[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | os.PathLike[str] | None = None

    def build(self) -> torch.profiler.profile:
        """Create the profiler, without starting it.

        Raises:
            UsageError: an activity is unknown, or `schedule_option` is invalid.
        """
        options = {**vars(self)}
        activities, schedule = options.pop("activities"), options.pop("schedule_option")
        del options["output_trace_dir"]
        return torch.profiler.profile(
            activities=None if activities is None else [*map(_activity, activities)],
            schedule=None if schedule is None else _schedule(schedule),
            **options,
        )


def _activity(name: str) -> torch.profiler.ProfilerActivity:
    known = torch.profiler.ProfilerActivity.__members__
    check_choice("ProfileKwargs", [*map(str.lower, known)], activity=name.lower())
    return known[name.upper()]


def _schedule(options: dict[str, int]) -> Callable[[int], torch.profiler.ProfilerAction]:
    try:
        return torch.profiler.schedule(**options)
    except (TypeError, AssertionError) as error:
        raise UsageError(
            f"schedule_option is {options!r}: {error}",
            where="the script's ProfileKwargs(...)",
            fix="pass wait, warmup and active, and optionally repeat and skip_first",
            code=Code.BAD_ARGUMENT,
        ) from None


@contextmanager
def profiled(handler: ProfileKwargs, rank: int) -> Iterator[torch.profiler.profile]:
    """Profile the block; if the handler has a folder, write the trace of the last cycle.

    In that case, the ranks also wait for each other at the end.
    """
    folder, on_trace_ready = handler.output_trace_dir, handler.on_trace_ready
    trace = Path(folder or "", f"profile_{rank}.json")
    is_written = folder is None  # or not requested

    def write_trace(profiler: torch.profiler.profile) -> None:
        nonlocal is_written
        if on_trace_ready is not None:
            on_trace_ready(profiler)
        profiler.export_chrome_trace(str(trace))
        is_written = True

    if folder is not None:
        trace.parent.mkdir(parents=True, exist_ok=True)
        handler = replace(handler, on_trace_ready=write_trace)
    with handler.build() as profiler:
        yield profiler
    if not is_written:
        warnings.warn(
            f"no trace in {trace}: the schedule {handler.schedule_option} recorded nothing;"
            " call profiler.step() after each step, or start recording earlier",
            stacklevel=3,
        )
    if folder is not None:
        wait_for_everyone()
