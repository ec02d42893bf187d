"""No command prints a secret of a profile's `env`, unless --show-secrets asks for it."""

from __future__ import annotations

import io
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from headway.commands import doctor, flags
from headway.commands.doctor import OK, Check
from headway.machine.facts import Machine
from headway.settings.profile import choose_profile
from headway.settings.resolve import launch_layers, profile_layers, resolve
from tests.commands.running import run
from tests.machines.recorded import FOLDER, load

SECRET, OTHER = "hf_Sq9", "wb_Tx7"
LAPTOP = str(FOLDER / "laptop_cpu.json")

PROFILES = {
    "map": f"env: {{A: 1, HF_TOKEN: {SECRET}}}\n",
    "block": f"env:\n  A: 1\n  HF_TOKEN: |\n    {SECRET}\n  WANDB_API_KEY: '{OTHER}'\n",
    "line": f"env: A=1 HF_TOKEN='{SECRET} {OTHER}'\n",
    "list": f"env: [A=1, HF_TOKEN={SECRET}]\n",
    "url": f"env: {{HTTPS_PROXY: 'http://jane:{SECRET}@proxy:80'}}\n",
    "damaged line": f"env: A=1 HF_TOKEN= {SECRET}\n",
    "damaged quote": f'env: "A=1 HF_TOKEN=\'{SECRET}"\n',
    "damaged list": f"env: [HF_TOKEN=, {SECRET}]\n",
    "damaged name": f"env: {{'': 1, HF_TOKEN: {SECRET}}}\n",
    "damaged elsewhere": f"device: cpuu\nenv: {{HF_TOKEN: {SECRET}}}\n",
    "duplicate": f"env: {{HF_TOKEN: {SECRET}, HF_TOKEN: {OTHER}}}\n",
    "of the launcher": f"env: {{RANK: 1, HF_TOKEN: {SECRET}}}\n",
}

COMMANDS = [
    ["launch", "--dry-run", "--machine", LAPTOP, "train.py"],
    ["launch", "--dry-run", "--machine", LAPTOP, "--env", "HF_TOKEN=" + OTHER, "train.py"],
    ["launch", "--dry-run", "--machine", LAPTOP, "--env", "HF_TOKEN= " + OTHER, "train.py"],
    ["launch", "--dry-run", "--env", "HF_TOKEN", "--env", OTHER, "train.py"],
    ["launch", "--dry-run", "--machine", LAPTOP, "train.py", "--hf-token", OTHER, "--k=0"],
    ["config", "show"],
    ["config", "show", "--origin"],
    ["config", "show", "--json"],
    ["config", "list"],
    ["config", "validate"],
    ["config", "set", "num_processes=2"],
    ["config", "set", f"env.HF_TOKEN={OTHER}"],
    ["config", "set", f"env=HF_TOKEN='{OTHER} x'"],
    ["config", "unset", "env.HF_TOKEN"],
    ["config", "unset", "env"],
    ["config", "--yes"],
    ["config", "--yes", "--dry-run"],
    ["config", "--yes", "--set", f"env.WANDB_API_KEY={OTHER}"],
    ["config"],  # standard input answers
    ["config", "import", "its.yaml"],
    *(["config", "export", "--machine", LAPTOP, "--format", it] for it in ("env", "sh")),
    ["config", "export", "--machine", LAPTOP, "--format", "k8s", "--image", "a"],
    ["launch", "--submit", "slurm", "--dry-run", "train.py", "--api-key", OTHER],
    ["launch", "--submit", "slurm", "--sbatch=export=NONE", f"--env=A_KEY={OTHER}", "train.py"],
    ["launch", "--hosts", "a,b", "--dry-run", "train.py", "--api-key", OTHER],
    ["doctor"],
    ["doctor", "--json"],
    ["env"],
    ["env", "--json"],
]


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flags, "detect_machine", lambda *_, **__: load("laptop_cpu"))
    monkeypatch.setattr(doctor, "_ask_torch", lambda _: Check("torch runs", OK, ""))
    monkeypatch.setattr(
        subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, "", "")
    )
    Path("train.py").touch()
    Path("its.yaml").write_text("distributed_type: MULTI_CPU\n")


def tells_nothing(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a command, with an answer to each of its questions; look for both secrets."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n\n\nyes" + "\n" * 20))
    _, said = run(*words)
    assert SECRET not in said, words
    assert OTHER not in said, words


def write_profile(kind: str, place: str) -> Path:
    path = Path("headway.yaml") if place == "project" else Path(choose_profile().path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(PROFILES[kind])
    return path


@pytest.mark.parametrize(
    ("kind", "place"),
    [*((kind, "user") for kind in PROFILES), ("map", "project"), ("damaged line", "project")],
)
def test_no_command_prints_a_secret(kind: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for words in COMMANDS:
        write_profile("map", "user")
        write_profile(kind, place)
        tells_nothing(words, monkeypatch)


@pytest.mark.parametrize(
    "text", [f"HF_TOKEN={SECRET}", f"HF_TOKEN='{SECRET}", f"HF_TOKEN= {SECRET}"]
)
def test_no_command_prints_a_secret_of_the_environment(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWAY_ENV", text)
    monkeypatch.setenv("NVIDIA_API_KEY", OTHER)
    for words in COMMANDS:
        tells_nothing(words, monkeypatch)


@pytest.mark.parametrize(
    "words",
    [
        ["launch", "--dry-run", "--show-secrets", "train.py"],
        ["config", "show", "--show-secrets"],
        ["config", "show", "--json", "--show-secrets"],
        ["config", "--yes", "--dry-run", "--show-secrets"],
        *(["config", "export", "--format", it, "--show-secrets"] for it in ("env", "sh")),
    ],
    ids=lambda words: " ".join(words),
)
def test_secrets_are_shown_to_who_asks(words: list[str]) -> None:
    write_profile("map", "user")
    code, said = run(*words)
    assert code == 0
    assert SECRET in said


def test_the_script_gets_the_secret_that_is_masked_for_people() -> None:
    write_profile("map", "user")
    settings = resolve(launch_layers(profile_layers(), {}), Machine(), {})
    assert settings.env["HF_TOKEN"] == SECRET


def test_a_profile_is_its_owners_alone_if_it_is_new_or_holds_a_secret() -> None:
    path = Path(choose_profile().path)
    run("config", "set", "num_processes=2")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o640)
    run("config", "set", "num_processes=1")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert "secret" in run("config", "set", f"env.HF_TOKEN={SECRET}")[1]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
