"""What launches on other machines have in common: a job of a scheduler, or hosts over ssh."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from headway.errors import ConfigError
from headway.launcher.planning.program import Program
from headway.machine.facts import Machine
from headway.settings.problems import profile_problems
from headway.settings.profile import Entries

OF_MACHINES = ("num_machines", "machine_rank", "main_address", "main_port")
"""Settings that say which machine of a run this is; not known before the run is there."""


def refuse_everywhere(layers: Sequence[Entries], machine: Machine) -> None:
    """Check the settings as far as they do not depend on where the launch will be.

    Args:
        layers: from the weakest to the strongest.
        machine: supplies the values that are detected.

    Raises:
        ConfigError: no machine could run them.
    """
    anywhere = [
        {name: entry for name, entry in layer.items() if name not in OF_MACHINES}
        for layer in layers
    ]
    if found := profile_problems(anywhere, machine):
        raise ConfigError.of(found)


def words_elsewhere(own: Sequence[str], program: Program, without: Collection[str]) -> list[str]:
    """Return the words after `headway launch` for another machine.

    Args:
        own: the launcher's flags that were typed here.
        program: with its arguments.
        without: flags that concern this machine alone.
    """
    flags = [word for word in own if word.partition("=")[0] not in without]
    if program.kind == "module":  # the last of the flags names it
        return [*flags, *program.args]
    dashes = ["--"] if program.name.startswith("-") else []
    return [*flags, *dashes, program.name, *program.args]
