"""Raw answers of many machines, in the formats of the tools that give them, and their snapshots.

    python -m tests.machines.recorded     writes the snapshots, tests/machines/*.json, anew

The real probes read these answers. They are put together after the documentation of /proc, cgroups,
sysctl and nvidia-smi, as no such machine was at hand.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from headway.machine.detection import detect_machine
from headway.machine.facts import Machine, as_data, load_machine
from headway.machine.source import Source

FOLDER = Path(__file__).parent
GIB = 2**30


class Recording(NamedTuple):
    """Everything that the probes ask of one machine."""

    files: Mapping[str, str] = {}
    cores: int = 8
    torch: str = ""
    platform: str = "linux"
    architecture: str = "x86_64"
    tools: Mapping[str, str] = {}  # what a tool prints, by its name
    environ: Mapping[str, str] = {}
    shm: int = 16 * GIB
    limits: Mapping[str, int] = {"NOFILE": 65536, "NPROC": 127000, "MEMLOCK": -1}


class Recorded(Source):
    """Answers from a recording."""

    def __init__(self, recording: Recording) -> None:
        super().__init__("/nowhere")
        self.recording = recording
        self.platform = recording.platform

    def read(self, path: str) -> str:
        return self.recording.files.get(path, "")

    def names_in(self, path: str) -> list[str]:
        below = [name.split("/") for name in self.recording.files]
        parts = [part for part in path.split("/") if part]
        found = {name[len(parts)] for name in below if name[: len(parts)] == parts != name}
        return sorted(found)

    def architecture(self) -> str:
        return self.recording.architecture

    def usable_cores(self) -> int:
        return self.recording.cores

    def torch_version_file(self) -> str:
        return self.recording.torch

    def output_of(self, command: Sequence[str], limit_s: float | None = None) -> str:
        words = [word.partition("=")[0] for word in command]
        if command[0] == sys.executable:
            words = ["python"]
        for name in (" ".join(words[:2]), words[0]):
            if name in self.recording.tools:
                return self.recording.tools[name]
        raise FileNotFoundError(2, "No such file or directory", words[0])

    def disk_size(self, path: str) -> int:
        assert path == "dev/shm"
        return self.recording.shm

    def limit(self, name: str) -> int:
        return self.recording.limits[name]


def snapshot(recording: Recording) -> Machine:
    """Return what the real probes make of a recording; of this Python only its own version."""
    machine = detect_machine(recording.environ, Recorded(recording), full=True)
    assert machine.host is not None
    return machine._replace(host=machine.host._replace(python="3.12.7 cpython"))


def torch(
    version: str, cuda: str | None = None, hip: str | None = None, xpu: str | None = None
) -> str:
    """Return version.py of this torch."""
    return (
        f"from typing import Optional\n\n__all__ = ['__version__', 'debug', 'cuda']\n"
        f"__version__ = {version!r}\ndebug = False\ncuda: Optional[str] = {cuda!r}\n"
        f"git_version = 'cf30153c4c131c8164ee7798e5022d810682e2cb'\nhip: Optional[str] = {hip!r}\n"
        f"rocm: Optional[str] = None\nxpu: Optional[str] = {xpu!r}\n"
    )


def linux(
    model: str, cores: int, memory_gib: int, *, driver: str = "", nodes: int = 1, **more: str
) -> dict[str, str]:
    """Return the files of a Linux machine; in `more`, __ in a name stands for a slash."""
    processors = "\n".join(
        f"processor\t: {core}\nmodel name\t: {model}\nphysical id\t: {core % nodes}\n"
        f"core id\t\t: {core // nodes}\n"
        for core in range(cores)
    )
    files = {
        "etc/os-release": 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 24.04.1 LTS"\nID=ubuntu\n',
        "proc/sys/kernel/osrelease": "6.8.0-45-generic\n",
        "proc/cpuinfo": processors,
        "proc/meminfo": f"MemTotal:       {memory_gib * 2**20} kB\nMemFree:         1234 kB\n",
        "proc/self/cgroup": "0::/user.slice/user-1000.slice/session-3.scope\n",
        "proc/1/cgroup": "0::/init.scope\n",
        "sys/class/net/lo/operstate": "unknown\n",
        "sys/class/net/eth0/operstate": "up\n",
    }
    files |= {f"sys/devices/system/node/node{node}/cpulist": "" for node in range(nodes)}
    if driver:
        files["proc/driver/nvidia/version"] = (
            f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}  Tue Sep 17 2024\n"
        )
    return files | {name.replace("__", "/"): text for name, text in more.items()}


def gpus(count: int, name: str, gib: int, capability: tuple[int, int], **facts: Any) -> list[Any]:
    """Return GPUs as `nvidia_smi` takes them."""
    return [
        {
            "name": name,
            "uuid": f"GPU-{index}f0e{gib:04x}-1111-2222-3333-44445555{index:04x}",
            "memory": gib * GIB,
            "capability": capability,
            "bus": f"00000000:{0x10 + index:02X}:00.0",
            **facts,
        }
        for index in range(count)
    ]


def h100s(count: int) -> list[Any]:
    return gpus(count, "NVIDIA H100 80GB HBM3", 80, (9, 0), ecc=0)


def nvidia_smi(driver: str, cards: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return what nvidia-smi prints of these GPUs, as its manual page has it."""
    rows, apps, listed = [], [], []
    for index, card in enumerate(cards):
        mig = "[N/A]" if card["capability"] < (8, 0) else "Disabled"
        cells = (
            *(card["name"], card["uuid"], card["memory"] // 2**20 or "[N/A]"),
            ".".join(map(str, card["capability"])),
            {0: "Default", 2: "Prohibited", 3: "Exclusive_Process"}[card.get("mode", 0)],
            "Enabled" if "slices" in card else mig,
            *(card.get("used", 4 * 2**20) // 2**20, card.get("utilization", 0)),
            *(card.get("ecc", "[N/A]"), card["bus"], driver),
        )
        rows.append(", ".join(map(str, cells)))
        apps += [f"{card['uuid']}, {pid}" for pid in card.get("pids", ())]
        listed.append(f"GPU {index}: {card['name']} (UUID: {card['uuid']})")
        listed += [
            f"  MIG {profile}     Device  {number}: (UUID: {uuid})"
            for number, (profile, uuid) in enumerate(card.get("slices", ()))
        ]
    said = {"--query-gpu": rows, "--query-compute-apps": apps, "-L": listed}
    return {f"nvidia-smi {flag}": "\n".join(lines) for flag, lines in said.items()}


def server(cards: list[Any], **changes: Any) -> Recording:
    """Return a Linux server with these GPUs."""
    driver = changes.pop("driver", "580.82.07")
    files = linux("AMD EPYC 9554 64-Core Processor", 64, 512, driver=driver, nodes=2)
    for index, card in enumerate(cards):
        address = card["bus"].lower()[4:]
        files[f"sys/bus/pci/devices/{address}/numa_node"] = f"{index * 2 // len(cards)}\n"
    whole = Recording(
        files=files | changes.pop("files", {}),
        cores=64,
        torch=torch("2.13.0+cu130", cuda="13.0"),
        tools=nvidia_smi(driver, cards),
        shm=256 * GIB,
    )
    return whole._replace(**changes)


def answer(*gpus: dict[str, Any], error: str = "", architectures: Sequence[str] = ()) -> str:
    """Return what torch answers, in a child, when it is asked for its devices."""
    found = {"version": "2.13.0", "gpus": gpus, "error": error}
    return json.dumps({**found, "architectures": architectures})


def with_torch(recording: Recording, *gpus: dict[str, Any], **others: Any) -> Recording:
    """Return the machine with a torch that finds these GPUs there."""
    tools = {**recording.tools, "python": answer(*gpus, **others)}
    return recording._replace(tools=tools)


def intel(*slots: str, driver: str = "xe", model: str = "E20B") -> dict[str, str]:
    """Return what the kernel says of Intel's GPUs at these PCI addresses."""
    files = {"sys/class/drm/version": "drm 1.1.0 20060810\n"}
    for index, slot in enumerate(slots):
        said = f"DRIVER={driver}\nPCI_CLASS=30000\nPCI_ID=8086:{model}\nPCI_SLOT_NAME={slot}\n"
        files |= {
            f"sys/class/drm/{node}/device/uevent": said
            for node in (f"card{index}", f"renderD{128 + index}")
        }
    return files


def amd(count: int, gfx: int, gib: float) -> dict[str, str]:
    """Return what the kernel says of AMD's GPUs, after the node of the CPU."""
    nodes = "sys/class/kfd/kfd/topology/nodes"
    files = {f"{nodes}/0/properties": "cpu_cores_count 64\nsimd_count 0\ngfx_target_version 0\n"}
    for node in range(1, count + 1):
        said = f"simd_count 440\ngfx_target_version {gfx}\nunique_id {node}00\n"
        bank = f"heap_type 1\nsize_in_bytes {int(gib * GIB)}\n"
        files |= {
            f"{nodes}/{node}/properties": said,
            f"{nodes}/{node}/mem_banks/0/properties": bank,
        }
    return files


def mac(macos: str = "15.5", architecture: str = "arm64", **changes: Any) -> Recording:
    """Return a Mac; keyword arguments beginning with sysctl_ change what sysctl prints."""
    said = {
        "kern.osproductversion": macos,
        "hw.optional.arm64": "1",
        "sysctl.proc_translated": "0" if architecture == "arm64" else "1",
        "kern.hv_vmm_present": "0",
        "machdep.cpu.brand_string": "Apple M2",
        "hw.memsize": str(16 * GIB),
        "hw.physicalcpu": "8",
        "hw.logicalcpu": "8",
        **changes.pop("sysctl", {}),
    }
    whole = Recording(
        platform="darwin",
        architecture=architecture,
        torch=torch("2.13.0"),
        tools={"/usr/sbin/sysctl": "".join(f"{name}: {value}\n" for name, value in said.items())},
        limits={"NOFILE": 256, "NPROC": 2666, "MEMLOCK": -1},
    )
    return whole._replace(**changes)


BUSY = {"used": 61 * GIB, "utilization": 97, "pids": (31337,)}
UUIDS = [card["uuid"] for card in h100s(8)]
A100 = gpus(1, "NVIDIA A100-SXM4-40GB", 40, (8, 0), ecc=0)
MIG = {
    **A100[0],
    "slices": [
        ("3g.20gb", "MIG-a1b2c3d4-0000-5000-8000-000000000001"),
        ("2g.10gb", "MIG-a1b2c3d4-0000-5000-8000-000000000002"),
    ],
}
RTX = gpus(2, "NVIDIA GeForce RTX 4090", 24, (8, 9))

RECORDINGS: dict[str, Recording] = {
    "laptop_cpu": Recording(
        files=linux("Intel(R) Core(TM) i7-1260P", 8, 16), torch=torch("2.13.0+cpu"), shm=8 * GIB
    ),
    "gpu_1": server(RTX[:1], cores=16),
    "gpu_2_one_busy": server([{**RTX[0], **BUSY, "used": 20 * GIB}, RTX[1]], cores=16),
    "gpu_4": server(gpus(4, "NVIDIA A100-SXM4-80GB", 80, (8, 0), ecc=0)),
    "gpu_8_h100": server(h100s(8)),
    "gpu_mixed": server([RTX[0], *gpus(1, "Tesla T4", 16, (7, 5), ecc=0, bus="00000000:20:00.0")]),
    "gpu_exclusive": server(
        [{**h100s(1)[0], "mode": 3, "pids": (4242,)}, {**h100s(2)[1], "mode": 3}]
    ),
    "gpu_prohibited": server([{**h100s(1)[0], "mode": 2}, h100s(2)[1]]),
    "gpu_mig": server([MIG]),
    "gpu_mig_mixed": server([MIG, *h100s(3)[1:]]),
    "gpu_ecc_errors": server([{**h100s(1)[0], "ecc": 3}, h100s(2)[1]]),
    "mac_m2": mac(),
    "mac_rosetta": mac(architecture="x86_64"),
    "mac_intel": mac(
        architecture="x86_64",
        sysctl={"hw.optional.arm64": "0", "sysctl.proc_translated": "0"}
        | {"machdep.cpu.brand_string": "Intel(R) Core(TM) i7-8750H CPU @ 2.20GHz"},
    ),
    "mac_13": mac("13.7.4"),
    "mac_virtual": mac(sysctl={"kern.hv_vmm_present": "1"}),
    "cpu_torch_on_gpu_box": with_torch(
        server(h100s(2), torch=torch("2.13.0+cpu")), error="Torch not compiled with CUDA enabled"
    ),
    "driver_too_old": with_torch(
        server(h100s(2), driver="535.129.03"), error="The NVIDIA driver on your system is too old"
    ),
    "container_half_core_2gib": Recording(
        files=linux(
            "Intel(R) Xeon(R) Platinum 8375C CPU @ 2.90GHz",
            32,
            128,
            proc__self__cgroup="0::/\n",
            proc__1__cgroup="0::/\n",
        )
        | {
            "sys/fs/cgroup/cpu.max": "50000 100000\n",
            "sys/fs/cgroup/memory.max": f"{2 * GIB}\n",
            ".dockerenv": "",
        },
        cores=32,
        torch=torch("2.13.0+cpu"),
        shm=64 * 2**20,
        limits={"NOFILE": 1048576, "NPROC": -1, "MEMLOCK": 65536},
    ),
    "container_cgroup_v1": Recording(
        files=linux(
            "Intel(R) Xeon(R) Gold 6230 CPU @ 2.10GHz",
            40,
            192,
            proc__self__cgroup="12:memory:/docker/f00\n4:cpu,cpuacct:/docker/f00\n",
        )
        | {
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "400000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{8 * GIB}\n",
        },
        cores=40,
        torch=torch("2.13.0+cpu"),
        shm=64 * 2**20,
    ),
    "mask_empty": server(h100s(4), environ={"CUDA_VISIBLE_DEVICES": ""}),
    "mask_minus_one": server(h100s(4), environ={"CUDA_VISIBLE_DEVICES": "-1"}),
    "mask_uuids": server(h100s(8), environ={"CUDA_VISIBLE_DEVICES": f"{UUIDS[5]},{UUIDS[2]}"}),
    "mask_duplicates": with_torch(
        server(h100s(4), environ={"CUDA_VISIBLE_DEVICES": "1,1"}), error="No CUDA GPUs available"
    ),
    "slurm_node": server(
        h100s(8),
        environ={
            "SLURM_JOB_ID": "4711",
            "SLURM_NTASKS": "4",
            "SLURM_PROCID": "1",
            "CUDA_VISIBLE_DEVICES": "4,5,6,7",
        },
    ),
    "amd_2": Recording(
        files=linux("AMD EPYC 7A53", 64, 512) | amd(2, 90010, 64),
        cores=64,
        torch=torch("2.13.0+rocm7.1", hip="7.1.52802"),
    ),
    "intel_4": Recording(
        files=linux("Intel(R) Xeon(R) w7-3465X", 28, 256)
        | intel("0000:00:02.0", "0000:4d:00.0", "0000:18:00.0", "0000:9a:00.0", "0000:b5:00.0"),
        cores=28,
        torch=torch("2.13.0+xpu", xpu="20250302"),
    ),
    "intel_laptop": Recording(
        files=linux("Intel(R) Core(TM) Ultra 7 258V", 8, 32)
        | intel("0000:00:02.0", driver="i915", model="64A0"),
        torch=torch("2.13.0+cpu"),
    ),
}


def load(name: str) -> Machine:
    """Return the snapshot of this name, as `--machine` reads it."""
    return load_machine(str(FOLDER / f"{name}.json"))


def changed(name: str, key: str, value: Any) -> Any:
    """Return the JSON object of the snapshot `name` with a value changed: gpus[0].uuid."""
    data = json.loads((FOLDER / f"{name}.json").read_text())
    *parents, last = (int(word) if word.isdecimal() else word for word in re.findall(r"\w+", key))
    whole = data
    for parent in parents:
        whole = whole[parent]
    whole[last] = value
    return data


def written(data: dict[str, Any]) -> str:
    """Return a snapshot as JSON, with as many facts on a line as fit, and a line for each GPU."""
    gpus = ",\n".join(f"  {json.dumps(gpu)}" for gpu in data["gpus"])
    reasons = data["host"].pop("reasons")
    groups = [
        _filled({key: value for key, value in data.items() if key not in ("gpus", "host")}),
        f'"gpus": [{gpus and chr(10)}{gpus}]',
        f'"host": {{\n{_filled(data["host"])},\n"reasons": {{\n{_filled(reasons)}\n}}}}',
    ]
    return "{\n" + ",\n".join(groups) + "\n}\n"


def _filled(facts: dict[str, Any]) -> str:
    """Return the facts of a JSON object, as many on a line as fit."""
    lines: list[str] = []
    for key, value in facts.items():
        fact = f"{json.dumps(key)}: {json.dumps(value)}"
        if lines and len(lines[-1]) + len(fact) + 3 <= 100:
            lines[-1] += f", {fact}"
        else:
            lines.append(fact)
    return ",\n".join(lines)


def main() -> None:
    for name, recording in RECORDINGS.items():
        (FOLDER / f"{name}.json").write_text(written(as_data(snapshot(recording))))


if __name__ == "__main__":
    main()
