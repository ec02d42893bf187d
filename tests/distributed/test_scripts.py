"""Scripts as users write them run unchanged: for torchrun, for plain Python, and with libraries.

A script for torchrun finds a world of one where `--num-processes 1` is typed; a script that makes
its own processes finds plain Python where it is not.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.distributed.launching import executed, launch

pytestmark = pytest.mark.distributed

SCRIPTS = Path(__file__).with_name("scripts")
FOR_TORCHRUN = ("ddp.py", "store.py", "tensor_parallel.py")
WITH_OWN_PROCESSES = {
    "mp_process.py": (),
    "nodes.py": ("--multiprocessing-distributed",),
    "lightning_two.py": (),
}
NEEDS = {
    "lightning_two.py": "lightning",
    "accelerate_own.py": "accelerate",
    "transformers_trainer.py": "transformers",
}
QUICK = {("ddp.py", 1), ("ddp.py", 2)}
"""Those that run without --long: by script, and processes."""


def rows(*cases: tuple[str, int]) -> list[object]:
    marks = {case: [] if case in QUICK else [pytest.mark.long] for case in cases}
    for (name, _), those in marks.items():
        if name in NEEDS:
            is_missing = find_spec(NEEDS[name]) is None
            those.append(pytest.mark.skipif(is_missing, reason=f"needs {NEEDS[name]}"))
    return [pytest.param(*case, marks=those) for case, those in marks.items()]


def trained(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return what the ranks say at the end, without our prefixes, in order."""
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.replace("trained: ", "\n").splitlines()
    return sorted(line.strip() for line in lines if line.startswith("rank "))


@pytest.mark.parametrize(
    ("name", "count"), rows(*((name, count) for name in FOR_TORCHRUN for count in (1, 2)))
)
def test_a_script_for_torchrun_runs_with_the_number_of_processes_that_the_flag_gives(
    name: str, count: int
) -> None:
    done = launch("-q", "--cpu", "--num-processes", str(count), str(SCRIPTS / name))
    assert trained(done) == [f"rank {rank} of {count}" for rank in range(count)]


@pytest.mark.parametrize(("name", "_"), rows(*((name, 1) for name in WITH_OWN_PROCESSES)))
def test_a_script_that_makes_its_own_processes_makes_them_under_the_default(
    name: str, _: int
) -> None:
    Path("headway.yaml").write_text("num_processes: 1\n")
    done = launch("-q", "--cpu", str(SCRIPTS / name), *WITH_OWN_PROCESSES[name])
    assert trained(done) == ["rank 0 of 2", "rank 1 of 2"]


@pytest.mark.parametrize(
    ("name", "count"),
    rows(
        *(("lightning_two.py", 2), ("accelerate_own.py", 1), ("accelerate_own.py", 2)),
        *(("transformers_trainer.py", 1), ("transformers_trainer.py", 2)),
    ),
)
def test_a_library_of_its_own_runs_as_many_ranks_as_the_launcher_started(
    name: str, count: int
) -> None:
    words = () if count == 1 else ("--num-processes", str(count))
    with executed():  # Accelerate's imports in a fork can stand still
        done = launch("-q", "--cpu", "--mixed-precision", "bf16", *words, str(SCRIPTS / name))
    found = [line.removesuffix(" in bf16") for line in trained(done)]
    assert found == [f"rank {rank} of {count}" for rank in range(count)]
    assert "headway: note:" not in done.stderr


@pytest.mark.long
def test_a_script_for_torchrun_fails_as_under_plain_python_where_no_rank_was_asked_for() -> None:
    name = str(SCRIPTS / "ddp.py")
    plain = subprocess.run([sys.executable, name], capture_output=True, text=True, timeout=120)
    with executed():  # a fork has its own frames in the traceback
        done = launch("-q", "--cpu", name)
    assert (done.returncode, done.stderr) == (plain.returncode, plain.stderr)
