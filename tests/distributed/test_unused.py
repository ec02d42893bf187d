"""A run that ended well says which settings its script never used."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launching import launch, script

pytestmark = pytest.mark.distributed

BF16 = ("-q", "--cpu", "--mixed-precision", "bf16")
MAKES_ACCELERATOR = "from headway import Accelerator; Accelerator()"


def test_two_ranks_of_a_plain_script_are_told_what_they_left_unused() -> None:
    done = launch(*BF16, "--num-processes", "2", script("print('done')"))
    assert (done.returncode, done.stdout.count("done")) == (0, 2)
    (line,) = done.stderr.splitlines()
    assert "mixed_precision bf16 was not used" in line
    assert "no rank joined a process group" in line


def test_a_script_with_an_accelerator_is_told_nothing() -> None:
    done = launch(*BF16, "--supervise", script(MAKES_ACCELERATOR))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.long
def test_a_script_with_a_library_that_reads_the_variables_is_told_nothing() -> None:
    Path("accelerate.py").touch()
    done = launch(*BF16, "--num-processes", "2", script("import accelerate"))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.long
@pytest.mark.parametrize("end", ["raise ValueError", "sys.exit(75)", "os._exit(0)"])
def test_only_a_success_ends_with_the_note(end: str) -> None:
    done = launch(*BF16, "--supervise", script(f"import os, sys; {end}"))
    assert "was not used" not in done.stderr
