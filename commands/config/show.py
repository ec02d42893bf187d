"""`headway config show | get | path | list`: print settings and profiles."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from headway.commands.config.check import launch_problems
from headway.commands.flags import Parsed, Parser, machine_from_flags
from headway.commands.tables import print_table
from headway.errors import Code, ConfigError, Problem, did_you_mean
from headway.ipc.origin import Layer
from headway.ipc.paths import user_folder
from headway.ipc.secrets import masked_value
from headway.ipc.stderr import log
from headway.ipc.stderr import shown as printable
from headway.launcher.clusters.cluster_settings import cluster_layer
from headway.launcher.plan.describe import settings_table
from headway.launcher.plan.plan import text_of
from headway.machine.devices import DeviceSpec
from headway.settings.profile import (
    choose_profile,
    exists,
    find_project_profile,
    profile_names,
    read_profile,
    shown,
)
from headway.settings.resolve import launch_layers, parse_layers, profile_layers, resolve
from headway.settings.setting import as_words
from headway.settings.table import TABLE, Settings


def show(argv: Sequence[str]) -> int:
    parser = Parser("config show", "Print every setting with the value that a launch would use.")
    parser.flag("--origin", help="also print where each value comes from")
    parser.flag("--json", help="print one JSON object, with the origins")
    parser.shared_flags("--show-secrets", "--profile", "--machine")
    parsed = parser.parse_flags(argv)
    settings, problems = _resolved(parsed)
    # without rich, which would take 80 ms, more than the rest of the command
    print(_as_json(settings) if parsed.json else settings_table(settings, parsed.origin))
    for problem in problems:
        log(f"note: a launch would fail: {problem.what}")
    return 0


def _resolved(parsed: Parsed) -> tuple[Settings, Sequence[Problem]]:
    """Return the settings to show, and the problems that a launch with them would have."""
    machine, environ = machine_from_flags(parsed, os.environ)
    layers = launch_layers(profile_layers(profile=parsed.profile), environ)
    cluster = cluster_layer(environ, layers)
    settings = resolve(layers, machine, environ, cluster)
    shown = settings if parsed.show_secrets else settings.without_secrets()
    return shown, launch_problems(layers, machine, environ, cluster)


def _as_json(settings: Settings) -> str:
    return json.dumps(
        {
            name: {
                "value": str(value) if isinstance(value, DeviceSpec) else value,
                "layer": origin.layer.label,
                "origin": str(origin),
            }
            for name, (value, origin) in settings.values.items()
        },
        indent=2,
    )


def get(argv: Sequence[str]) -> int:
    """Print the value that a launch would use for a setting."""
    parser = Parser("config get", "Print the value that a launch would use for a setting.")
    parser.shared_flags("--show-secrets", "--profile", "--machine")
    parsed, name = parser.parse_flag(argv, "KEY")
    if name is None or name not in TABLE:
        close = did_you_mean(name or "", TABLE)
        raise ConfigError(
            f"{name!r} is not a setting" if name else "no setting given",
            where="the command line",
            fix=f"run `headway config {f'get {close}' if close else 'show'}`",
            code=Code.COMMAND_LINE,
        )
    print(text_of(_resolved(parsed)[0].values[name].value))
    return 0


def path(argv: Sequence[str]) -> int:
    """Print the path of the profile in use, whether or not it exists."""
    parser = Parser("config path", "Print the path of your profile, whether or not it exists.")
    parser.shared_flags("--profile")
    print(choose_profile(parser.parse_flags(argv).profile).path)
    return 0


def list_profiles(argv: Sequence[str]) -> int:
    """Print the profiles of this user and of the project; a star marks the profiles in use."""
    parser = Parser("config list", "List your profiles and the project's; * marks those in use.")
    parser.parse_flags(argv)
    chosen = choose_profile()
    folder = user_folder("config")
    rows = [(name, os.path.join(folder, f"{name}.yaml")) for name in profile_names(folder)]
    if chosen.path not in [path for _, path in rows]:
        rows.append((chosen.name, chosen.path))
    try:
        project = find_project_profile(trusted=chosen.path)
    except ConfigError as error:
        project = None
        log(f"note: {error.problems[0].what}")
    if project not in (None, chosen.path):
        rows.append(("(project)", project))
    stars = ["*" if path in (chosen.path, project) else "" for _, path in rows]
    cells = [(name, shown(path), _settings_in(path)) for name, path in rows]
    print_table(
        ("", "profile", "file", "settings"),
        [(star, *map(printable, row)) for star, row in zip(stars, cells, strict=True)],
    )
    return 0


def _settings_in(path: str) -> str:
    """Return the profile's settings on one line, or the reason why they cannot be read."""
    if not exists(path):
        return "does not exist: run `headway config` to write it"
    try:
        entries = read_profile(path, Layer.PROFILE)
        parse_layers([entries])
    except ConfigError as error:
        return f"error: {error.problems[0].what}"
    values = {name: masked_value(name, entry.raw) for name, entry in entries.items()}
    return ", ".join(f"{name} {as_words(value)}" for name, value in values.items())
