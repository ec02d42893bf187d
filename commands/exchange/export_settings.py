"""`headway config export`: a launch as on this machine, for Kubernetes."""

from __future__ import annotations

import os
from collections.abc import Sequence

from headway.commands.config.check import SCRIPT
from headway.commands.exchange.kubernetes_export import (
    not_in_kubernetes,
    secret_name,
    secrets_of,
    to_kubernetes,
)
from headway.commands.flags import Parsed, Parser, machine_from_flags
from headway.contract.notes import say
from headway.contract.run import KEY_VARIABLE
from headway.launcher.clusters.cluster import cluster_layer
from headway.settings.layers import launch_layers, profile_layers
from headway.settings.resolve import resolve
from headway.settings.table import Settings

KUBERNETES = "k8s"
_NAME = "headway"  # of the Job


def export(argv: Sequence[str]) -> int:
    parser = Parser("config export", "Print the Job of a launch as here, for Kubernetes.")
    parser.flag("--format", metavar=KUBERNETES, help="for Kubernetes: a Job, and what it needs")
    parser.flag("--image", metavar="IMAGE", help="the image, with Headway and the script")
    parser.flag("--name", metavar="NAME", help="what to call the Job (headway)")
    parser.shared_flags("--profile", "--machine")
    parsed = parser.parse_flags(argv)
    if parsed.format != KUBERNETES:
        parser.error(f"--format {KUBERNETES} is required, and no other format is supported")
    if not parsed.image:
        parser.error(f"--format {KUBERNETES} requires --image IMAGE")
    machine, environ = machine_from_flags(parsed, os.environ)
    layers = launch_layers(profile_layers(profile=parsed.profile), environ)
    settings = resolve(layers, machine, environ, cluster_layer(environ, layers))
    names = list(dict.fromkeys(name for layer in layers for name in layer))
    text, notes = _manifest(parsed, settings, names)  # it holds no secrets
    print(text, end="")
    for note in notes:
        say(f"note: {note}")
    return 0


def _manifest(parsed: Parsed, settings: Settings, names: Sequence[str]) -> tuple[str, list[str]]:
    """Return the manifest, and notes about what it lacks and needs."""
    import yaml

    name = parsed.name or _NAME
    values = {key: settings.values[key].value for key in names}
    texts = {
        key: ",".join(map(str, value)) if key == "ranks" else str(value)
        for key, value in values.items()
        if value is not None
    }
    objects = to_kubernetes(settings, texts, name=name, image=parsed.image, program=[SCRIPT])
    notes = [
        f"{key} is not exported: it has no counterpart"
        for key in not_in_kubernetes(settings, names)
    ]
    if secrets := secrets_of(settings):
        made = {KEY_VARIABLE: "$(openssl rand -hex 32)"}
        words = [f"--from-literal={key}={made.get(key, '...')}" for key in secrets]
        create = f"kubectl create secret generic {secret_name(name)} {' '.join(words)}"
        notes.append(
            f"the pods read {', '.join(secrets)} from a Secret, to be made first: {create}"
        )
    return yaml.safe_dump_all(objects, sort_keys=False), notes
