"""What a tracker is: `GeneralTracker`, which scripts and adapters extend."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from headway.distributed.world import rank_and_size_without_group
from headway.errors import UsageError

Method = TypeVar("Method", bound=Callable[..., Any])


def on_main_process(function: Method) -> Method:
    """Make a method of a tracker run on rank 0 only, if the tracker is `main_process_only`.

    Examples:
        >>> from headway.tracking import GeneralTracker, on_main_process
        >>> class Printer(GeneralTracker):
        ...     name, requires_logging_directory, tracker = "printer", False, None
        ...     @on_main_process
        ...     def show(self, text):
        ...         print(text)
        >>> Printer().show("once")
        once
    """

    @functools.wraps(function)
    def runs_here(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_for_one = getattr(self, "main_process_only", False)
        if is_for_one and rank_and_size_without_group()[0] != 0:
            return None
        return function(self, *args, **kwargs)

    return cast(Method, runs_here)


class GeneralTracker:
    """The base of all trackers; a script's own is passed as `Accelerator(log_with=MyTracker())`.

    A subclass defines `name`, `requires_logging_directory` and `tracker`, and overrides the methods
    that it has something to do in.

    Attributes:
        name: by which `get_tracker` finds it.
        requires_logging_directory: the constructor takes `project_dir` after the project's name.
            Only a class that is registered under its name is constructed by the Accelerator.
        default_logging_directory: the folder where the Accelerator has no `project_dir`; a tracker
            that requires one and has no default is refused then.
        packages: modules of which one must be installed, where `log_with` has its name.
        main_process_only: only rank 0 calls it; otherwise every rank does.
        tracker: what the tracker wraps, such as the run of another package.
        run_id: identifies the run, so that another process can continue it; None: it cannot.

    Examples:
        >>> from headway.trackers.tracker import GeneralTracker
        >>> class Printer(GeneralTracker):
        ...     name = "printer"
        ...     requires_logging_directory = False
        ...     tracker = None
        ...     def log(self, values, step=None, **kwargs):
        ...         print(step, values)
        >>> tracker = Printer()
        >>> tracker.start()
        >>> tracker.store_init_configuration({"lr": 0.1})  # Printer has nothing to do in it
        >>> tracker.log({"loss": 0.5}, step=3)
        3 {'loss': 0.5}
        >>> Printer.resume_kwargs("run 7")  # a run of Printer has no name
        {}
        >>> tracker.finish()  # tracker.finish_after_error() where the script ends by an error
    """

    main_process_only = True
    default_logging_directory: str | None = None
    packages: tuple[str, ...] = ()
    run_id: str | None = None

    name: str
    requires_logging_directory: bool
    tracker: Any

    def __init__(self) -> None:
        required = ("name", "requires_logging_directory", "tracker")
        there = dir(self)  # and no hasattr: a property may need what start() makes
        missing = [name for name in required if name not in there]
        if missing:
            raise UsageError(
                f"the tracker {type(self).__name__} lacks {', '.join(missing)}",
                where=f"class {type(self).__qualname__} in {type(self).__module__}",
                fix="define them in the class",
            )

    @classmethod
    def resume_kwargs(cls, run_id: str) -> dict[str, Any]:
        """Return the constructor's keywords that continue the run with this `run_id`."""
        return {}

    def start(self) -> None:
        """Begin the run; called by `Accelerator.init_trackers`."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the run's hyperparameters; called by `Accelerator.init_trackers`, if it has any."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Add `values` to the run.

        Args:
            values: numbers and texts by name.
            step: the training step that they belong to.
            kwargs: `log_kwargs` of this tracker's name from `Accelerator.log`.
        """

    def finish(self) -> None:
        """End the run; called by `Accelerator.end_training`, or when the script ends."""

    def finish_after_error(self) -> None:
        """End the run of a script that ends by an exception; by default as any other."""
        self.finish()


class NoTracker(GeneralTracker):
    """Replaces a missing tracker: any attribute, call or item does nothing.

    It is false, where a tracker is true.
    """

    name = ""
    requires_logging_directory = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python and other packages ask of any object
            raise AttributeError(name)
        return self

    @property
    def tracker(self) -> NoTracker:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> NoTracker:
        return self

    def __getitem__(self, key: object) -> NoTracker:
        return self

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def __bool__(self) -> bool:
        return False


def flat_numbers(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return `values` as `python_numbers` does, nested ones with a slash in their names.

    {"train": {"loss": tensor(1.)}} is {"train/loss": 1.0}.
    """
    result: dict[str, Any] = {}
    for name, value in values.items():
        number = _python_number(value)
        if isinstance(number, dict):
            result |= flat_numbers(number, f"{prefix}{name}/")
        else:
            result[f"{prefix}{name}"] = number
    return result


def python_numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with tensors and arrays of one number as Python numbers, also nested ones."""
    return {name: _python_number(value) for name, value in values.items()}


def _python_number(value: Any) -> Any:
    if type(value) in (float, int, str):
        return value
    if isinstance(value, Mapping):
        return python_numbers(value)
    if getattr(value, "ndim", None) == 0 or getattr(value, "shape", None) == (1,):
        return value.item()
    return value
