"""The built-in tracker, which writes one file per run, and one line for each call to `log`."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import IO, Any

from headway.distributed.handler import checked
from headway.errors import Code, UsageError
from headway.ipc.progress import process_progress
from headway.ipc.records import METRICS
from headway.ipc.stderr import log, shown
from headway.trackers.run_file import MARK, RESUMED, SUFFIX, VERSION, is_run, line_of
from headway.trackers.tracker import GeneralTracker, flat_numbers, on_main_process, python_numbers


class JsonlTracker(GeneralTracker):
    """Writes a run to `<logging_dir>/<run_name>/<date>-<time>-<process id>.jsonl`.

    Each line is written immediately, so that no line is lost in a crash. `headway why --html`
    plots the file; `headway/trackers/run_file.py` describes its format.

    Args:
        run_name: the project name.
        logging_dir: the parent folder of all projects.
        run_id: append to the file with this name (without its suffix); if there is no such file,
            start a new run.

    Examples:
        >>> from headway.tracking import JsonlTracker
        >>> tracker = JsonlTracker("digits", "runs")
        >>> tracker.start()
        >>> tracker.store_init_configuration({"lr": 0.1})
        >>> tracker.log({"loss": 0.5}, step=1)
        >>> tracker.finish()
    """

    name = "jsonl"
    requires_logging_directory = True
    default_logging_directory = "runs"

    def __init__(
        self, run_name: str, logging_dir: str | os.PathLike[str], run_id: str | None = None
    ) -> None:
        super().__init__()
        own = os.path.relpath(os.path.join(logging_dir, run_name), logging_dir)
        if Path(own).parts[:1] == (os.pardir,):
            raise UsageError(
                f"invalid value {run_name!r} for project_name: the folder would not be inside"
                f" {os.fspath(logging_dir)!r}",
                where="the script's init_trackers(...)",
                fix="pass a name without '..', and set Accelerator(project_dir=...)",
                code=Code.BAD_ARGUMENT,
            )
        self.run_name = run_name
        self.logging_dir = logging_dir
        self.run_id = run_id
        self._file: IO[bytes] | None = None
        self._has_head = False
        self._is_torn = False  # whether the file ends in a partial line

    @classmethod
    def resume_kwargs(cls, run_id: str) -> dict[str, Any]:
        return {"run_id": run_id}

    @on_main_process
    def start(self) -> None:
        folder = Path(self.logging_dir) / self.run_name
        folder.mkdir(parents=True, exist_ok=True)
        if self.run_id is not None:
            self._append_to(folder, f"{self.run_id}{SUFFIX}")
        if self._file is None:
            self._file = _create(folder)
        self.run_id = self.path.stem
        process_progress().note_output_path(METRICS, str(self.path))

    def _append_to(self, folder: Path, name: str) -> None:
        path = folder / name
        is_file = path.parent == folder and path.is_file() and not path.is_symlink()
        if not (is_file and is_run(path)):
            log(f"jsonl starts a new run: {shown(str(path))} is not a run file")
            return
        with path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            self._is_torn = file.read() != b"\n"
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115
        self._has_head = True
        self._write({"time": _now(), RESUMED: True})

    @property
    def path(self) -> Path:
        """The run's file."""
        return Path(self._open_file().name)

    tracker = path

    def _open_file(self) -> IO[bytes]:
        if self._file is None:
            raise UsageError(
                "the jsonl tracker has no file: it was not started, or this is not rank 0",
                where="the script's use of the tracker",
                fix="call init_trackers(...) first, and use the tracker on rank 0",
                code=Code.TRACKER,
            )
        return self._file

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Write hyperparameters, which may be nested; values unsupported by JSON become strings."""
        self._write({"time": _now(), "config": python_numbers(values)})

    @checked
    def log(  # type: ignore[override]  # no further keywords
        self, values: dict[str, Any], step: float | None = None
    ) -> None:
        """Write a line; nested names are joined with "/", and one-element tensors become numbers.

        Args:
            values: numbers and strings by name; arrays of at most 1000 elements become lists.
            step: the training step.
        """
        if self._file is not None:  # other ranks have no file
            self._write({"step": step, "time": _now(), "values": flat_numbers(values)})

    @on_main_process
    def finish(self) -> None:
        if not self._has_head:
            self._write_head({})
        self._open_file().close()

    def _write(self, fields: dict[str, Any]) -> None:
        if not self._has_head:
            self._write_head(fields.get("config", {}))
            if "config" in fields:
                return
        self._append(line_of(fields))

    def _write_head(self, config: dict[str, Any]) -> None:
        fields = {MARK: VERSION, "project": self.run_name, "time": _now(), "config": config}
        self._append(line_of(fields))
        self._has_head = True

    def _append(self, line: bytes) -> None:
        whole = b"\n" + line if self._is_torn else line
        self._is_torn = self._open_file().write(whole) != len(whole)
        if self._is_torn:  # the next write raises the actual error
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))


def _create(folder: Path) -> IO[bytes]:
    """Create the file of a new run; append a number to its name if another run has that name."""
    name, number = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}", 1
    while True:
        extra = "" if number == 1 else f"-{number}"
        try:
            return open(folder / f"{name}{extra}{SUFFIX}", "xb", buffering=0, opener=_appending)
        except FileExistsError:
            number += 1


def _appending(path: str, flags: int) -> int:
    """Open a file for appending, so that processes never overwrite each other's lines."""
    return os.open(path, flags | os.O_APPEND, 0o666)


def _now() -> float:
    return round(time.time(), 3)
