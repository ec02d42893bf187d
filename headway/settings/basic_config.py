"""Writes a first profile from a script or notebook, as `headway config --yes` does in a shell."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from headway.contract.notes import say
from headway.contract.precisions import PRECISIONS
from headway.errors import WrongValue


def write_basic_config(
    mixed_precision: str = "no", save_location: str | os.PathLike[str] | None = None
) -> Path | Literal[False]:
    """Write a profile for `headway launch` that sets the precision and leaves all else to `auto`.

    Args:
        mixed_precision: `no`, `fp16` or `bf16`.
        save_location: the file; without it the profile that is selected.

    Returns:
        The file; False where there was one already, which stays as it is.

    Raises:
        WrongValue: there is no such precision.
        ConfigError: the file cannot be written.

    Examples:
        >>> from headway.utils import write_basic_config
        >>> write_basic_config("bf16", "headway.yaml").name
        'headway.yaml'
    """
    # imported here, because few scripts that import headway.utils write a profile
    from headway.settings.profile_edit import change_profile, written
    from headway.settings.profile_files import choose_profile

    if mixed_precision.lower() not in PRECISIONS:
        raise WrongValue(
            f"mixed_precision is {mixed_precision!r}, not one of {', '.join(PRECISIONS)}",
            where="the script's write_basic_config(...)",
            fix="pass mixed_precision='bf16', or another of them",
        )
    path = Path(choose_profile().path if save_location is None else save_location)
    if path.exists():
        say(f"{path} is there already, and stays as it is; `headway config` changes it")
        return False
    line = f"mixed_precision: {written(mixed_precision.lower())}\n"
    change_profile(str(path), lambda _: line)
    return path
