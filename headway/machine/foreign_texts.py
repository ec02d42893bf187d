"""Texts of other programs that a machine is recognised by, each with where it was read.

They may change with any version of that program; Headway's own texts are never matched.
"""

from __future__ import annotations

SMI_MIG_IS_ON = "Enabled"
"""nvidia-smi --query-gpu=mig.mode.current. Source: its manual page, driver 525 and later."""

SMI_IS_EXCLUSIVE = "exclusive"
"""How nvidia-smi --query-gpu=compute_mode begins, in lower case: Exclusive_Process, and before
driver 418 Exclusive_Thread. Source: its manual page."""

SMI_UUID = r"UUID: (\S+)\)"
SMI_SLICE = r"\s+MIG (\S*?(\d+)gb\S*)"
"""A line of nvidia-smi -L, for a GPU and for a slice below it; the profile's name and its GB.

Source: NVIDIA, Multi-Instance GPU User Guide, for driver 525 and later."""
