"""`headway config export --format k8s`: what a cluster would be told, checked by its own schema."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway.commands.main import main
from headway.settings.resolve import environment_layer, resolve
from tests.machines.recorded import FOLDER, load

SECRET = "dont-tell-anyone"
PROFILE = f"""\
num_machines: 2
device: cuda
mixed_precision: bf16
grace_period_s: 120
env:
  HF_TOKEN: {SECRET}
  DSN: {SECRET}
  PLAIN: "$(HOME) it's"
"""


def exported(profile: str, machine: str = "gpu_8_h100") -> list[dict[str, Any]]:
    """Return the objects of a manifest for a profile."""
    Path("headway.yaml").write_text(profile)
    flags = ["--format", "k8s", "--image", "me/train:1", "--machine", f"{FOLDER / machine}.json"]
    printed = io.StringIO()
    with redirect_stdout(printed):
        assert main(["config", "export", *flags]) == 0
    return list(yaml.safe_load_all(printed.getvalue()))


def container(objects: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = objects[-1]["spec"]["template"]["spec"]["containers"][0]
    return found


@pytest.mark.parametrize("profile", [PROFILE, "device: cpu\n", "num_machines: 3\nmain_port: 7\n"])
def test_a_manifest_is_valid_for_kubernetes_and_has_no_key_that_it_does_not_know(
    profile: str,
) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    newest = kubernetes_validate.latest_version()
    for manifest in exported(profile):
        kubernetes_validate.validate(manifest, newest, strict=True)
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate({**manifest, "odd": 1}, newest, strict=True)


def test_headway_in_a_pod_reads_the_settings_that_were_exported() -> None:
    objects = exported(PROFILE)
    assert SECRET not in str(objects)
    variables = {env["name"]: env.get("value", "x") for env in container(objects)["env"]}
    settings = resolve([environment_layer(variables)], load("gpu_8_h100"), {})
    assert settings.num_machines == 2
    assert settings.main_address == "headway-0.headway"
    assert (settings.mixed_precision, settings.grace_period_s) == ("bf16", 120)
    assert not settings.are_user_set("machine_rank")  # the index of the pod


def test_one_machine_needs_no_service_and_no_key_and_has_the_time_to_save() -> None:
    (job,) = exported("device: cpu\n", "laptop_cpu")
    assert job["spec"]["completions"] == 1
    assert job["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > 600
    assert "resources" not in container([job])
    names = {variable["name"] for variable in container([job])["env"]}
    assert names == {"HEADWAY_NUM_MACHINES", "HEADWAY_DEVICE"}
