"""Every setting, declared once: type, default, choices, help; flags, profile keys, environment
names, `--help` and messages are derived from it.

`Settings` is both the table (its class attributes) and, as an instance, one resolved set of typed
values, each with its origin. No dataclasses here or elsewhere on the launch path: importing them
takes a fifth of the time that a whole launch may take.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum, auto
from typing import Any, Generic, NamedTuple, TypeVar, overload

from headway.contract.origin import Layer, Origin
from headway.contract.precisions import PRECISIONS
from headway.contract.run import DEVICES
from headway.errors import Code, Do, Problem, Remedy, Step, described
from headway.machine.devices import ALL, DeviceSpec, parse_devices

T = TypeVar("T")

Raw = str | Sequence[str] | Mapping[str, str]
"""An unparsed value: a string from a flag or a variable; from YAML also a list or a map."""

YES, NO = "yes", "no"

AUTO = "auto"
"""The value that is replaced by one detected from the machine."""


LINES, RAW = "lines", "raw"
"""How the ranks' output is shown."""


class Value(NamedTuple):
    """A setting's value and its origin."""

    value: Any
    origin: Origin


class Shape(Enum):
    """How a value may be written in a profile."""

    ONE = auto()  # one value
    LIST = auto()  # or a list of values
    MAP = auto()  # or a map of values, merged across layers


class Setting(Generic[T]):
    """One row of the table.

    Args:
        parse: turns a raw value into the setting's type; raises ValueError with the reason.
        default: the value when the setting is not set; AUTO if it is detected.
        help: one line for `--help` and the documentation.
        metavar: how the value is written in `--help`.
        shape: what a profile may contain besides one value.
        needs_launcher: a value other than the default needs the launcher to supervise the script.
        bare: the value of a flag that is given without one.
    """

    name: str

    def __init__(
        self,
        parse: Callable[[Raw], T],
        default: object,
        help: str,
        *,
        metavar: str = "",
        shape: Shape = Shape.ONE,
        needs_launcher: bool = False,
        bare: str | None = None,
    ) -> None:
        self.kind = parse
        self.default = default
        self.help = help
        self.choices = parse.choices if isinstance(parse, Choice) else ()
        self.metavar = metavar or ("{" + ",".join(self.choices) + "}" if self.choices else "")
        self.shape = shape
        self.needs_launcher = needs_launcher
        self.bare = bare

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, settings: None, owner: type) -> Setting[T]: ...
    @overload
    def __get__(self, settings: Settings, owner: type) -> T: ...
    def __get__(self, settings: Settings | None, owner: type) -> Setting[T] | T:
        if settings is None:
            return self
        value: T = settings.values[self.name].value
        return value

    @property
    def flag(self) -> str:
        """The flag of `headway launch`: --num-processes."""
        return "--" + self.name.replace("_", "-")

    @property
    def example(self) -> str:
        """A valid value, for messages."""
        if self.default is None and isinstance(self.kind, Count):
            return str(self.kind.minimum)
        if self.default is None or self.shape is Shape.MAP:
            return self.metavar
        return str(self.default)

    @property
    def variable(self) -> str:
        """The environment variable: HEADWAY_NUM_PROCESSES."""
        return "HEADWAY_" + self.name.upper()

    def parse(self, raw: Raw) -> T | str:
        """Return the parsed value of `raw` (AUTO if the setting allows it).

        Raises:
            ValueError: it is invalid; the message continues "<name> is <raw>, ".
        """
        if self.default == AUTO and isinstance(raw, str) and raw.strip().lower() == AUTO:
            return AUTO
        return self.kind(raw)

    def canonical(self, raw: Raw) -> Raw:
        """Return `raw` in the form that profiles are written in: stripped, and in lower case.

        Raises:
            ValueError: as `parse` does.
        """
        value = self.parse(raw)
        return str(value) if isinstance(value, int) or self.choices else raw


def _text(raw: Raw) -> str:
    if not isinstance(raw, str):
        kind = "map" if isinstance(raw, Mapping) else "list"
        raise ValueError(f"which is a {kind}, not one value")
    if not raw.strip():
        raise ValueError("which is empty")
    return raw


class Choice:
    """Parses one of `words`, ignoring case.

    Args:
        words: the valid values.
        same: aliases, and the one of `words` that each stands for.
        or_auto: the setting also accepts AUTO.
    """

    def __init__(
        self, *words: str, same: Mapping[str, str] | None = None, or_auto: bool = False
    ) -> None:
        self.choices = (AUTO, *words) if or_auto else words
        self._possible = (*words, AUTO) if or_auto else words
        self._words = words
        self._same = same or {}

    def __call__(self, raw: Raw) -> str:
        word = _text(raw).strip().lower()
        word = self._same.get(word, word)
        if word not in self._words:
            raise ValueError(f"but it must be one of {', '.join(self._possible)}")
        return word


class Count:
    """Parses whole numbers from `minimum` to `maximum`, both included."""

    def __init__(self, minimum: int, maximum: int | None = None) -> None:
        self.minimum = minimum
        self.maximum = maximum

    def __call__(self, raw: Raw) -> int:
        text = _text(raw).strip()
        digits = text.removeprefix("-")
        if not (digits.isdecimal() and digits.isascii()):
            raise ValueError("which is not a whole number")
        if len(digits) > 9:
            raise ValueError("which is too large")
        number = int(text)
        if number < self.minimum or (self.maximum is not None and number > self.maximum):
            allowed = f"{self.minimum} or more"
            if self.maximum is not None:
                allowed = f"from {self.minimum} to {self.maximum}"
            raise ValueError(f"but it must be {allowed}")
        return number


def _ranks(raw: Raw) -> tuple[int, ...] | None:
    """Read 0,3 or 0-3,8 or a YAML list of such; None is all of them."""
    if isinstance(raw, Mapping):
        raise ValueError("which is a map, not a list of ranks")
    if isinstance(raw, str) and raw.strip().lower() == "all":
        return None
    ranks: set[int] = set()
    for part in raw.split(",") if isinstance(raw, str) else raw:
        first, dash, last = (word.strip() for word in part.partition("-"))
        ends = (first, last if dash else first)
        if not all(end.isdecimal() and end.isascii() and len(end) <= 6 for end in ends):
            raise ValueError(f"in which {part.strip()!r} is neither a rank (3) nor a range (0-3)")
        if int(ends[0]) > int(ends[1]):
            raise ValueError(f"in which {part.strip()!r} is a range whose end is below its start")
        ranks.update(range(int(ends[0]), int(ends[1]) + 1))
    return tuple(sorted(ranks))


def _devices(raw: Raw) -> DeviceSpec:
    if isinstance(raw, Mapping):
        raise ValueError("which is a map, not a count or a list of indices")
    return parse_devices(raw)


def _path(raw: Raw) -> str:
    from os.path import expanduser

    if "\0" in _text(raw):
        raise ValueError("which contains a null byte")
    return expanduser(_text(raw))


def _host(raw: Raw) -> str:
    host = _text(raw)
    if any(char.isspace() or not char.isprintable() for char in host):
        raise ValueError("which is neither a host name nor an IP address")
    return host


def _variables(raw: Raw) -> dict[str, str]:
    """Read a YAML map, or NAME=VALUE words quoted as in a shell."""
    if isinstance(raw, Mapping):
        pairs = list(raw.items())
    else:
        import shlex

        try:
            words = shlex.split(raw) if isinstance(raw, str) else raw
        except ValueError:
            raise ValueError("in which a quote is not closed") from None
        for number, word in enumerate(words, 1):
            if "=" not in word:  # it may be part of a secret
                raise ValueError(f"in which word {number} is not NAME=VALUE")
        pairs = [(name, value) for name, _, value in (word.partition("=") for word in words)]
        names = [name for name, _ in pairs]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"in which {twice[0]} is set twice")
    for name, value in pairs:
        if not name or "=" in name or "\0" in name + value:
            raise ValueError(f"in which {name!r} is not a valid variable name")
    return dict(pairs)


class Settings:
    """The table of all settings; an instance holds one resolved value for each."""

    device = Setting(
        Choice(*DEVICES, or_auto=True),
        AUTO,
        "device to run on; gpu is cuda, or mps on a Mac",
    )
    devices = Setting[DeviceSpec](
        _devices,
        ALL,
        "which GPUs: a count (2), a list (0,2 or 0-3), ^2 (all but 2), UUIDs, idle:2, or all",
        metavar="SPEC",
        shape=Shape.LIST,
    )
    num_processes = Setting(
        Count(1),
        AUTO,
        "processes on this machine: a number, or auto (one for each GPU, else one)",
        metavar="N",
    )
    mixed_precision = Setting(
        # false and off are how YAML tools write the unquoted `no` back
        Choice(*PRECISIONS, same={"false": "no", "off": "no"}),
        "no",
        "precision of the forward pass",
    )
    mps_fallback = Setting(
        Choice("on", "strict", or_auto=True),
        AUTO,
        "operators not implemented for MPS: run on the CPU (on), or raise an error (strict)",
    )
    gradient_accumulation_steps = Setting(
        Count(1), 1, "micro-batches for each optimizer step", metavar="N"
    )
    threads_per_process = Setting(
        Count(1),
        AUTO,
        "CPU threads of each process: a number, or auto (usable cores / processes)",
        metavar="N",
    )
    num_machines = Setting(
        Count(1),
        AUTO,
        "machines in this run: a number, or auto (from the cluster's variables, else 1)",
        metavar="M",
    )
    machine_rank = Setting(
        Count(0),
        AUTO,
        "rank of this machine, from 0 (auto: from the cluster's variables, else 0)",
        metavar="R",
    )
    main_address = Setting[str | None](
        _host,
        AUTO,
        "host name or IP address of machine 0 (auto: from the cluster's variables)",
        metavar="HOST",
    )
    main_port = Setting[int | None](
        Count(1, 65535),
        AUTO,
        "port on machine 0 (auto: from the cluster's variables, else 29500; on one machine any "
        "free port)",
        metavar="PORT",
    )
    max_restarts = Setting(
        Count(0),
        0,
        "how often to restart all processes after a failure",
        metavar="N",
        needs_launcher=True,
    )
    restart_delay = Setting(
        Count(0, 60),
        1,
        "seconds before the first restart; doubled with every failure up to 60, until the run "
        "makes progress",
        metavar="S",
    )
    grace_period_s = Setting(
        Count(0, 86400),
        30,
        "seconds that ranks have to stop after the stop signal, before they are killed; unless "
        "set, 5 at most for those that stop because another one failed. After a success, how long "
        "to wait for processes that the ranks have left",
        metavar="S",
    )
    leave_children = Setting(
        Choice(YES, NO, same={"true": YES, "on": YES, "false": NO, "off": NO}),
        NO,
        "after a success, let processes that the ranks have left run on (yes), instead of ending "
        "them after the grace period",
        bare=YES,
    )
    hang_timeout = Setting[int | None](
        Count(1),
        None,
        "end the run, with the stacks of all ranks, after this many seconds without progress",
        metavar="S",
        needs_launcher=True,
    )
    log_dir = Setting[str | None](
        _path,
        None,
        "folder for one log file per process",
        metavar="DIR",
        needs_launcher=True,
    )
    ranks = Setting[tuple[int, ...] | None](
        _ranks,
        None,
        "ranks whose output is shown on the console: 0,3 or 0-3 or all",
        metavar="0,3",
        shape=Shape.LIST,
    )
    output = Setting(
        Choice(LINES, RAW),
        LINES,
        "what ranks print: whole lines that start with the rank (lines), where a progress bar in "
        "a file is a line every 10 s; or every byte as it comes (raw)",
    )
    debug_rank = Setting[int | None](
        Count(0),
        None,
        "rank that gets the terminal, for breakpoint() and pdb; the others' output is hidden, and "
        "torch's default timeouts are disabled, but not those that the script sets. Ctrl-C "
        "interrupts the rank; twice within a second, it ends the run",
        metavar="R",
    )
    start_method = Setting(
        Choice("fork", "exec", or_auto=True),
        AUTO,
        "how ranks start: forked from a process that has imported torch (fork), or each in a new "
        "interpreter (exec)",
    )
    env = Setting[dict[str, str]](
        _variables,
        {},
        "environment variable to set for the script",
        metavar="NAME=VALUE",
        shape=Shape.MAP,
    )

    def __init__(self, values: Mapping[str, Value], unread: Collection[str] = ()) -> None:
        """Store `values`; those of the settings in `unread` are placeholders for invalid values."""
        self.values = values
        self.unread = unread

    def without_secrets(self) -> Settings:
        """Return the settings with the secrets in `env` masked, to be shown."""
        from headway.contract.secrets import masked_map

        env = self.values["env"]
        return Settings(
            {**self.values, "env": env._replace(value=masked_map(env.value))}, self.unread
        )

    def origin(self, name: str) -> Origin:
        """Return where the value of the setting `name` came from."""
        return self.values[name].origin

    def where(self, *names: str) -> str:
        """Return where the values of these settings came from, for a message."""
        return "; ".join(f"{name}: {self.origin(name)}" for name in names)

    def are_user_set(self, *names: str) -> bool:
        """Return whether the user set all of these."""
        return all(self.origin(name).is_user_set for name in names)

    def is_overridden(self, name: str, by: str) -> bool:
        """Return whether `by` was set in a layer of higher precedence than `name`."""
        return self.origin(name).layer.is_weaker_than(self.origin(by).layer)

    def problem(
        self, code: Code, what: str, remedies: Sequence[Remedy], *names: str
    ) -> list[Problem]:
        """Return a problem of these settings, the first of which is the one to change.

        Empty if one of them is invalid: that is reported already, and may be the cause.
        """
        settings = [name.partition(".")[0] for name in names]
        if any(name in self.unread for name in settings):
            return []
        fix = described(remedies, self._how_to)
        where = self.where(*settings)
        return [Problem(what, where, fix, code=code, names=names, remedies=tuple(remedies))]

    def _how_to(self, step: Step) -> str:
        """Return how to take a step where the setting was set."""
        name, _, variable = step.what.partition(".")
        if name not in TABLE:
            return str(step)
        row, layer = TABLE[name], self.origin(name).layer
        is_profile = layer in (Layer.PROFILE, Layer.USER_PROFILE, Layer.PROJECT_PROFILE)
        if step.do is Do.SET and layer is Layer.ENVIRONMENT:
            text = f"`export {row.variable}={step.value}`"
        elif step.do is Do.SET and not (is_profile or layer is Layer.ANSWERS):
            text = f"pass {row.flag} {step.value}"
        elif variable:
            held = {Layer.ENVIRONMENT: row.variable, Layer.FLAG: row.flag}.get(layer, f"`{name}`")
            text = f"remove {variable} from {held}"
        elif step.do is Do.REMOVE and layer is Layer.ENVIRONMENT:
            text = f"`unset {row.variable}`"
        elif step.do is Do.REMOVE and layer is Layer.FLAG:
            text = f"leave {self.origin(name).flag or row.flag} out"
        else:
            return str(step)
        return f"{text}, {step.note}" if step.note else text


TABLE: Mapping[str, Setting[Any]] = {
    name: row for name, row in vars(Settings).items() if isinstance(row, Setting)
}
