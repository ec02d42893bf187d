"""Convert a launch to a Kubernetes manifest: an indexed Job with a pod for each machine.

This module has no side effects. Source: the Kubernetes API reference, batch/v1 and core/v1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from headway.devices.table import kind_of
from headway.ipc.records import REPEATED, STOPPED_AND_SAVED
from headway.ipc.run_contract import KEY_VARIABLE
from headway.ipc.secrets import masked
from headway.launcher.processes.shutdown import grace_of
from headway.settings.table import OF_JOBS, OF_MACHINES, TABLE, Settings

_PORT = 29500  # each pod has its own address, so any port is free
_STOP_MARGIN_S = 30  # added to the grace period, before the pod is killed
_NOT_EXPORTED = ("hosts", *OF_JOBS)
_VARIABLE = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")
_ACTIONS = (("Ignore", STOPPED_AND_SAVED), ("FailJob", REPEATED))  # action, exit code

Manifest = Mapping[str, Any]


def to_kubernetes(
    settings: Settings, texts: Mapping[str, str], *, name: str, image: str, program: Sequence[str]
) -> list[Manifest]:
    """Return the objects that run `headway launch PROGRAM`, with one pod per machine.

    `texts` contains the settings passed to the pods.
    """
    is_one = settings.num_machines == 1
    grace_s = int(grace_of(settings, {}).to_save_s) + _STOP_MARGIN_S
    container: dict[str, Any] = {
        "name": "launch",
        "image": image,
        "command": ["headway", "launch", *map(_literal, program)],
        "env": [*_variables(settings, texts, name)],
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


def secrets_of(settings: Settings) -> list[str]:
    """Return the names of the variables that the pods read from a Secret."""
    env = settings.env
    hidden = [name for name in _sent(settings) if masked(name, env[name]) != env[name]]
    return hidden if settings.num_machines == 1 else [KEY_VARIABLE, *hidden]


def secret_name(name: str) -> str:
    return f"{name}-secrets"


def not_in_kubernetes(settings: Settings, names: Sequence[str]) -> Iterator[str]:
    yield from (name for name in names if name in _NOT_EXPORTED)
    yield from (f"env.{name}" for name in settings.env if name not in _sent(settings))


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


def _variables(settings: Settings, texts: Mapping[str, str], name: str) -> Iterator[Manifest]:
    """Yield the variables of the pods; a pod's machine rank is its index in the Job."""
    place: dict[str, object] = {"num_machines": settings.num_machines}
    if settings.num_machines > 1:
        place |= {"main_address": f"{name}-0.{name}", "main_port": settings.main_port or _PORT}
    passed = {key: text for key, text in texts.items() if key not in ("env", *OF_MACHINES)}
    for key, value in {**place, **passed}.items():
        if key not in _NOT_EXPORTED:
            yield {"name": TABLE[key].variable, "value": _literal(str(value))}
    secrets = secrets_of(settings)
    for variable in _sent(settings):
        if variable not in secrets:
            yield {"name": variable, "value": _literal(settings.env[variable])}
    for variable in secrets:
        reference = {"name": secret_name(name), "key": variable}
        yield {"name": variable, "valueFrom": {"secretKeyRef": reference}}


def _sent(settings: Settings) -> list[str]:
    return [name for name in settings.env if _VARIABLE.fullmatch(name)]


def _literal(text: str) -> str:
    """Escape $(NAME), which Kubernetes would expand in commands and values."""
    return text.replace("$(", "$$(")
