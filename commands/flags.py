"""Command-line flags, derived from the settings table; `-` and `_` are equivalent in names."""

import os
from collections.abc import Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

from headway.errors import Code, ConfigError, did_you_mean
from headway.ipc.origin import Layer, Origin
from headway.ipc.stderr import log
from headway.machine.detection import detect_machine
from headway.machine.facts import Machine, load_machine
from headway.settings.problems import SETTING_OF
from headway.settings.profile import Entries, Entry
from headway.settings.setting import SET
from headway.settings.table import TABLE, TOPICS

Parsed = SimpleNamespace
"""The parsed values, by the name of their setting or flag."""


def usage_error(what: str, *, fix: str, code: str = Code.COMMAND_LINE) -> ConfigError:
    return ConfigError(what, where="the command line", fix=fix, code=code)


class Flag(NamedTuple):
    name: str  # long form
    short: str | None
    options: dict[str, Any]  # keyword arguments for argparse
    heading: str = ""  # heading in --help
    is_last: bool = False  # no flag may follow
    default_value: str | None = None  # used if an optional value is omitted

    @property
    def takes_value(self) -> bool:
        return "metavar" in self.options


_HELP = Flag("--help", "-h", {})
_SHARED: Mapping[str, Any] = {
    "--profile": {"metavar": "NAME", "help": "profile to use: a name or a path"},
    "--show-secrets": {  # for commands that print the variables of `env`
        "help": "print the values of variables that look like secrets, such as HF_TOKEN"
    },
    "--machine": {  # for commands that can use a recorded machine
        "metavar": "FILE",
        "help": "plan for the machine recorded in FILE by `headway env --json`",
    },
}


class Parser:
    """A parser that accepts no abbreviations, and raises ConfigError instead of exiting.

    argparse is used only for --help: importing it and adding the flags takes a tenth of the launch
    time.
    """

    def __init__(
        self, command: str, description: str, usage: str | None = None, appendix: str = ""
    ) -> None:
        self.command = command
        self.prog = f"headway {command}"
        self._description = description
        self._usage = usage
        self._appendix = appendix  # printed unchanged at the end of --help
        self._flags: list[Flag] = []
        self.known = {"--help": _HELP, "-h": _HELP}  # flags by spelling
        self.brief: Collection[str] = ()  # the flags that `-h` lists; empty: all

    def format_help(self, *, is_brief: bool = False) -> str:
        from argparse import ArgumentParser, HelpFormatter

        parser = ArgumentParser(
            prog=self.prog,
            description=self._description,
            usage=self._usage,
            formatter_class=lambda prog: HelpFormatter(prog, max_help_position=34, width=96),
        )
        parser._optionals.title = "flags"
        flags = [flag for flag in self._flags if not is_brief or flag.name in self.brief]
        headings = dict.fromkeys(flag.heading for flag in flags if flag.heading)
        groups = {heading: parser.add_argument_group(heading) for heading in headings}
        for flag in flags:
            options, spellings = flag.options, [*filter(None, (flag.short, flag.name))]
            if flag.default_value is not None:
                spellings = [f"{flag.name}[={options['metavar']}]"]
                options = {"dest": flag.name, "action": "store_true", "help": options["help"]}
            groups.get(flag.heading, parser).add_argument(*spellings, **options)
        all_flags = f"\n`{self.prog} --help` lists all flags.\n" * is_brief
        return parser.format_help() + self._appendix + all_flags

    def flag(
        self,
        name: str,
        *,
        short: str | None = None,
        is_last: bool = False,
        heading: str = "",
        default_value: str | None = None,
        **options: Any,
    ) -> None:
        """Add a flag. With `metavar`, it takes a value; with `is_last`, no flag may follow it.

        `--help` lists flags by heading, starting with the flags that have no heading.

        With a `default_value`, the value is optional and must be passed with "=", so that the
        script is never mistaken for the value.
        """
        has_value = "metavar" in options
        usual = {
            "dest": name[2:].replace("-", "_"),
            "default": None if has_value else False,
            "action": "store" if has_value else "store_true",
        }
        flag = Flag(name, short, {**usual, **options}, heading, is_last, default_value)
        self._flags.append(flag)
        self.known |= {spelling: flag for spelling in (name, short) if spelling}

    def shared_flags(self, *names: str, heading: str = "") -> None:
        for name in names:
            self.flag(name, heading=heading, **_SHARED[name])

    def setting_flags(self, topics: Collection[str] = tuple(TOPICS)) -> None:
        """Add --set and the flags of the settings in these topics; all flags default to None."""
        self.flag(
            SET,
            heading="plan",
            metavar="NAME=VALUE",
            action="append",
            help="set any setting, including settings without a flag (repeatable)",
        )
        for heading in topics:
            for row in (TABLE[name] for name in TOPICS[heading] if TABLE[name].has_flag):
                options: dict[str, Any] = {"metavar": row.metavar, "help": row.help}
                if row.choices:
                    options["choices"] = row.choices
                if row.shape == "map":
                    options |= {"action": "append", "help": f"{row.help} (repeatable)"}
                self.flag(
                    row.flag, heading=heading, dest=row.name, default_value=row.bare, **options
                )

    def split(self, argv: Sequence[str]) -> tuple[list[str], list[str]]:
        """Split `argv` into the launcher's flags, spelled with dashes, and the remaining words.

        The second part starts at the first word that is neither a flag nor a flag's value.

        Raises:
            ConfigError: a flag is unknown, or its value is missing.
        """
        own: list[str] = []
        words = list(argv)
        while words and words[0].startswith("-") and words[0] not in ("-", "--"):
            name, equals, value = words.pop(0).partition("=")
            name = "--" + name[2:].replace("_", "-") if name.startswith("--") else name
            flag = self.known.get(name)
            if flag is None:
                follows = words[0] if words and not words[0].startswith("-") else ""
                self._raise_unknown(name, value if equals else follows, own)
            if not equals and flag.default_value is not None:
                value = flag.default_value
            elif flag.takes_value and not equals:
                if not words:
                    self.error(f"{name} requires a value")
                value = words.pop(0)
            elif equals and not flag.takes_value:
                raise usage_error(
                    f"{name} takes no value, but got {value!r}", fix=f"pass {name} without a value"
                )
            # with "=", because a value may start with a dash
            own.append(f"{flag.name}={value}" if flag.takes_value else name)
            if flag.is_last:
                break
        return own, words

    def parse_args(self, own: Sequence[str]) -> Parsed:
        """Parse the flags that `split` returned; for --help, print the help and exit."""
        values = {flag.options["dest"]: flag.options["default"] for flag in self._flags}
        for word in own:
            spelling, equals, text = word.partition("=")
            if spelling in ("--help", "-h"):
                print(self.format_help(is_brief=bool(self.brief) and word == "-h"), end="")
                raise SystemExit(0)
            options = self.known[spelling].options
            value: object = text if equals else True
            if options["action"] == "append":
                value = [*(values[options["dest"]] or ()), text]
            values[options["dest"]] = value
        return Parsed(**values)

    def parse_words(self, argv: Sequence[str]) -> tuple[Parsed, list[str]]:
        """Parse a command line of flags and other words in any order."""
        own: list[str] = []
        words: list[str] = []
        rest = list(argv)
        while rest:
            flags, rest = self.split(rest)
            own += flags
            is_over = rest[:1] == ["--"]  # only words follow
            words += rest[1:] if is_over else rest[:1]
            rest = [] if is_over else rest[1:]
        return self.parse_args(own), words

    def parse_flags(self, argv: Sequence[str]) -> Parsed:
        """Parse a command line that consists of flags only."""
        parsed, words = self.parse_words(argv)
        if words:
            self.error(f"unexpected argument {words[0]!r}")
        return parsed

    def parse_flag(self, argv: Sequence[str], what: str) -> tuple[Parsed, str | None]:
        """Parse a command line of flags and at most one other word."""
        parsed, words = self.parse_words(argv)
        if len(words) > 1:
            self.error(f"{self.prog} takes one {what}, but got {len(words)} words")
        return parsed, words[0] if words else None

    def error(self, message: str) -> NoReturn:
        raise usage_error(message, fix=f"see `{self.prog} --help`")

    def note_on_value(self, own: Sequence[str]) -> str:
        """Return a note if the last flag's value is a file or flag, as after an empty variable."""
        spelling, equals, value = own[-1].partition("=") if own else ("", "", "")
        is_odd = equals and (value in self.known or os.path.isfile(value))
        return f"; {value!r} was read as the value of {spelling}" if is_odd else ""

    def _raise_unknown(self, name: str, value: str, own: Sequence[str]) -> NoReturn:
        from headway.commands.flag_aliases import other_tool_flag

        takes_settings = TABLE["num_processes"].flag in self.known
        if takes_settings and (foreign := other_tool_flag(name, value)) is not None:
            what, fix = foreign
            raise usage_error(f"{name} {what}", fix=fix)
        setting = TABLE.get(name.removeprefix("--").replace("-", "_"))
        if "--set" in self.known and setting is not None:
            fix = f"pass {setting.as_flag(value or setting.metavar)}"
            raise usage_error(f"unknown flag {name}: this setting has no flag", fix=fix)
        if setting is not None:
            raise usage_error(
                f"unknown flag {name} for `{self.prog}`, which reads settings from profiles",
                fix=f"run `headway config set {setting.name}={value or 'VALUE'}`, or set "
                f"{setting.variable} for this command",
            )
        names = {flag.removeprefix("--"): flag for flag in self.known}
        close = names.get(did_you_mean(name.removeprefix("--"), names) or "", "")
        fix = f"see `{self.prog} --help`"
        if close:
            flag = self.known[close]
            has_value = flag.takes_value and flag.default_value is None
            fix = f"pass {close} {value}".rstrip() if has_value else f"pass {close}"
        if self.command == "launch":
            of_script = "put the script's flags after its name" + self.note_on_value(own)
            fix = f"{fix}, or {of_script}" if close else of_script
            if os.path.isfile(name):
                fix = f"write ./{name} for a script whose name starts with a dash"
        if " " in name:
            close, fix = "", "remove the quotes around several flags, which make them one word"
        raise usage_error(
            f"unknown flag {name} for `{self.prog}`"
            + (f"; did you mean {close}?" if close else ""),
            fix=fix,
        )


def flag_layer(parsed: Parsed) -> dict[str, Entry]:
    given = {name: getattr(parsed, name, None) for name in TABLE}
    layer = {
        name: Entry(raw, Origin(Layer.FLAG, flag=TABLE[name].flag))
        for name, raw in given.items()
        if raw is not None
    }
    for word in parsed.set or ():
        name, equals, raw = word.partition("=")
        if not equals:
            raise usage_error(f"{word!r} is not NAME=VALUE", fix=f"pass {SET} record=off")
        if name in layer:
            raise usage_error(f"{name} is set twice", fix="remove one of them")
        layer[name] = Entry(raw, Origin(Layer.FLAG, flag=f"{SET} {name}"))
    return layer


def machine_from_flags(
    parsed: Parsed,
    environ: Mapping[str, str],
    *,
    full: bool = False,
    layers: Sequence[Entries] = (),
) -> tuple[Machine, Mapping[str, str]]:
    """Return the recorded or detected machine to plan for, and its environment variables.

    A recorded machine has only the variables that affect training. If no flag sets the device, the
    device set in `layers` is detected. Raises ConfigError for an invalid recording.
    """
    if parsed.machine is None:
        named = [str(layer["device"].raw) for layer in layers if "device" in layer]
        device = "cpu" if getattr(parsed, "cpu", False) else getattr(parsed, "device", None)
        device = device or (named[-1] if named else "auto")
        return detect_machine(environ, full=full, device=device), environ
    machine = load_machine(parsed.machine)
    read_here = (*(row.variable for row in TABLE.values()), *SETTING_OF, "SLURM_JOB_ID")
    ignored = [name for name in read_here if name in environ]
    if ignored:
        log(
            f"note: {', '.join(ignored)} in this shell "
            f"{'does' if len(ignored) == 1 else 'do'} not apply with --machine {parsed.machine}"
        )
    return machine, machine.host.variables if machine.host else {}
