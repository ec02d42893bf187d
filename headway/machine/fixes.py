"""How to make the GPUs of a machine usable."""

from __future__ import annotations

from headway.devices.kind import numbers
from headway.devices.table import kind_of
from headway.errors import Remedy, advice, run
from headway.machine.facts import EXCLUSIVE, OLDEST_DRIVER, PROHIBITED, Gpu, Machine

WHEELS = "https://download.pytorch.org/whl"


def how_to_use_gpus(machine: Machine, device: str = "") -> list[Remedy]:
    """Return how to make GPUs usable, those of a kind if one is named; empty if nothing helps."""
    if device not in ("", machine.gpu_kind):
        install = "pip install --force-reinstall torch --index-url"
        is_listed = device in machine.listed_kinds
        return [run(f"{install} {WHEELS}/{kind_of(device).wheels}")] if is_listed else []
    if machine.torch_obstacle is not None:
        return _matching_torch(machine)
    if machine.visible_gpus:
        return how_to_free(machine.visible_gpus[0])
    if machine.gpus:
        return [run(f"unset {kind_of(machine.gpu_kind).mask}")]
    if machine.driver_is_silent:
        return [
            advice(
                "run `nvidia-smi` to see why; reboot after a driver update; start a container with "
                "--gpus all"
            )
        ]
    return []


def how_to_free(gpu: Gpu) -> list[Remedy]:
    """Return how to make one GPU usable."""
    name = gpu.slice_of or gpu.uuid
    if gpu.compute_mode in (PROHIBITED, EXCLUSIVE):
        return [of_machine(f"nvidia-smi -i {name} -c DEFAULT"), advice("use another GPU")]
    if gpu.is_mig:
        return [of_machine(f"nvidia-smi -i {name} -mig 0"), advice("make slices of it")]
    return [advice("use another GPU")]


def of_machine(command: str) -> Remedy:
    """Return the remedy of a command that changes a device, which others may use as well."""
    return advice(f"ask who runs this machine for {command}")


def _matching_torch(machine: Machine) -> list[Remedy]:
    """Return how to make the installed torch and the driver match."""
    if machine.is_rocm:
        return [advice("install torch's ROCm build: https://pytorch.org/get-started/locally")]
    driver = numbers(machine.driver or "0")
    major = max((cuda for cuda, oldest in OLDEST_DRIVER.items() if oldest <= driver), default=None)
    if major is None:
        return [advice("update the NVIDIA driver")]
    index = {11: "cu118", 12: "cu126", 13: "cu130"}[major]
    install = run(f"pip install --force-reinstall torch --index-url {WHEELS}/{index}")
    if machine.torch is not None and machine.torch.cuda is not None:
        return [advice("update the NVIDIA driver"), install]
    return [install]
