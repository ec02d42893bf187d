"""Reads profiles and the environment into layers: one for each source, with unparsed values."""

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
from headway.settings.profile_files import find_project_profile, is_there, trusted_profile
from headway.settings.setting import VARIABLE_PREFIX
from headway.settings.table import TABLE

# a launch inside a launch: the outer run's contract is not a setting of this one
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
    """Return the paths of the user's and the project's profile, in this order, if they exist.

    `profile`, the value of --profile, is the user's, by name or path.
    """
    user = trusted_profile(profile, environ)
    if user.chosen_by:
        user.must_exist()
    project = find_project_profile(trusted=user.path)
    if project is not None and os.path.realpath(user.path) == os.path.realpath(project):
        return [(project, Layer.PROJECT_PROFILE)]
    found = []
    if is_there(user.path):
        found.append((user.path, Layer.USER_PROFILE))
    if project is not None:
        found.append((project, Layer.PROJECT_PROFILE))
    return found


def profile_layers(
    environ: Mapping[str, str] = os.environ, *, profile: str | None = None
) -> list[Entries]:
    """Return the layers of `profiles_in_use`; raise all errors in their text at once."""
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
    """Return the sources of a launch from the weakest to the strongest; a later one overrides."""
    return [*profiles, environment_layer(environ), *([] if flags is None else [flags])]


def environment_layer(environ: Mapping[str, str] = os.environ) -> Entries:
    """Return the layer of the HEADWAY_* variables; unknown ones keep their name as the key.

    Those of a Kubernetes Service, such as HEADWAY_PORT, which pods of its namespace have, are not
    ours. Source: Kubernetes' documentation, environment variables of Services.
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
