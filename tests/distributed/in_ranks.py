"""Runs functions of test files in real ranks (gloo), without a launcher.

The checks of a file run in its order, in one start for each number of ranks:

    pytestmark = marks(__name__)

    @with_ranks(2, 3)
    def test_a_fact() -> None:  # asserted in each rank
        assert gather(torch.tensor(RANK)).tolist() == [*range(WORLD)]

    @in_ranks(1, 2)
    def weights() -> list[float]:  # weights(2): what each of two ranks returned
        ...
"""

from __future__ import annotations

import gc
import inspect
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache, wraps
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.distributed import launching
from tests.waiting import IS_LONG

RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
LIMIT_S = 3500 if IS_LONG else 280  # beside other tests on a busy machine
_LAST_S = 60  # for the other ranks, when one has ended
T = TypeVar("T")
Check = Callable[[], Any]

_checks: dict[str, list[tuple[Check, Sequence[int]]]] = {}  # by file
_roots: list[Path] = []  # one: where the ranks have their folders


def marks(module: str) -> list[pytest.MarkDecorator]:
    """Return the marks of a file with checks: one worker starts its ranks, for all its tests."""
    limit = pytest.mark.timeout(LIMIT_S + 20)
    return [pytest.mark.distributed, pytest.mark.xdist_group(module), limit]


def each_world(*worlds: int, long: Sequence[int] = ()) -> pytest.MarkDecorator:
    """Give a test the argument `world`; some numbers of ranks are for --long only."""
    rare = [pytest.param(case, marks=pytest.mark.long) for case in long]
    return pytest.mark.parametrize("world", [*worlds, *rare])


def in_ranks(*worlds: int) -> Callable[[Callable[[], T]], Callable[[int], list[T]]]:
    """Make of a function one that returns what it returned in each of so many ranks."""

    def decorate(check: Callable[[], T]) -> Callable[[int], list[T]]:
        _checks.setdefault(check.__module__, []).append((check, worlds))

        def seen(world: int) -> list[T]:
            ranks = _seen_in_ranks(check.__module__, world)
            errors = [error for found, error in ranks if check.__name__ not in found]
            assert not errors, "\n".join(errors)
            return [found[check.__name__] for found, _ in ranks]

        return seen

    return decorate


def with_ranks(
    *worlds: int, long: Sequence[int] = ()
) -> Callable[[Callable[[], None]], Callable[[int], None]]:
    """Make a test of a function that asserts in each of so many ranks; see each_world()."""

    def decorate(check: Callable[[], None]) -> Callable[[int], None]:
        seen = in_ranks(*worlds, *long)(check)

        @wraps(check)
        def test(world: int) -> None:
            seen(world)

        world = inspect.Parameter("world", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([world])  # type: ignore[attr-defined]
        marked: Callable[[int], None] = each_world(*worlds, long=long)(test)
        return marked

    return decorate


def of_all_ranks(value: T) -> list[T]:
    """Return what each rank has; all of them call this."""
    from headway.utils import gather_object

    return list(gather_object([value]))


def set_root(folder: Path) -> None:
    """Give the ranks of all files a folder for theirs: FILE/WORLD."""
    _roots[:] = [folder]


@cache
def _seen_in_ranks(module: str, world: int) -> list[tuple[dict[str, Any], str]]:
    folder = _roots[0] / module / str(world)
    folder.mkdir(parents=True)
    try:
        return run_in_ranks(world, folder, run_checks, module)
    except AssertionError as error:  # kept: the ranks are started once
        return [({}, str(error))]


def run_checks(module: str) -> tuple[dict[str, Any], str]:
    """In a rank: run the checks of a file, each without the state of those before.

    Returns:
        What they returned, by their names, up to the first error, and the text of that error.
    """
    import torch

    from headway import Accelerator
    from headway.state import AcceleratorState, GradientState

    torch.set_num_threads(1)
    __import__(module)
    gc.freeze()  # some checks collect garbage often, and imports are none
    seen: dict[str, Any] = {}
    try:
        for check, worlds in _checks[module]:
            if WORLD in worlds:
                AcceleratorState._reset_state(reset_partial_state=True)
                GradientState._reset_state()
                seen[check.__name__] = check()
    except Exception as error:  # noqa: BLE001 - any may be the one that a test shows
        shown = traceback.TracebackException.from_exception(error, capture_locals=True)
        return seen, f"rank {RANK} of {WORLD}:\n{''.join(shown.format())}"
    Accelerator().end_training()
    assert not torch.distributed.is_initialized()
    return seen, ""


def run_in_ranks(
    world: int,
    folder: Path,
    function: Callable[..., T],
    *arguments: object,
    limit_s: float = LIMIT_S,
) -> list[T]:
    """Return what a function returns in each of so many ranks, which work in this folder."""
    (folder / "call.pickle").write_bytes(pickle.dumps((function, arguments)))
    results = [folder / f"result-{rank}.pickle" for rank in range(world)]
    logs = [folder / f"output-{rank}.txt" for rank in range(world)]
    codes = _run(world, folder, logs, time.monotonic() + limit_s)
    said = [f"rank {rank} said:\n{log.read_text()}" for rank, log in enumerate(logs)]
    assert codes == [0] * world, f"the ranks ended with {codes}:\n" + "\n".join(said)
    return [pickle.loads(result.read_bytes()) for result in results]


def _run(world: int, folder: Path, logs: Sequence[Path], deadline: float) -> list[int | None]:
    """Start the ranks, and return with what each has ended; None: not at its time."""
    port, command = launching.free_port(), [sys.executable, "-m", __name__]
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory())  # short, for sockets in it
        ranks = []
        for rank, log in enumerate(logs):
            env = environment(rank, world, port) | {"TMPDIR": scratch}
            out = stack.enter_context(log.open("w"))
            ranks.append(launching.popen(command, env=env, cwd=folder, stdout=out, stderr=out))
            stack.callback(ranks[-1].wait)
            stack.callback(ranks[-1].kill)
        codes = [rank.poll() for rank in ranks]
        while None in codes and time.monotonic() < deadline:
            if any(code is not None for code in codes):
                deadline = min(deadline, time.monotonic() + _LAST_S)
            time.sleep(0.02)
            codes = [rank.poll() for rank in ranks]
    return codes


def environment(rank: int = 0, world: int = 1, port: int = 0) -> dict[str, str]:
    """Return the variables of a rank; alone it has none of its own."""
    foreign = ("HEADWAY_", "ACCELERATE_", "COV_CORE")
    usual = launching.environment(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    plain = {name: value for name, value in usual.items() if not name.startswith(foreign)}
    if world == 1:
        return plain
    return plain | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


if __name__ == "__main__":
    folder = Path.cwd()  # the function may leave it
    called, given = pickle.loads((folder / "call.pickle").read_bytes())
    (folder / f"result-{RANK}.pickle").write_bytes(pickle.dumps(called(*given)))
