"""`headway config export`: print the settings of a launch for another tool.

A Kubernetes manifest is an indexed Job with a pod for each machine. Source: the Kubernetes API
reference, batch/v1 and core/v1.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from headway.commands.config.check import SCRIPT
from headway.commands.flags import Parsed, Parser, machine_from_flags
from headway.devices.table import kind_of
from headway.errors import Code, ConfigError
from headway.ipc.records import REPEATED, STOPPED_AND_SAVED
from headway.ipc.run_contract import KEY_VARIABLE
from headway.ipc.secrets import masked
from headway.ipc.stderr import log
from headway.launcher.clusters.cluster_settings import cluster_layer
from headway.launcher.processes.shutdown import grace_of
from headway.settings.resolve import launch_layers, profile_layers, resolve
from headway.settings.table import OF_JOBS, OF_MACHINES, TABLE, Settings

KUBERNETES = "k8s"
FORMATS = ("env", "sh", KUBERNETES)
_NAME = "headway"  # default name of the Job
_PORT = 29500  # each pod has its own address, so any port is free
_STOP_MARGIN_S = 30  # added to the grace period, before the pod is killed
_NOT_EXPORTED = ("hosts", *OF_JOBS)
_VARIABLE = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")
_ACTIONS = (("Ignore", STOPPED_AND_SAVED), ("FailJob", REPEATED))  # action, exit code

Manifest = Mapping[str, Any]


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
        what = f"the secret in {', '.join(hidden)} is masked: pass --show-secrets to print it"
        notes = [what] if hidden else []
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
    env = {key: text for key, text in settings.env.items() if _VARIABLE.fullmatch(key)}
    secrets = [KEY_VARIABLE] if settings.num_machines > 1 else []
    secrets += [key for key, text in env.items() if masked(key, text) != text]
    public = {key: text for key, text in env.items() if key not in secrets}
    variables = [*_variables(settings, texts, name, public)]
    place = f"{name}-secrets"
    for key in secrets:
        reference = {"name": place, "key": key}
        variables.append({"name": key, "valueFrom": {"secretKeyRef": reference}})
    left = [key for key in names if key in _NOT_EXPORTED]
    left += [f"env.{key}" for key in settings.env if key not in env]
    notes = [f"{key} is not exported: it has no equivalent" for key in left]
    if secrets:
        values = {KEY_VARIABLE: "$(openssl rand -hex 32)"}
        words = [f"--from-literal={key}={values.get(key, '...')}" for key in secrets]
        create = f"kubectl create secret generic {place} {' '.join(words)}"
        notes.append(f"the pods read {', '.join(secrets)} from a Secret; create it first: {create}")
    objects = _kubernetes_objects(settings, name, parsed.image, variables)
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


def _kubernetes_objects(
    settings: Settings, name: str, image: str, variables: Sequence[Manifest]
) -> list[Manifest]:
    """Return the objects that run a launch with these variables, with one pod per machine."""
    is_one = settings.num_machines == 1
    grace_s = int(grace_of(settings, {}).to_save_s) + _STOP_MARGIN_S
    container: dict[str, Any] = {
        "name": "launch",
        "image": image,
        "command": ["headway", "launch", SCRIPT],
        "env": variables,
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    if resource := kind_of(settings.device).resource:
        container["resources"] = {"limits": {resource: settings.num_processes}}
    pod = {
        **({} if is_one else {"subdomain": name}),
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": grace_s,  # the maximum
        "containers": [container],
        # the default of 64 MiB is too small for data loader workers
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {
            "completionMode": "Indexed",
            "completions": int(settings.num_machines),
            "parallelism": int(settings.num_machines),
            "backoffLimit": 0,
            "podFailurePolicy": {"rules": [_rule(*action) for action in _ACTIONS]},
            "template": {"spec": pod},
        },
    }
    return [job] if is_one else [_service(name), job]


def _rule(action: str, code: int) -> Manifest:
    of = {"containerName": "launch", "operator": "In", "values": [code]}
    return {"action": action, "onExitCodes": of}


def _service(name: str) -> Manifest:
    """Return the headless service that gives each pod a host name, even before the pod is ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"job-name": name},
        },
    }


def _variables(
    settings: Settings, texts: Mapping[str, str], name: str, public: Mapping[str, str]
) -> Iterator[Manifest]:
    """Yield the variables of the pods; a pod's machine rank is its index in the Job.

    `texts` are the settings, and `public` are the variables of `env` without the secrets.
    """
    place: dict[str, object] = {"num_machines": settings.num_machines}
    if settings.num_machines > 1:
        place |= {"main_address": f"{name}-0.{name}", "main_port": settings.main_port or _PORT}
    passed = {key: text for key, text in texts.items() if key not in ("env", *OF_MACHINES)}
    for key, value in {**place, **passed}.items():
        if key not in _NOT_EXPORTED:
            yield {"name": TABLE[key].variable, "value": _literal(str(value))}
    for variable, text in public.items():
        yield {"name": variable, "value": _literal(text)}


def _literal(text: str) -> str:
    """Escape $(NAME), which Kubernetes would expand in commands and values."""
    return text.replace("$(", "$$(")
