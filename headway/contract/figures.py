"""What a rank's steps take: the figures that it sends its launcher."""

from __future__ import annotations

from typing import NamedTuple


class Figures(NamedTuple):
    """What the optimizer steps since the last such record took, of one rank."""

    time: float  # seconds since the epoch, when the last of them ended
    step: int  # the number of the last of them
    num_steps: int  # of them
    seconds: float  # that they took, from end to end
    data_s: float  # of those, waiting for the loader
    forward_s: float
    backward_s: float  # without the exchange of gradients, where it can be told apart
    sync_s: float  # waiting for other ranks: exchange of gradients, meetings
    save_s: float
    samples: int  # of this rank; 0: not known
    rss_bytes: int
    device_bytes: int | None  # held of the device's memory; None on a CPU
    total: int  # steps that the training will have; 0: not known
    loss: float | None  # the last one that is known
    num_workers: int | None = None  # of the loader that gave the last batch; None: not known
    stolen_s: float = 0.0  # of `seconds`, ready to compute while others had its core; 0: not known
    throttled_s: float = 0.0  # of `stolen_s`, at most: its cgroup had used up its CPU quota
