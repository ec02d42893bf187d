"""Reads profiles and the environment into layers of unparsed values, one layer per source."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from headway.errors import ConfigError, Problem
from headway.ipc.origin import Layer, Origin
from headway.ipc.run_contract import (
    ALLOCATION_VARIABLE,
    CODE_VARIABLE,
    KEY_VARIABLE,
    LOG_LEVELS,
    RECORD_VARIABLE,
)
from headway.ipc.run_contract import VARIABLE as RUN_VARIABLE
from headway.settings.profile import Entries, Entry, read_profile
from headway.settings.profile_files import VARIABLE as PROFILE_VARIABLE
from headway.settings.profile_files import exists, find_project_profile, trusted_profile
from headway.settings.setting import VARIABLE_PREFIX
from headway.settings.table import TABLE

# not settings; in a nested launch, the outer launch set these variables
_NOT_SETTINGS = (
    *(RUN_VARIABLE, RECORD_VARIABLE, CODE_VARIABLE, ALLOCATION_VARIABLE, KEY_VARIABLE),
    PROFILE_VARIABLE,
    *LOG_LEVELS,
)

_HOST = "_SERVICE_HOST"
_OF_SERVICES = ("_SERVICE_", "_PORT")


def profiles_in_use(
    environ: Mapping[str, str] = os.environ, *, profile: str | None = None
) -> list[tuple[str, Layer]]:
    """Return the paths of the existing user and project profiles, in this order.

    `profile`, the value of --profile, selects the user profile by name or path.
    """
    user = trusted_profile(profile, environ)
    if user.chosen_by:
        user.must_exist()
    project = find_project_profile(trusted=user.path)
    if project is not None and os.path.realpath(user.path) == os.path.realpath(project):
        return [(project, Layer.PROJECT_PROFILE)]
    found = []
    if exists(user.path):
        found.append((user.path, Layer.USER_PROFILE))
    if project is not None:
        found.append((project, Layer.PROJECT_PROFILE))
    return found


def profile_layers(
    environ: Mapping[str, str] = os.environ, *, profile: str | None = None
) -> list[Entries]:
    """Return the layers of `profiles_in_use`; raise a ConfigError with all of their problems."""
    layers: list[Entries] = []
    problems: list[Problem] = []
    for path, layer in profiles_in_use(environ, profile=profile):
        try:
            layers.append(read_profile(path, layer))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError.of(problems)
    return layers


def launch_layers(
    profiles: Sequence[Entries], environ: Mapping[str, str], flags: Entries | None = None
) -> list[Entries]:
    """Return the layers of a launch in ascending precedence."""
    return [*profiles, environment_layer(environ), *([] if flags is None else [flags])]


def launch_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the names of the HEADWAY_* variables that only a launch reads."""
    found = [PROFILE_VARIABLE] if PROFILE_VARIABLE in environ else []
    for name, entry in environment_layer(environ).items():
        if name != "cluster":  # a rank reads it, too
            found.append(str(entry.origin.variable))
    return sorted(found)


def environment_layer(environ: Mapping[str, str] = os.environ) -> Entries:
    """Return the layer of the HEADWAY_* variables; the key of an unknown variable is its name.

    Variables that Kubernetes sets for a Service, such as HEADWAY_PORT, are ignored.
    Source: Kubernetes' documentation, environment variables of Services.
    """
    settings = {row.variable: name for name, row in TABLE.items()}
    services = [name.removesuffix(_HOST) for name in environ if name.endswith(_HOST)]
    of_services = tuple(f"{service}{end}" for service in services for end in _OF_SERVICES)
    return {
        settings.get(variable, variable): Entry(text, Origin(Layer.ENVIRONMENT, variable=variable))
        for variable, text in environ.items()
        if variable.startswith(VARIABLE_PREFIX)
        and variable not in _NOT_SETTINGS
        and (variable in settings or not variable.startswith(of_services))
    }
