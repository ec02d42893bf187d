"""Texts of other programs that detection matches, each with its source.

They may change with a new version of the program. Headway's own messages are never matched.
"""

from __future__ import annotations

SMI_MIG_IS_ON = "Enabled"
"""nvidia-smi --query-gpu=mig.mode.current. Source: its manual page, driver 525 and later."""

SMI_IS_EXCLUSIVE = "exclusive"
"""Prefix of nvidia-smi --query-gpu=compute_mode, in lower case: Exclusive_Process, and before
driver 418 Exclusive_Thread. Source: its manual page."""

SMI_UUID = r"UUID: (\S+)\)"
SMI_SLICE = r"\s+MIG (\S*?(\d+)gb\S*)"
"""A line of nvidia-smi -L, for a GPU and for a slice below it; the profile's name and its GB.

Source: NVIDIA, Multi-Instance GPU User Guide, for driver 525 and later."""
