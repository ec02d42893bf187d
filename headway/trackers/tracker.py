"""`GeneralTracker`, the base class of trackers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from headway.distributed.world import rank_and_size_without_group
from headway.errors import Code, UsageError

Method = TypeVar("Method", bound=Callable[..., Any])


def on_main_process(function: Method) -> Method:
    """Make a tracker method run on rank 0 only, if the tracker sets `main_process_only`.

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
    """Base class of trackers; pass your own as `Accelerator(log_with=MyTracker())`.

    A subclass defines `name`, `requires_logging_directory` and `tracker`, and overrides the methods
    that it needs.

    Attributes:
        name: the name for `get_tracker`.
        requires_logging_directory: whether the constructor takes the logging directory after the
            project name. The Accelerator calls the constructors of registered classes only.
        default_logging_directory: the folder used if the Accelerator has no `project_dir`. If it is
            None, `project_dir` is required.
        packages: modules, at least one of which must be installed to select the tracker by name.
        main_process_only: whether only rank 0 calls the tracker; otherwise, every rank calls it.
        tracker: the wrapped object, such as the run of another package.
        run_id: an ID with which another process can continue the run; None if unsupported.

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
        >>> tracker.store_init_configuration({"lr": 0.1})  # Printer does not override it
        >>> tracker.log({"loss": 0.5}, step=3)
        3 {'loss': 0.5}
        >>> Printer.resume_kwargs("run 7")  # runs of Printer cannot be continued
        {}
        >>> tracker.finish()  # or tracker.finish_after_error() if the script fails
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
        there = dir(self)  # not hasattr: a property may require start()
        missing = [name for name in required if name not in there]
        if missing:
            raise UsageError(
                f"the tracker {type(self).__name__} does not define {', '.join(missing)}",
                where=f"class {type(self).__qualname__} in {type(self).__module__}",
                fix="define them in the class",
                code=Code.TRACKER,
            )

    @classmethod
    def resume_kwargs(cls, run_id: str) -> dict[str, Any]:
        """Return the keyword arguments with which the constructor continues the run `run_id`."""
        return {}

    def start(self) -> None:
        """Start the run; called by `Accelerator.init_trackers`."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the run's hyperparameters; called if a config is passed to `init_trackers`."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log `values` to the run.

        Args:
            values: numbers and strings by name.
            step: the training step.
            kwargs: the entries for this tracker in the `log_kwargs` of `Accelerator.log`.
        """

    def finish(self) -> None:
        """Finish the run; called by `Accelerator.end_training`, or at exit."""

    def finish_after_error(self) -> None:
        """Finish the run after an exception in the script; calls `finish` by default."""
        self.finish()


class NoTracker(GeneralTracker):
    """A falsy object in place of a missing tracker; its attributes and calls have no effect."""

    name = ""
    requires_logging_directory = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # looked up by Python and other packages on any object
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
    """Flatten `values`, joining nested names with "/"; convert numbers with `python_numbers`.

    {"train": {"loss": tensor(1.)}} becomes {"train/loss": 1.0}.
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
    """Convert one-element tensors and arrays, including nested ones, to Python numbers."""
    return {name: _python_number(value) for name, value in values.items()}


def _python_number(value: Any) -> Any:
    if type(value) in (float, int, str):
        return value
    if isinstance(value, Mapping):
        return python_numbers(value)
    if getattr(value, "ndim", None) == 0 or getattr(value, "shape", None) == (1,):
        return value.item()
    return value
