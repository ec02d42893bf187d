"""Reads checkpoints of root as another user; prints one JSON object: what became of each attempt.

python -m tests.checkpoint.other_user FOLDER
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from headway import Accelerator
from headway.checkpoint.folders import listed_in
from headway.commands.main import main
from headway.errors import CheckpointError
from tests.another_user import NOBODY, become

GROUP = 54321  # of the user, beside its own
MODES = {  # of the folder, the folder of tensors, the files; the group that it belongs to
    "open": (0o755, 0o755, 0o644, 0),
    "of a group": (0o750, 0o750, 0o640, GROUP),
    "closed": (0o700, 0o755, 0o644, 0),
    "of another group": (0o750, 0o750, 0o640, 0),
    "closed tensors": (0o755, 0o700, 0o644, 0),
    "closed files": (0o755, 0o755, 0o600, 0),
}


def save(paths: dict[str, Path]) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(2, 1))
    for name, (mode, tensors, files, group) in MODES.items():
        accelerator.save_state(paths[name])
        for path in [*paths[name].rglob("*"), paths[name]]:
            is_file = path.is_file()
            path.chmod(files if is_file else tensors if path.name == "tensors" else mode)
            os.chown(path, 0, group)


def load(folder: Path) -> str:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(2, 1))
    accelerator.load_state(folder)
    return "loaded"


def resume(folder: Path) -> str:
    accelerator = Accelerator(cpu=True, project_dir=folder)
    accelerator.prepare(torch.nn.Linear(2, 1))
    return str(accelerator.resume().checkpoint)


def launch(folder: Path) -> str:
    """Return the exit code and the errors of a launch that is only planned."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        code = main(["launch", "--cpu", "--dry-run", "--resume", str(folder), "train.py"])
    return f"{code} {errors.getvalue()}"


def attempts(folder: Path, paths: dict[str, Path]) -> dict[str, Any]:
    return {
        "paths": {name: str(path) for name, path in paths.items()},
        "states": {str(one.path): one.state.value for one in listed_in(folder)},
        "load": {name: outcome(load, path) for name, path in paths.items()},
        "launch": {name: outcome(launch, path) for name, path in paths.items()},
        "resume": outcome(resume, folder),
    }


def outcome(call: Callable[[Path], str], path: Path) -> str:
    try:
        return call(path)
    except CheckpointError as error:
        return str(error)


if __name__ == "__main__":
    given = Path(sys.argv[1])
    os.chdir(given)
    Path("train.py").touch()
    checkpoints = {name: given / f"checkpoint_{number}" for number, name in enumerate(MODES)}
    save(checkpoints)
    become(NOBODY, GROUP)
    print(json.dumps(attempts(given, checkpoints)))
