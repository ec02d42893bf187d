"""Parsing of `devices`, and selection of GPUs on a machine.

As in Lightning, a single number is a count, and a list or a value with a comma contains indices.

    3, "3"          the first 3 GPUs        [1, 3], "1, 3"   GPUs 1 and 3, in this order
    -1, all, auto   all GPUs                [1], "1,"        GPU 1

Other values are ranges (`0-3`), prefixes of UUIDs (`GPU-8f6e`) and `idle:2` (two idle GPUs).
"""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from headway.machine.facts import Gpu

Name = int | str
"""A GPU's index among the visible GPUs, or a prefix of its UUID or MIG id."""

BUSY_PERCENT = 10  # utilization
BUSY_BYTES = 2**30  # used memory, or an eighth of a small GPU's; drivers reserve some


class Selection(NamedTuple):
    indices: tuple[int, ...]
    skipped: tuple[str, ...] = ()  # skipped GPUs, each with the reason
    problems: tuple[str, ...] = ()  # why the spec cannot be satisfied on this machine


class DeviceSpec(NamedTuple):
    """Selects the `first` N GPUs, the `named` GPUs, N `idle` GPUs, or all."""

    first: int | None = None
    named: tuple[Name, ...] | None = None
    idle: int | None = None

    @property
    def size(self) -> int | None:
        """The number of GPUs, or None if it depends on the machine."""
        if self.named is not None:
            return len(self.named)
        return self.idle if self.first is None else self.first

    def select(self, gpus: Sequence[Gpu]) -> Selection:
        """Select from a machine's visible GPUs.

        A selection by count (`all`, `3`, `idle:2`) skips unusable GPUs, and MIG slices unless all
        usable devices are slices; a named GPU must be usable.
        """
        if self.named is not None:
            return self._select_named(gpus)
        reasons = [gpu.obstacle if self.idle is None else _busy_reason(gpu) for gpu in gpus]
        if any(not gpu.slice_of and not why for gpu, why in zip(gpus, reasons, strict=True)):
            reasons = [_IS_SLICE if g.slice_of else r for g, r in zip(gpus, reasons, strict=True)]
        usable = [index for index, reason in enumerate(reasons) if not reason]
        labels = gpu_labels(gpus)
        skipped = [f"{labels[i]}: {reason}" for i, reason in enumerate(reasons) if reason]
        wanted = self.first if self.idle is None else self.idle
        problems = []
        if wanted is not None and len(usable) < wanted:
            kind = f"{'is' if len(usable) == 1 else 'are'} {'idle' if self.idle else 'usable'}"
            reason = f" ({'; '.join(skipped)})" if skipped else ""
            problems.append(f"only {len(usable)} of {len(gpus)} GPUs {kind}{reason}")
        return Selection(tuple(usable[:wanted]), tuple(skipped), tuple(problems))

    def may_become_idle(self, gpus: Sequence[Gpu]) -> bool:
        coming = [gpu for gpu in gpus if gpu.use is not None and not gpu.is_disabled]
        return self.idle is not None and self.idle <= len(coming)

    def _select_named(self, gpus: Sequence[Gpu]) -> Selection:
        chosen: list[int] = []
        problems: list[str] = []
        for name in self.named or ():
            if isinstance(name, int) and has_ambiguous_indices(gpus):
                problems.append(
                    f"the index {name} is ambiguous, because there are MIG slices: use UUIDs"
                )
                continue
            if isinstance(name, int):
                matches = [name] if name < len(gpus) else []
            else:
                matches = [index for index, gpu in enumerate(gpus) if gpu.uuid.startswith(name)]
            chosen += matches[:1]
            if not matches:
                problems.append(f"GPU {name} does not exist")
            elif len(matches) > 1:
                problems.append(f"{name} is a prefix of the UUIDs of {len(matches)} GPUs")
        twice = {index for index in chosen if chosen.count(index) > 1}
        labels = gpu_labels(gpus)
        obstacles = [
            f"{labels[i]} cannot be used: {gpus[i].obstacle}" for i in chosen if gpus[i].obstacle
        ]
        repeated = [f"{labels[index]} is listed twice, once by its UUID" for index in sorted(twice)]
        return Selection(tuple(chosen), problems=(*problems, *repeated, *obstacles))

    def __str__(self) -> str:
        if self.idle is not None:
            return f"idle:{self.idle}"
        if self.first is not None:
            return str(self.first)
        names = ",".join(map(str, self.named or ())) or "all"
        return names + "," * (self.size == 1)

    def describe(self) -> str:
        if self.idle is not None:
            return f"{self.idle} idle GPU{'s' * (self.idle > 1)}"
        if self.first is not None:
            gpus = f"{self.first} GPUs" if self.first > 1 else "GPU"
            return f"the first {gpus}; for GPU {self.first} write `{self.first},`"
        return "all GPUs" if self.named is None else "GPU " + ", ".join(map(str, self.named))


ALL = DeviceSpec()


def parse_devices(raw: Iterable[str]) -> DeviceSpec:
    """Parse a `devices` value from a flag, variable, profile or script.

    Raises ValueError with the reason as its message, such as "lists no GPU".
    """
    if not isinstance(raw, str):
        return _list(raw)
    text = raw.strip()
    if text in ("all", "auto", "-1"):
        return ALL
    if text.startswith("[") and text.endswith("]"):
        return _list(text[1:-1].removesuffix(",").split(","))
    if "," in text or re.match(_ITEM, text):
        return _list(text.removesuffix(",").split(","))
    found = re.fullmatch(_COUNT, text)
    count = int(found[2]) if found else 0
    if text.partition(":")[0] == "idle" and not count:
        raise ValueError("the number of idle GPUs is missing: write idle:2")
    if found is None:
        raise ValueError("not a count (2), a list (0,2 or 0-3), all or idle:2")
    if not count:
        raise ValueError("selects no GPU: write `0,` for GPU 0, or --cpu for none")
    return DeviceSpec(idle=count) if found[1] else DeviceSpec(first=count)


# not compiled at import time, to keep launches fast
_ITEM = r"\d+-|(GPU|MIG)-"
_COUNT = r"(idle:)?([0-9]{1,4})"
_RANGE = r"([0-9]{1,4})(?:-([0-9]{1,4}))?"
_UUID = r"(GPU|MIG)-[0-9A-Za-z/-]+"

_IS_SLICE = "it is a MIG slice, which is used only if devices contains its UUID"


def has_ambiguous_indices(gpus: Sequence[Gpu]) -> bool:
    """Return whether indices are ambiguous: `gpus` has MIG slices, but tools number whole GPUs."""
    owners = {gpu.slice_of or gpu.uuid for gpu in gpus}
    return len(owners) > 1 and any(gpu.slice_of for gpu in gpus)


def gpu_labels(gpus: Sequence[Gpu]) -> list[str]:
    """Return how messages name the GPUs: "GPU 0", or UUIDs if indices are ambiguous."""
    if has_ambiguous_indices(gpus):
        return [gpu.uuid for gpu in gpus]
    return [f"GPU {index}" for index in range(len(gpus))]


def _list(parts: Iterable[str]) -> DeviceSpec:
    named = [name for part in parts for name in _names(part.strip())]
    if len(set(named)) < len(named):
        raise ValueError("lists a GPU twice")
    if not named:
        raise ValueError("lists no GPU")
    return DeviceSpec(named=tuple(named))


def _names(text: str) -> list[Name]:
    if re.fullmatch(_UUID, text):
        return [text]
    found = re.fullmatch(_RANGE, text)
    if found is None:
        raise ValueError(f"{text!r} is not a GPU index, a range or a UUID")
    first, last = int(found[1]), int(found[2] or found[1])
    if last < first:
        raise ValueError(f"the range {text!r} is descending; list the GPUs individually")
    return list(range(first, last + 1))


def _busy_reason(gpu: Gpu) -> str | None:
    if gpu.obstacle:
        return gpu.obstacle
    use = gpu.use
    if gpu.claimed_by:
        return f"claimed by {gpu.claimed_by}"
    if use is None or (use.memory_bytes is None and use.utilization_percent is None):
        return "its driver does not report its usage"
    if use.pids:
        return f"used by process{'es' * (len(use.pids) > 1)} {', '.join(map(str, use.pids))}"
    if use.memory_bytes and use.memory_bytes > min(BUSY_BYTES, (gpu.memory_bytes or 2**40) // 8):
        return f"{use.memory_bytes / 2**30:.1f} GiB of its memory is in use"
    if (use.utilization_percent or 0) >= BUSY_PERCENT:
        return f"its utilization is {use.utilization_percent} %"
    return None
