"""What the system must allow for a launch: a working directory, open files, room for torch."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence

from headway.errors import LaunchError

_FOR_THREADS = 640 * 2**20  # bytes of address space for the stacks and heaps of a launcher's
_TRY_WITHIN_S = 120.0
_TRY = """
import resource, sys
limit = max(int(sys.argv[1]), 0)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
import torch.distributed
"""
_FILES, _FILES_PER_RANK = 40, 10  # that a launcher has open at most


def refuse_deleted_folder() -> None:
    """Refuse to start in a folder that is gone, where libraries of torch end the process.

    Raises:
        LaunchError: it has been deleted.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        raise LaunchError(
            "the working directory has been deleted",
            where="the shell of this launch",
            fix="`cd` to a folder that exists",
        ) from None


def refuse_too_few_files(num_ranks: int) -> None:
    """Refuse to start under a limit of open files in which torch may abort the launcher.

    Raises:
        LaunchError: the launcher needs more.
    """
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    needed = _FILES + _FILES_PER_RANK * num_ranks
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise LaunchError(
            f"{limit} open files are too few: a launcher of {num_ranks} ranks needs {needed}",
            where="the limit of this shell, `ulimit -n`",
            fix="raise it: `ulimit -n 4096`",
        )


def refuse_too_little_address_space(python: Sequence[str], environ: Mapping[str, str]) -> None:
    """Refuse to start under a limit of address space in which torch cannot be imported.

    Its libraries fail there in many ways, some of which end the process. Another process tries it
    first; without a limit nothing is tried.

    Args:
        python: the interpreter and its flags.
        environ: the variables that the ranks share.

    Raises:
        LaunchError: torch cannot be imported.
    """
    import resource

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return
    try:
        tried = subprocess.run(
            [*python, "-c", _TRY, str(limit - _FOR_THREADS)],
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="backslashreplace",
            timeout=_TRY_WITHIN_S,
        )
        said = (tried.stderr.strip() or f"exit code {tried.returncode}").splitlines()[-1]
        can_import = tried.returncode == 0
    except (OSError, subprocess.TimeoutExpired) as error:
        said, can_import = str(error), False
    if not can_import:
        raise LaunchError(
            f"{limit // 2**20} MiB of address space are too little to import torch: {said}",
            where="the limit of this shell, `ulimit -v`",
            fix="raise it: `ulimit -v unlimited`",
        )
