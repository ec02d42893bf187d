"""What profiles and the environment say, each source a layer of settings that are still text."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from headway.contract.origin import Layer, Origin
from headway.contract.run import VARIABLE as RUN_VARIABLE
from headway.errors import ConfigError, Problem
from headway.settings.profile import Entries, Entry, read_layer
from headway.settings.profile_files import VARIABLE as PROFILE_VARIABLE
from headway.settings.profile_files import choose_profile, find_project_profile, is_there
from headway.settings.table import TABLE

# a launch inside a launch: the outer run's contract is not a setting of this one
_NO_SETTINGS = (RUN_VARIABLE, PROFILE_VARIABLE)


def profile_layers(
    environ: Mapping[str, str] = os.environ, folder: str = ".", profile: str | None = None
) -> list[Entries]:
    """Return what the user's and the project's profile say, in this order, where they exist.

    Args:
        environ: read for HEADWAY_PROFILE and XDG_CONFIG_HOME.
        folder: where the search for the project's `headway.yaml` starts.
        profile: the value of --profile: which of the user's profiles, by name or path.

    Raises:
        ConfigError: they are broken (all that is wrong at once), or the user's was named and is
            not there.
    """
    user = choose_profile(profile, environ)
    if user.chosen_by:
        user.must_exist()
    project = find_project_profile(folder, trusted=user.path)
    is_project = project and os.path.realpath(user.path) == os.path.realpath(project)
    files = [(user.path, Layer.USER_PROFILE)] if is_there(user.path) and not is_project else []
    files += [(project, Layer.PROJECT_PROFILE)] if project is not None else []
    layers: list[Entries] = []
    problems: list[Problem] = []
    for path, layer in files:
        try:
            layers.append(read_layer(path, layer))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError.of(problems)
    return layers


def overruled(layers: Sequence[Entries]) -> list[str]:
    """Return a sentence for each value of the first layer that a later one replaces."""
    return [
        f"{name} of {entry.origin} gives way to {stronger[name].origin}"
        for name, entry in (layers[0] if layers else {}).items()
        for stronger in layers[1:]
        if name in stronger and stronger[name].raw != entry.raw and name != "env"
    ]


def environment_layer(environ: Mapping[str, str] = os.environ) -> Entries:
    """Return what the HEADWAY_* variables say; one of no setting stands under its own name."""
    settings = {row.variable: name for name, row in TABLE.items()}
    return {
        settings.get(variable, variable): Entry(text, Origin(Layer.ENVIRONMENT, variable=variable))
        for variable, text in environ.items()
        if variable.startswith("HEADWAY_") and variable not in _NO_SETTINGS
    }
