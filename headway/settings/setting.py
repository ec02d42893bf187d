"""The descriptor of a setting, and parsers of values."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar, overload

from headway.ipc.origin import Origin

if TYPE_CHECKING:
    from headway.settings.table import Settings

T = TypeVar("T")

Raw = str | Sequence[str] | Mapping[str, str]
"""An unparsed value: a string, or a list or map if it comes from YAML."""

_MAX_DIGITS = 9
_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}  # in seconds, largest first
_HOST = r"(\[(?P<bracketed>[^\s\[\]]+)\]|(?P<name>[^\s:\[\],]+))(:(?P<count>[^:\s]+))?$"
_NAME = r"[^\s:/@,\[\]]+"
_NO_HOST = "none"

VARIABLE_PREFIX = "HEADWAY_"
"""Prefix of the environment variables of settings."""

SET = "--set"
"""The flag that sets any setting: --set NAME=VALUE."""

AUTO = "auto"
"""The value that requests detection."""


class Value(NamedTuple):
    value: Any
    origin: Origin


Shape = Literal["one", "list", "map"]
"""Form of a value in a profile; maps are merged across layers."""

Scope = Literal["launcher", "machines", "gpus", "accelerator", "ranks", "hsdp", "shards", "blocks"]
"""The part of a launch that a setting affects; if the launch lacks this part, a note is logged.

launcher: a launcher that supervises the script; machines: launchers of a multi-node run; gpus;
accelerator: the script's Accelerator; ranks, hsdp, shards: an Accelerator with several ranks, hsdp
or sharding; blocks: an Accelerator with sharding or activation checkpointing.
"""


class Setting(Generic[T]):
    name: str

    def __init__(
        self,
        parse: Callable[[Raw], T],  # raises ValueError with the reason
        default: object,  # AUTO if it is detected
        help: str,  # one line for `--help` and the documentation
        *,
        metavar: str = "",  # placeholder of the value in `--help`
        shape: Shape = "one",
        needs_launcher: bool = False,  # True: a value other than the default requires a launcher
        applies_to: Scope | None = None,  # None: every launch
        has_flag: bool = True,  # False: set only with --set NAME=VALUE
        bare: str | None = None,  # value of the flag without an argument
        example: str | None = None,  # for messages; defaults to the default or the metavar
    ) -> None:
        self.parser = parse
        self.default = default
        self.help = help
        self.choices = parse.choices if isinstance(parse, Choice) else ()
        self.metavar = metavar or ("{" + ",".join(self.choices) + "}" if self.choices else "")
        self.shape = shape
        self.needs_launcher = needs_launcher
        self.applies_to = applies_to
        self.has_flag = has_flag
        self.bare = bare
        has_default = default is not None and shape != "map"
        self.example = example or (str(default) if has_default else metavar)

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, settings: None, owner: type) -> "Setting[T]": ...
    @overload
    def __get__(self, settings: "Settings", owner: type) -> T: ...
    def __get__(self, settings: "Settings | None", owner: type) -> "Setting[T] | T":
        if settings is None:
            return self
        value: T = settings.values[self.name].value
        return value

    @property
    def flag(self) -> str:
        """The flag of `headway launch`, such as --num-processes, or --set if there is none."""
        return "--" + self.name.replace("_", "-") if self.has_flag else SET

    def as_flag(self, value: object) -> str:
        """Return the arguments that set `value`: --num-processes 2, or --set restart_delay=2."""
        return f"{self.flag} {value}" if self.has_flag else f"{SET} {self.name}={value}"

    @property
    def variable(self) -> str:
        """The environment variable, such as HEADWAY_NUM_PROCESSES."""
        return VARIABLE_PREFIX + self.name.upper()

    def parse(self, raw: Raw) -> T | str:
        """Parse `raw`; AUTO is valid if it is the default.

        Raises ValueError with the reason as its message, such as "not a whole number".
        """
        if isinstance(raw, Mapping) and self.shape != "map":
            raise ValueError("expected a value, not a map")
        if self.default == AUTO and isinstance(raw, str) and raw.strip().lower() == AUTO:
            return AUTO
        return self.parser(raw)

    def accepts(self, raw: Raw) -> bool:
        try:
            self.parse(raw)
        except ValueError:
            return False
        return True

    def canonical(self, raw: Raw) -> Raw:
        """Return `raw`, a valid value, in the canonical form for profiles."""
        value = self.parse(raw)
        if isinstance(value, dict):
            return value
        return str(value) if isinstance(value, int) or self.choices else raw


def as_words(raw: Raw) -> str:
    """Return a value as typed on a command line."""
    if isinstance(raw, str):
        return raw
    if isinstance(raw, Mapping):
        import shlex

        return shlex.join(f"{name}={text}" for name, text in raw.items())
    return ",".join(raw) + ("," if len(raw) == 1 else "")


def read_text(raw: Raw) -> str:
    if not isinstance(raw, str):
        raise ValueError("expected a single value, not a list")
    if not raw.strip():
        raise ValueError("must not be empty")
    return raw


class Choice:
    """Parses one of `words` or an alias (`same`), ignoring case.

    `accepts` returns whether an unlisted word is valid.
    """

    def __init__(
        self,
        *words: str,
        same: Mapping[str, str] | None = None,
        accepts: Callable[[str], bool] | None = None,
    ) -> None:
        self.choices = words
        self._same = same or {}
        self._is_other = accepts or (lambda _: False)

    def __call__(self, raw: Raw) -> str:
        word = read_text(raw).strip().lower()
        word = self._same.get(word, word)
        if word not in self.choices and not self._is_other(word):
            raise ValueError(f"must be one of {', '.join(self.choices)}")
        return word


class Count:
    """Parses whole numbers from `minimum` to `maximum`, inclusive."""

    _what = "a whole number"

    def __init__(self, minimum: int, maximum: int | None = None) -> None:
        self.minimum = minimum
        self.maximum = maximum

    def __call__(self, raw: Raw) -> int:
        return self._checked(read_text(raw).strip())

    def _checked(self, text: str) -> int:
        digits = text.removeprefix("-")
        if not (digits.isdecimal() and digits.isascii()):
            raise ValueError(f"not {self._what}")
        number = int(text) if len(digits) <= _MAX_DIGITS else 10**_MAX_DIGITS
        if abs(number) >= 10**_MAX_DIGITS:
            raise ValueError("too large")
        if number < self.minimum or (self.maximum is not None and number > self.maximum):
            allowed = f"{self.minimum} or more"
            if self.maximum is not None:
                allowed = f"from {self.minimum} to {self.maximum}"
            raise ValueError(f"must be {allowed}")
        return number


class Machines(int):
    """A number of machines or a range; the value is the maximum and `least` the minimum."""

    least: int

    def __new__(cls, most: int, least: int | None = None) -> "Machines":
        self = super().__new__(cls, most)
        self.least = most if least is None else least
        return self

    def __str__(self) -> str:
        return f"{self.least}:{int(self)}" if self.is_range else str(int(self))

    __repr__ = __str__

    @property
    def is_range(self) -> bool:
        return self.least < int(self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, int):
            return False
        return int(self) == int(other) and self.least == getattr(other, "least", other)

    def __hash__(self) -> int:
        return super().__hash__()


class MachineCount(Count):
    """Parses 4, or 2:4 for 2 to 4 machines."""

    def __call__(self, raw: Raw) -> Machines:
        least, colon, most = read_text(raw).strip().partition(":")
        if not colon:
            return Machines(self._checked(least))
        try:
            found = Machines(self._checked(most.strip()), self._checked(least.strip()))
        except ValueError:
            reason = "not a number of machines, such as 4, or a range, such as 2:4"
            raise ValueError(reason) from None
        if found.least > found:
            raise ValueError("the range is descending")
        return found


class Seconds(Count):
    """Parses whole seconds, optionally with units: 90s, 10m, 3h55m, 1d12h."""

    _pattern = "^(?=[0-9])" + "".join(f"([0-9]+{unit})?" for unit in _UNITS) + "$"
    _what = "a whole number of seconds (600) or a duration (10m)"

    def __call__(self, raw: Raw) -> int:
        text = read_text(raw).strip()
        match = re.match(self._pattern, text)
        if match is None:
            return self._checked(text)
        parts = zip(match.groups(default="0"), _UNITS.values(), strict=True)
        seconds = sum(int(part[: _MAX_DIGITS + 1].rstrip("dhms")) * unit for part, unit in parts)
        return self._checked(str(seconds))


def read_ranks(raw: Raw) -> tuple[int, ...] | None:
    """Parse `0,3`, `0-3,8` or a YAML list of these; return None for `all`."""
    if isinstance(raw, str) and raw.strip().lower() == "all":
        return None
    ranks: set[int] = set()
    for part in raw.split(",") if isinstance(raw, str) else raw:
        first, dash, last = (word.strip() for word in part.partition("-"))
        ends = (first, last if dash else first)
        if not all(end.isdecimal() and end.isascii() and len(end) <= 6 for end in ends):
            raise ValueError(f"{part.strip()!r} is not a rank, such as 3, or a range, such as 0-3")
        if int(ends[0]) > int(ends[1]):
            raise ValueError(f"the range {part.strip()!r} is descending")
        ranks.update(range(int(ends[0]), int(ends[1]) + 1))
    return tuple(sorted(ranks))


class Host(NamedTuple):
    """An ssh host and its number of processes; if the number is None, the host detects it."""

    name: str
    num_processes: int | None = None

    def __str__(self) -> str:
        name = f"[{self.name}]" if ":" in self.name else self.name
        return name if self.num_processes is None else f"{name}:{self.num_processes}"


class Hosts(tuple[Host, ...]):
    """The hosts of a run, ordered by machine rank; if empty, the run uses only this machine."""

    __slots__ = ()

    def __str__(self) -> str:
        return ",".join(map(str, self)) or _NO_HOST


def read_host(raw: Raw) -> str:
    """Parse a host name or IP address; brackets are removed, so [::1] becomes ::1."""
    text = read_text(raw).strip()
    host = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    is_name = host == text and re.fullmatch(_NAME, host) is not None and host.isprintable()
    if not (is_name or _is_ip_address(host)):
        more = "; set its port with main_port" if re.search(r":\d+$", text) else ""
        raise ValueError(f"not a host name or IP address{more}")
    if host in ("0.0.0.0", "::", "255.255.255.255"):
        raise ValueError("a wildcard address: use an address that other machines can connect to")
    labels = host.removesuffix(".").split(".")
    if ":" not in host and (len(host) > 253 or not all(0 < len(label) < 64 for label in labels)):
        raise ValueError("not a host name: it is too long, or has an empty or overlong part")
    if host.lower().startswith("fe80:") and "%" not in host:
        raise ValueError("a link-local address: add this machine's interface, as in fe80::1%eth0")
    return host


def _is_ip_address(host: str) -> bool:
    from ipaddress import ip_address

    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def read_hosts(raw: Raw) -> Hosts:
    """Parse `a,b:2`, a YAML list of these, `[::1]:2`, or `none`."""
    if isinstance(raw, str) and raw.strip().lower() == _NO_HOST:
        return Hosts()
    words = raw.split(",") if isinstance(raw, str) else raw
    hosts = [_read_host(word.strip()) for word in words]
    if not hosts:
        raise ValueError("contains no host")
    names = [host.name for host in hosts]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ValueError(f"lists {', '.join(twice)} twice")
    return Hosts(hosts)


def _read_host(word: str) -> Host:
    match = re.match(_HOST, word)
    name = (match["bracketed"] or match["name"]) if match else ""
    # ssh parses a word that starts with a dash as an option
    if match is None or name.startswith("-") or not name.isprintable():
        raise ValueError(f"{word!r} is not HOST or HOST:PROCESSES, such as node1 or node1:2")
    if match["count"] is None:
        return Host(name)
    try:
        return Host(name, Count(1)(match["count"]))
    except ValueError as error:
        what = f"invalid process count {match['count']!r} in {word!r}: {error}"
        raise ValueError(what) from None


def read_path(raw: Raw) -> str:
    from os.path import expanduser

    if "\0" in (path := read_text(raw)):
        raise ValueError("contains a null byte")
    if "$" in path:
        raise ValueError("contains '$', but variables are not expanded, only '~'")
    return expanduser(path)


def read_variables(raw: Raw) -> dict[str, str]:
    """Parse a YAML map or shell-quoted NAME=VALUE words."""
    words = [] if isinstance(raw, Mapping) else _words(raw)
    for number, word in enumerate(words, 1):
        if "=" not in word:  # do not print the word, which may be part of a secret
            raise ValueError(f"word {number} is not NAME=VALUE")
    variables = _pairs(raw, words)
    for name, value in variables.items():
        if not name or "=" in name or "\0" in name + value:
            raise ValueError(f"{name!r} is not a valid variable name, or contains a null byte")
    return variables


def read_options(raw: Raw) -> dict[str, str]:
    """Parse long options of sbatch: a YAML map, or shell-quoted KEY=VALUE and KEY words."""
    parts = [] if isinstance(raw, Mapping) else [raw] if isinstance(raw, str) else raw
    options = _pairs(raw, [word.removeprefix("--") for part in parts for word in _words(part)])
    for key, value in options.items():
        if not re.fullmatch(r"[a-z][a-z0-9-]+", key):
            raise ValueError(f"{key!r} is not a long option of sbatch")
        if not value.isprintable():
            raise ValueError(f"{key} contains unprintable characters")
    if re.fullmatch(r"\d+[smhd].*", time := options.get("time", "")):
        hours, seconds = divmod(Seconds(1)(time), 3600)
        clock = f"{hours % 24:02}:{seconds // 60:02}:{seconds % 60:02}"
        options["time"] = f"{hours // 24}-{clock}"  # SLURM's format
    return options


def _words(raw: str | Sequence[str]) -> Sequence[str]:
    import shlex

    try:
        return shlex.split(raw) if isinstance(raw, str) else raw
    except ValueError:
        raise ValueError("unclosed quote") from None


def _pairs(raw: Raw, words: Sequence[str]) -> dict[str, str]:
    """Return the pairs of a map or of KEY=VALUE words."""
    if isinstance(raw, Mapping):
        return dict(raw)
    pairs = [word.partition("=")[::2] for word in words]
    names = [name for name, _ in pairs]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        verb = "is" if len(twice) == 1 else "are"
        raise ValueError(f"{', '.join(twice)} {verb} set twice: keep one value of each")
    return dict(pairs)
