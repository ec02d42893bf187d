"""A launch that fails on one of several machines tells the others, who would wait for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

from headway.commands.flags import Parser, flag_layer
from headway.errors import HeadwayError, Stopped
from headway.launcher.clusters.cluster import cluster_layer, task_of
from headway.machine.facts import Machine
from headway.settings.layers import launch_layers, profile_layers
from headway.settings.resolve import try_resolve
from headway.settings.table import OF_HOSTS, Settings


def give_up(
    argv: Sequence[str],
    parser: Parser,
    environ: Mapping[str, str],
    error: HeadwayError | Stopped,
) -> None:
    """Tell the other machines of an error of this launch, where it is one of several.

    Args:
        argv: the words of the launch.
        parser: its flags.
        environ: of this process.
        error: why nothing starts here.
    """
    settings = None
    with suppress(HeadwayError):  # then nobody knows where the others are
        settings = _settings(argv, parser, environ)
    if settings is None or settings.num_machines == 1 or task_of(environ, settings) is not None:
        return
    from headway.launcher.machines.abort_notice import tell_machines

    tell_machines(settings, environ, error)


def _settings(argv: Sequence[str], parser: Parser, environ: Mapping[str, str]) -> Settings | None:
    """Return the settings, as far as they can be read; None for a launch that starts nothing here.

    Raises:
        HeadwayError: they cannot be read at all.
    """
    parsed = parser.parse_args(parser.split(argv)[0])
    if parsed.dry_run or parsed.submit is not None or parsed.machine is not None:
        return None
    profiles = profile_layers(environ, profile=parsed.profile)
    layers = launch_layers(profiles, environ, flag_layer(parsed))
    settings = try_resolve(layers, Machine(), environ, cluster_layer(environ, layers))[0]
    if any(name in layer for layer in layers for name in OF_HOSTS):
        from headway.commands.over_ssh import hosts_of

        return None if hosts_of(settings) else settings
    return settings
