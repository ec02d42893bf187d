"""`headway config export`: print the settings of a launch for another tool."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence

from headway.commands.config.check import SCRIPT
from headway.commands.exchange.kubernetes_export import (
    not_in_kubernetes,
    secret_name,
    secrets_of,
    to_kubernetes,
)
from headway.commands.flags import Parsed, Parser, machine_from_flags
from headway.errors import Code, ConfigError
from headway.ipc.run_contract import KEY_VARIABLE
from headway.ipc.stderr import log
from headway.launcher.clusters.cluster_settings import cluster_layer
from headway.settings.layers import launch_layers, profile_layers
from headway.settings.resolve import resolve
from headway.settings.table import TABLE, Settings

KUBERNETES = "k8s"
FORMATS = ("env", "sh", KUBERNETES)
_NAME = "headway"  # default name of the Job


def export(argv: Sequence[str]) -> int:
    parser = Parser("config export", "Print the settings of a launch for another tool.")
    parser.flag("--format", metavar="{" + ",".join(FORMATS) + "}", help="output format")
    parser.flag("--image", metavar="IMAGE", help="for k8s: an image with Headway and the script")
    parser.flag("--name", metavar="NAME", help="for k8s: the name of the Job (default: headway)")
    parser.shared_flags("--show-secrets", "--profile", "--machine")
    parsed = parser.parse_flags(argv)
    if parsed.format is None:
        parser.error(f"--format is required: one of {', '.join(FORMATS)}")
    if parsed.format not in FORMATS:
        allowed = ", ".join(FORMATS)
        parser.error(f"invalid value {parsed.format!r} for --format: must be one of {allowed}")
    is_manifest = parsed.format == KUBERNETES
    if is_manifest and not parsed.image:
        parser.error(f"--format {KUBERNETES} requires --image IMAGE")
    if not is_manifest and (parsed.image is not None or parsed.name is not None):
        parser.error(f"--image and --name apply only to --format {KUBERNETES}")
    machine, environ = machine_from_flags(parsed, os.environ)
    layers = launch_layers(profile_layers(profile=parsed.profile), environ)
    settings = resolve(layers, machine, environ, cluster_layer(environ, layers))
    names = list(dict.fromkeys(name for layer in layers for name in layer))
    if is_manifest:
        text, notes = _manifest(parsed, settings, names)  # it contains no secrets
    else:
        visible = settings if parsed.show_secrets else settings.without_secrets()
        has_value = [name for name in names if settings.values[name].value is not None]
        text = "".join(f"{_assignment(name, visible, parsed.format)}\n" for name in has_value)
        hidden = [name for name, value in settings.env.items() if visible.env[name] != value]
        masked = f"the secret in {', '.join(hidden)} is masked: pass --show-secrets to print it"
        notes = [masked] if hidden else []
    print(text, end="")
    for note in notes:
        log(f"note: {note}")
    return 0


def _manifest(parsed: Parsed, settings: Settings, names: Sequence[str]) -> tuple[str, list[str]]:
    """Return the manifest, and notes about omitted settings and required secrets."""
    import yaml

    name = parsed.name or _NAME
    texts = {
        key: _as_text(key, settings) for key in names if settings.values[key].value is not None
    }
    objects = to_kubernetes(settings, texts, name=name, image=parsed.image, program=[SCRIPT])
    notes = [
        f"{key} is not exported: it has no equivalent" for key in not_in_kubernetes(settings, names)
    ]
    if secrets := secrets_of(settings):
        values = {KEY_VARIABLE: "$(openssl rand -hex 32)"}
        words = [f"--from-literal={key}={values.get(key, '...')}" for key in secrets]
        create = f"kubectl create secret generic {secret_name(name)} {' '.join(words)}"
        notes.append(f"the pods read {', '.join(secrets)} from a Secret; create it first: {create}")
    return yaml.safe_dump_all(objects, sort_keys=False), notes


def _assignment(name: str, settings: Settings, style: str) -> str:
    text = _as_text(name, settings)
    if style == "sh":
        return f"export {TABLE[name].variable}={shlex.quote(text)}"
    if "\n" in text:
        raise ConfigError(
            f"{name} contains a line break, which an env file cannot contain",
            where=str(settings.origin(name)),
            fix="use --format sh",
            code=Code.BAD_VALUE,
        )
    return f"{TABLE[name].variable}={text}"


def _as_text(name: str, settings: Settings) -> str:
    """Return a setting's value as written in its environment variable."""
    value = settings.values[name].value
    if name == "env":
        return shlex.join(f"{k}={v}" for k, v in value.items())
    return ",".join(map(str, value)) if name == "ranks" else str(value)
