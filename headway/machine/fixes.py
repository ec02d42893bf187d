"""What would help where a machine has GPUs that a training cannot use."""

from __future__ import annotations

from headway.machine.facts import EXCLUSIVE, OLDEST_DRIVER, PROHIBITED, Gpu, Machine, numbers

CUDA_WHEELS = "https://download.pytorch.org/whl"


def how_to_use_gpus(machine: Machine) -> str:
    """Return what would let a training use GPUs where it uses none; "" where nothing would."""
    if machine.torch_obstacle is not None:
        return _matching_torch(machine)
    if machine.visible_gpus:
        return how_to_free(machine.visible_gpus[0])
    if machine.gpus:
        return "unset CUDA_VISIBLE_DEVICES"
    if machine.driver_is_silent:
        return (
            "`nvidia-smi` says why; after an update of the driver: reboot. In a container: start "
            "it with --gpus all"
        )
    return ""


def how_to_free(gpu: Gpu) -> str:
    """Return what would remove a GPU's obstacle."""
    if gpu.compute_mode in (PROHIBITED, EXCLUSIVE):
        return f"`sudo nvidia-smi -i {gpu.slice_of or gpu.uuid} -c DEFAULT`, or another GPU"
    return "another GPU"


def _matching_torch(machine: Machine) -> str:
    """Return how to get a torch that this machine's driver runs, and a driver for this torch."""
    if machine.is_rocm:
        return "install torch's ROCm build: https://pytorch.org/get-started/locally"
    driver = numbers(machine.driver or "0")
    major = max((cuda for cuda, oldest in OLDEST_DRIVER.items() if oldest <= driver), default=None)
    if major is None:
        return "update the NVIDIA driver"
    index = {11: "cu118", 12: "cu126", 13: "cu130"}[major]
    install = f"`pip install --force-reinstall torch --index-url {CUDA_WHEELS}/{index}`"
    if machine.torch is not None and machine.torch.cuda is not None:
        return f"update the NVIDIA driver, or {install}"
    return install
