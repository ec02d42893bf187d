"""Profiles a part of a script, and writes each rank's trace to a file of its own."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from headway.plugins.handlers import ProfileKwargs

TRACE_NAME = "profile_{rank}.json"


@contextmanager
def profiled(handler: ProfileKwargs, rank: int) -> Iterator[torch.profiler.profile]:
    """Record what the block does; with a schedule, the file has its last cycle."""
    if handler.output_trace_dir is None:
        with handler.build() as profiler:
            yield profiler
        return
    folder = Path(handler.output_trace_dir)
    folder.mkdir(parents=True, exist_ok=True)
    trace = folder / TRACE_NAME.format(rank=rank)
    is_written = False

    def write_trace(profiler: torch.profiler.profile) -> None:
        nonlocal is_written
        if handler.on_trace_ready is not None:
            handler.on_trace_ready(profiler)
        profiler.export_chrome_trace(str(trace))
        is_written = True

    with replace(handler, on_trace_ready=write_trace).build() as profiler:
        yield profiler
    if not is_written:
        warnings.warn(
            f"no trace in {trace}: the schedule {handler.schedule_option} recorded nothing."
            " Call profiler.step() after each step, or record earlier",
            stacklevel=3,
        )
