"""Resolves `log_with` to tracker classes, and checks whether their packages are installed."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from enum import Enum
from importlib.util import find_spec
from typing import Any

from headway.errors import Code, UsageError, did_you_mean
from headway.trackers.adapters import (
    MLflowTracker,
    TensorBoardTracker,
    TrackioTracker,
    WandBTracker,
)
from headway.trackers.jsonl import JsonlTracker
from headway.trackers.project import Folder
from headway.trackers.tracker import GeneralTracker

CALL = "the script's Accelerator(log_with=...)"


class LoggerType(str, Enum):
    """The names accepted by `log_with`; each member is equal to its string value.

    AIM, CLEARML, COMETML, DVCLIVE and SWANLAB are rejected, because Headway does not have adapters
    for these packages.

    Examples:
        >>> from headway import Accelerator
        >>> from headway.tracking import LoggerType
        >>> Accelerator(cpu=True, log_with=LoggerType.JSONL).log_with
        ['jsonl']
    """

    ALL = "all"
    JSONL = "jsonl"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"
    COMETML = "comet_ml"
    MLFLOW = "mlflow"
    AIM = "aim"
    CLEARML = "clearml"
    DVCLIVE = "dvclive"
    SWANLAB = "swanlab"

    def __str__(self) -> str:
        return self.value


_OWN = (JsonlTracker, TensorBoardTracker, WandBTracker, TrackioTracker, MLflowTracker)
LOGGER_TYPE_TO_CLASS: dict[str, type[GeneralTracker]] = {tracker.name: tracker for tracker in _OWN}
"""Headway's tracker classes and registered classes, by the names that `log_with` accepts."""


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Register a tracker class for `log_with`, replacing any class with the same name.

    The Accelerator calls the class with the project name, the logging directory if required, and
    the tracker's `init_kwargs`. Replacing a class issues a UserWarning.

    Args:
        tracker_class: a subclass of GeneralTracker.

    Raises:
        UsageError: `tracker_class` is not a GeneralTracker with `name` and
            `requires_logging_directory`.

    Examples:
        >>> from headway import Accelerator
        >>> from headway.tracking import GeneralTracker, register_tracker_class
        >>> class Printer(GeneralTracker):
        ...     name, requires_logging_directory, tracker = "printer", False, None
        ...     def __init__(self, project_name):
        ...         super().__init__()
        >>> register_tracker_class(Printer)
        >>> Accelerator(cpu=True, log_with="printer").log_with
        ['printer']
    """
    is_tracker = isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)
    has_name = is_tracker and bool(getattr(tracker_class, "name", None))
    if not has_name or not hasattr(tracker_class, "requires_logging_directory"):
        raise UsageError(
            f"{tracker_class!r} cannot be registered as a tracker",
            where="the script's register_tracker_class(...)",
            fix="pass a subclass of GeneralTracker with name and requires_logging_directory",
            code=Code.TRACKER,
        )
    name = tracker_class.name
    if name in LOGGER_TYPE_TO_CLASS:
        before = LOGGER_TYPE_TO_CLASS[name].__qualname__
        warnings.warn(
            f"the tracker {name!r} was {before}; replacing it with {tracker_class.__qualname__}",
            UserWarning,
            stacklevel=2,
        )
    LOGGER_TYPE_TO_CLASS[name] = tracker_class


def get_available_trackers() -> list[str]:
    """Return the names of the installed and registered trackers.

    Examples:
        >>> from headway.tracking import get_available_trackers
        >>> "jsonl" in get_available_trackers()
        True
    """
    return [
        name
        for name, kind in LOGGER_TYPE_TO_CLASS.items()
        if not kind.packages or any(map(_is_installed, kind.packages))
    ]


Chosen = str | GeneralTracker


def choose_trackers(log_with: Any) -> list[Chosen]:
    chosen: list[Chosen] = []
    if log_with is None:
        return chosen
    for choice in log_with if isinstance(log_with, (list, tuple, set)) else [log_with]:
        for found in get_available_trackers() if choice == LoggerType.ALL else [_checked(choice)]:
            if found not in chosen:
                chosen.append(found)
    return chosen


def _checked(wanted: Any) -> Chosen:
    if isinstance(wanted, GeneralTracker):
        return wanted
    name = str(wanted)
    if name not in LOGGER_TYPE_TO_CLASS:
        raise _unknown(wanted)
    if name not in get_available_trackers():
        package = LOGGER_TYPE_TO_CLASS[name].packages[0]
        raise UsageError(
            f"log_with={name!r} needs {package}, which is not installed",
            where=CALL,
            fix=f"run `pip install {package}`, or use log_with='jsonl', which is built in",
            code=Code.NOT_INSTALLED,
        )
    return name


def _unknown(wanted: Any) -> UsageError:
    own = "pass an instance of your own GeneralTracker subclass"
    if wanted in list(LoggerType):
        what, fix = f"Headway has no adapter for {str(wanted)!r}", f"{own}, or use log_with='jsonl'"
    else:
        guess = did_you_mean(str(wanted), get_available_trackers())
        what = f"unknown tracker {wanted!r} in log_with"
        hint = f"did you mean {guess!r}? " if guess else ""
        fix = f"{hint}use one of {', '.join(map(repr, LOGGER_TYPE_TO_CLASS))}, 'all', or {own}"
    return UsageError(what, where=CALL, fix=fix, code=Code.TRACKER)


def check_names(names: Iterable[str], where: str, chosen: Iterable[Chosen]) -> None:
    """Raise UsageError for unknown tracker names; accept known trackers that are not in use."""
    own = [choice.name for choice in chosen if isinstance(choice, GeneralTracker)]
    known = [*own, *LoggerType.__members__.values(), *LOGGER_TYPE_TO_CLASS]
    for name in names:
        if name not in known:
            guess = did_you_mean(name, known)
            raise UsageError(
                f"unknown tracker {name!r} in {where}",
                where=f"the script's call with {where}=...",
                fix=f"did you mean {guess!r}?" if guess else "remove it",
                code=Code.TRACKER,
            )


def folders_of(kind: type[GeneralTracker], logging_dir: Folder) -> list[Folder]:
    """Return the constructor's folder arguments; raise UsageError if a folder is missing."""
    if not kind.requires_logging_directory:
        return []
    folder = logging_dir or kind.default_logging_directory
    if folder is None:
        raise UsageError(
            f"log_with={kind.name!r} needs a folder for its files",
            where=CALL,
            fix='pass project_dir, for example Accelerator(log_with=..., project_dir="runs")',
            code=Code.NO_FOLDER,
        )
    return [folder]


def _is_installed(package: str) -> bool:
    spec = find_spec(package)
    # a spec without an origin is a folder, such as `wandb`, to which wandb writes its files
    return spec is not None and spec.origin is not None
