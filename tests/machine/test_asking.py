"""Torch decides which devices there are, where detection finds none or is in doubt."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from headway.devices import list_devices
from headway.errors import MachineError
from headway.machine.detection import detect_machine
from headway.machine.facts import Machine
from tests.launcher.plan.planning import plan, set_by
from tests.machines.recorded import (
    RECORDINGS,
    Recorded,
    Recording,
    h100s,
    mac,
    nvidia_smi,
    server,
    torch,
    with_torch,
)

LAPTOP, MAC = RECORDINGS["laptop_cpu"], mac(sysctl={"kern.hv_vmm_present": "1"})
FOUR = h100s(4)
SILENT = server(FOUR, tools={})  # no nvidia-smi
TWO = [{"name": "H100", "uuid": f"GPU-{index}", "memory_bytes": 2**36} for index in "ab"]


class Counted(Recorded):
    """Counts the questions to torch."""

    asked = 0

    def output_of(self, command: Sequence[str], limit_s: float | None = None) -> str:
        self.asked += command[0] == sys.executable
        return super().output_of(command)


def looked(recording: Recording, device: str = "auto") -> Machine:
    return detect_machine(recording.environ, Recorded(recording), device=device)


@pytest.mark.parametrize(
    ("recording", "device", "times"),
    [
        (LAPTOP, "auto", 0),
        (LAPTOP, "cuda", 1),
        (SILENT, "auto", 1),
        (SILENT, "cpu", 0),
        (RECORDINGS["gpu_4"], "auto", 0),
        (RECORDINGS["mask_empty"], "auto", 0),  # meant for the CPU
        (RECORDINGS["driver_too_old"], "auto", 1),
        (RECORDINGS["intel_laptop"], "auto", 0),
        (MAC, "auto", 0),
        (MAC, "gpu", 1),
    ],
)
def test_torch_is_asked_only_where_a_device_may_be_missed(
    recording: Recording, device: str, times: int
) -> None:
    source = Counted(recording)
    detect_machine(recording.environ, source, device=device)
    assert source.asked == times


@pytest.mark.parametrize(
    ("recording", "device"),
    [
        (SILENT, "auto"),
        (LAPTOP, "cuda"),
        (RECORDINGS["driver_too_old"], "auto"),  # with NVIDIA's package for compatibility
        (server(FOUR, environ={"CUDA_VISIBLE_DEVICES": "8,9"}), "auto"),
    ],
)
def test_what_torch_finds_is_used_whatever_else_says(recording: Recording, device: str) -> None:
    machine = looked(with_torch(recording, *TWO), device)
    launch = plan(machine, recording.environ, device=device)
    assert (launch.settings.device, launch.gpus) == ("cuda", (0, 1))
    second = set_by(plan(machine, recording.environ, devices="1,", device="cuda"))
    mask = recording.environ.get("CUDA_VISIBLE_DEVICES", "0,1")
    assert second["CUDA_VISIBLE_DEVICES"] == mask.split(",")[1]  # an index within an outer mask


def test_mps_is_used_where_torch_can_use_it() -> None:
    machine = looked(with_torch(MAC, {"name": "MPS"}), "mps")
    assert plan(machine, device="mps").settings.device == "mps"
    assert "virtual" in str(looked(with_torch(MAC), "mps").unavailable_reason("mps"))


def test_a_gpu_that_nvidia_smi_has_lost_is_left_out_as_torch_leaves_it_out() -> None:
    tools = nvidia_smi("580.82.07", FOUR)
    rows = tools["nvidia-smi --query-gpu"].splitlines()
    rows[1] = "Unable to determine the device handle for GPU 0000:11:00.0: GPU is lost"
    tools["nvidia-smi --query-gpu"] = "\n".join(rows)
    files = {f"proc/driver/nvidia/gpus/{card['bus']}/information": "" for card in FOUR}
    lost = server(FOUR, tools=tools, files=files, environ={"CUDA_VISIBLE_DEVICES": "0,1"})
    launch = plan(looked(with_torch(lost, {"name": "H100", "uuid": FOUR[0]["uuid"]})), lost.environ)
    assert [gpu.capability for gpu in launch.machine.visible_gpus] == [(9, 0)]  # nvidia-smi's fact
    assert any("GPU is lost" in note for note in launch.notes)
    assert len(looked(lost).gpus) == 3  # without an answer, what is detected holds


def test_a_driver_that_torch_cannot_use_is_an_error_with_the_reason() -> None:
    refused = looked(with_torch(SILENT, error="CUDA unknown error"))
    with pytest.raises(MachineError, match="it is not installed; torch found none: CUDA unknown"):
        plan(refused)
    assert plan(refused, device="cpu").notes == ()
    assert plan(refused, {"ACCELERATE_USE_CPU": "1"}).settings.device == "cpu"
    with pytest.raises(MachineError, match="process 42 uses it"):
        plan(looked(server([{**FOUR[0], "mode": 3, "pids": (42,)}])))


@pytest.mark.parametrize(
    ("driver", "of_class", "is_noted"),
    [
        ("nouveau", "0x030200", True),
        ("vfio-pci", "0x030000", False),  # for a virtual machine
    ],
)
def test_a_card_without_its_driver_is_one_note(driver: str, of_class: str, is_noted: bool) -> None:
    pci, slot = "sys/bus/pci", "0000:01:00.0"
    files = {f"{pci}/devices/{slot}/vendor": "0x10de\n", f"{pci}/drivers/{driver}/{slot}": ""}
    files[f"{pci}/devices/{slot}/class"] = f"{of_class}\n"
    recording = LAPTOP._replace(files={**LAPTOP.files, **files})
    launch = plan(looked(recording))
    assert (launch.settings.device, looked(recording, "cpu").unused_card) == ("cpu", "")
    assert [f"an NVIDIA GPU ({slot})" in note for note in launch.notes] == [True] * is_noted


@pytest.mark.parametrize(
    ("files", "built_for", "device"),
    [
        (["dev/dxg"], {"cuda": "13.0"}, "cpu"),  # WSL without NVIDIA's
        (["dev/dxg", "usr/lib/wsl/lib/libcuda.so"], {"cuda": "13.0"}, "cuda"),
        (["dev/dxg"], {"hip": "7.1"}, "cuda"),
        (["dev/nvidiactl"], {"cuda": "13.0"}, "cuda"),
    ],
)
def test_a_driver_without_a_list_of_its_gpus_is_noticed(
    files: list[str], built_for: dict[str, str], device: str
) -> None:
    there = LAPTOP._replace(files=dict.fromkeys(files, ""), torch=torch("2.13.0", **built_for))
    assert plan(looked(with_torch(there, *TWO))).settings.device == device


def test_a_child_answers_with_the_devices_of_torch_or_the_reason_for_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cuda = pytest.importorskip("torch.cuda")
    monkeypatch.setattr(cuda, "is_available", lambda: False)
    list_devices.main(["cuda"])
    assert json.loads(capsys.readouterr().out)["gpus"] == []
    there = SimpleNamespace(name="H100", uuid="a-b", total_memory=2**36, major=9, minor=0)
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "device_count", lambda: 1)
    monkeypatch.setattr(cuda, "get_device_properties", lambda _: there)
    list_devices.main(["cuda"])
    (gpu,) = json.loads(capsys.readouterr().out)["gpus"]
    assert (gpu["uuid"], gpu["memory_bytes"], gpu["capability"]) == ("GPU-a-b", 2**36, [9, 0])
