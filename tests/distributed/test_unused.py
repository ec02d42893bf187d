"""A run that ended well says which settings its script never used."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launching import launch, script

pytestmark = pytest.mark.distributed

BF16 = ("-q", "--cpu", "--mixed-precision", "bf16")
MAKES_ACCELERATOR = "from headway import Accelerator; Accelerator()"


def test_two_ranks_of_a_plain_script_are_told_what_they_left_unused() -> None:
    sharded = ("--strategy", "fsdp", "--activation-checkpointing")
    plain = script("import torch; print('done')")
    done = launch(*BF16[1:], *sharded, "--num-processes", "2", plain)
    assert (done.returncode, done.stdout.count("done")) == (0, 2)
    (note,) = [line for line in done.stderr.splitlines() if "note:" in line]
    for name in ("bf16", "fsdp", "activation_checkpointing"):
        assert name in note
    assert "no rank joined a process group" in note


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
