"""Device detection by torch in a subprocess; its result overrides those of the other probes."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from headway.devices.table import CUDA, MPS, kind_of
from headway.ipc.typed import read
from headway.machine.facts import Gpu, Machine
from headway.machine.source import Source


class TorchDevices(NamedTuple):
    """Output of `headway.devices.list_devices`; `error` is torch's error message, or empty."""

    version: str
    gpus: tuple[Gpu, ...]
    error: str
    architectures: tuple[str, ...] = ()  # with CUDA kernels in this torch: sm_90, compute_90


def query_torch(source: Source, device: str, *words: str) -> TorchDevices:
    """Query torch in a subprocess; raise OSError if it fails to start, import torch or respond."""
    command = [sys.executable, "-m", "headway.devices.list_devices", device, *words]
    lines = source.output_of(command).splitlines()
    try:
        return read(TorchDevices, json.loads(lines[-1]))
    except (IndexError, ValueError):
        raise OSError((lines or ["no answer"])[-1]) from None


def with_architectures(machine: Machine, source: Source) -> Machine:
    """Return the machine with the CUDA architectures for which its torch has kernels."""
    with suppress(OSError):  # then those of PyTorch's official builds are assumed
        return machine._replace(architectures=query_torch(source, CUDA.name).architectures)
    return machine


def with_torch_devices(
    machine: Machine, environ: Mapping[str, str], source: Source, device: str
) -> Machine:
    """Return the machine with torch's devices of this kind, or the reason why there are none.

    Facts from the driver's tool are kept. If torch does not respond, the detected GPUs are kept.
    """
    gpus: tuple[Gpu, ...] = ()
    try:
        _, gpus, error, _ = query_torch(source, device)
        refusal = f"torch found none: {error}"
    except OSError as error:
        if machine.visible_gpus:
            return machine
        refusal = f"torch failed: {error.strerror or error}"
    if device == MPS.name:
        return machine._replace(mps=True, mps_reason="found by torch") if gpus else machine
    if not gpus:
        is_news = machine.has_driver and device == machine.gpu_kind
        return machine._replace(torch_refusal=refusal) if is_news else machine
    if device != machine.gpu_kind:
        variable = kind_of(device).mask
        machine = machine._replace(gpus=(), mask=environ.get(variable), mask_variable=variable)
    known = {part.uuid: part for gpu in machine.gpus for part in gpu.parts() if part.uuid}
    return machine._replace(
        gpus=tuple(known.get(gpu.uuid, gpu) for gpu in gpus),
        gpus_reason="found by torch",
        gpu_kind=device,
        is_rocm=machine.torch is not None and machine.torch.hip is not None,
        has_driver=True,
        is_by_torch=True,
    )
