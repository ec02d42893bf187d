"""`headway config --yes`: write what was detected."""

from __future__ import annotations

from collections.abc import Sequence

from headway.commands.config_edit import apply, set_all
from headway.commands.flags import Parser
from headway.commands.schema import beginning
from headway.errors import ConfigError
from headway.machine import Machine, detect_machine
from headway.profile import choose_profile
from headway.resolve import resolve
from headway.settings import Raw


def write_detected(argv: Sequence[str]) -> int:
    """Write what this machine is into the user's profile."""
    parser = Parser("config", "Look at this machine and write its profile for this user.")
    parser.flag("--yes", help="write what was detected, without questions")
    parser.profile_flag()
    parsed = parser.parse_flags(argv)
    if not parsed.yes:
        raise ConfigError(
            "`headway config` cannot ask questions yet",
            where="the command line",
            fix="`headway config --yes` writes what was detected; edit the file afterwards",
        )
    path = choose_profile(parsed.profile).path
    values, _ = detected_profile(detect_machine())
    apply(path, lambda text: set_all(text or beginning(path), values))
    print("next: headway launch your_script.py")
    return 0


def detected_profile(machine: Machine) -> tuple[dict[str, Raw], list[str]]:
    """Return the profile that fits `machine` best, and the reasons in words."""
    settings = resolve([], machine, {})
    values: dict[str, Raw] = {
        "device": settings.device,
        "num_processes": str(settings.num_processes),
        "mixed_precision": "no",
    }
    reasons = [f"{name}: {settings.origin(name)}" for name in ("device", "num_processes")]
    if settings.device == "cuda" and all(gpu.capability >= (8, 0) for gpu in machine.visible_gpus):
        values["mixed_precision"] = "bf16"
        reasons.append("mixed_precision: every GPU computes in bf16")
    return values, reasons
