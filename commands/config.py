"""`headway config --yes` writes what this machine is; `headway config show` explains settings."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from headway.commands.flags import Parser, look_at_machine, parse_alone
from headway.devices import DeviceSpec
from headway.errors import ConfigError, did_you_mean
from headway.machine import Machine
from headway.profile import read_profile, shown, user_profile_path, write_profile
from headway.resolve import environment_layer, profile_layers, resolve
from headway.settings import Settings


def main(argv: Sequence[str]) -> int:
    """Run `headway config` with these words and return the exit code."""
    if argv and not argv[0].startswith("-"):
        if argv[0] != "show":
            close = did_you_mean(argv[0], ["show"])
            raise ConfigError(
                f"{argv[0]!r} is no subcommand of `headway config`"
                + (f"; did you mean {close!r}?" if close else ""),
                where="the command line",
                fix="`headway config --yes` or `headway config show`",
            )
        return _show(argv[1:])
    parser = Parser("config", "Look at this machine and write its profile for this user.")
    parser.flag("--yes", help="write what was detected, without questions")
    parser.machine_flag()
    parsed = parse_alone(parser, argv)
    if not parsed.yes:
        raise ConfigError(
            "`headway config` cannot ask questions yet",
            where="the command line",
            fix="`headway config --yes` writes what was detected; edit the file afterwards",
        )
    return _write_detected(look_at_machine(parsed, os.environ)[0])


def _write_detected(machine: Machine) -> int:
    path = user_profile_path()
    values, reasons = detected_profile(machine)
    before = _values_before(path)
    write_profile(path, values, comment="\n".join(["Written by `headway config --yes`.", *reasons]))
    print(f"wrote {shown(path)}")
    for name, value in values.items():
        old = before.get(name)
        change = "" if old is None or old == str(value) else f"  (was {old})"
        print(f"  {name}: {value}{change}")
    for name in before.keys() - values.keys():
        print(f"  {name}: removed  (was {before[name]})")
    print("next: headway launch your_script.py")
    return 0


def detected_profile(machine: Machine) -> tuple[dict[str, object], list[str]]:
    """Return the profile that fits `machine` best, and the reasons in words."""
    settings = resolve([], machine, {})
    values: dict[str, object] = {
        "device": settings.device,
        "num_processes": settings.num_processes,
        "mixed_precision": "no",
    }
    reasons = [f"{name}: {settings.origin(name)}" for name in ("device", "num_processes")]
    if settings.device == "cuda" and all(gpu.capability >= (8, 0) for gpu in machine.visible_gpus):
        values["mixed_precision"] = "bf16"
        reasons.append("mixed_precision: every GPU computes in bf16")
    return values, reasons


def _values_before(path: str) -> dict[str, str]:
    if not os.path.lexists(path):
        return {}
    try:
        return {name: str(entry.raw) for name, entry in read_profile(path, "user profile").items()}
    except ConfigError as error:
        print(f"headway: the profile before was broken: {error.problems[0].what}", file=sys.stderr)
        return {}


def _show(argv: Sequence[str]) -> int:
    parser = Parser("config show", "Print every setting, its value and where it came from.")
    parser.flag("--json", help="as one JSON object")
    parser.machine_flag()
    parsed = parse_alone(parser, argv)
    machine, environ = look_at_machine(parsed, os.environ)
    settings = resolve([*profile_layers(), environment_layer(environ)], machine, environ)
    print(_as_json(settings) if parsed.json else _as_table(settings))
    return 0


def _as_json(settings: Settings) -> str:
    return json.dumps(
        {
            name: {
                "value": str(value) if isinstance(value, DeviceSpec) else value,
                "layer": origin.layer,
                "origin": origin.words,
            }
            for name, (value, origin) in settings.values.items()
        },
        indent=2,
    )


def _as_table(settings: Settings) -> str:
    from headway.launcher.describe import settings_table

    return "\n".join(settings_table(settings))
