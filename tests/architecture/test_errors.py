"""Errors say what, where from, and what to do."""

from __future__ import annotations

from headway import errors
from headway.errors import ConfigError, HeadwayError, Problem, WorkerFailed, did_you_mean


def test_an_error_is_three_lines() -> None:
    error = ConfigError("device is 'tpu'", where="profile x, line 7", fix="write cpu")
    assert str(error).splitlines() == [
        "device is 'tpu'",
        "  from: profile x, line 7",
        "  fix:  write cpu",
    ]


def test_several_problems_make_one_error() -> None:
    error = ConfigError.of([Problem("a", "b", "c"), Problem("d", "e", "f")])
    assert isinstance(error, ConfigError)
    assert len(str(error).splitlines()) == 6


def test_a_failed_worker_keeps_its_exit_code() -> None:
    assert WorkerFailed("rank 1 failed", where="x.py", fix="look", exit_code=42).exit_code == 42


def test_the_drawn_tree_of_errors_is_the_real_one() -> None:
    drawn = errors.__doc__ or ""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    for kind in kinds:
        if issubclass(kind, HeadwayError):
            (line,) = [line for line in drawn.splitlines() if f" {kind.__name__} " in line]
            if "exit " in line and line.split()[-1].isdecimal():
                assert line.split()[-1] == str(kind.exit_code)


def test_a_typo_gets_the_nearest_name_and_nonsense_gets_none() -> None:
    assert did_you_mean("num_procesess", ["num_processes", "device"]) == "num_processes"
    assert did_you_mean("xyzzy", ["num_processes", "device"]) is None
