"""CUDA_VISIBLE_DEVICES is read as torch reads it."""

from __future__ import annotations

import itertools
import os
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headway.machine.facts import Gpu, Machine

GPUS = tuple(Gpu("H100", f"GPU-{n}f0e0050-1111-2222-3333-44445555000{n % 4}") for n in range(8))


def shown_by_torch(mask: str) -> list[int] | None:
    """Return the indices that torch's own parser finds; None where it raises."""
    cuda = pytest.importorskip("torch.cuda")
    try:
        with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES=mask):
            visible = cuda._parse_visible_devices()
        if visible and isinstance(visible[0], str):
            visible = cuda._transform_uuid_to_ordinals(visible, [gpu.uuid for gpu in GPUS])
    except ValueError:  # of int(), for such as "+" and a superscript
        return None
    return list(itertools.takewhile(lambda index: index < len(GPUS), visible))


_ENTRY = st.one_of(
    st.integers(-2, 12).map(str),
    st.sampled_from([gpu.uuid[:length] for gpu in GPUS for length in (4, 5, 12, 40)]),
    st.sampled_from(
        ["", "-1", "+1", "1gpu", "0x1", "1.0", "0-3", "0;1", "MIG-1", "none", "²", "٣"]
    ),
    st.text("0123456789 +-;.'\"xGPUMI", max_size=6),
)
_MASKS = st.lists(st.builds("{1}{0}{1}".format, _ENTRY, st.sampled_from(["", " "])), max_size=5)


@given(_MASKS.map(",".join))
@example("0," + "9" * 3000)
def test_each_spelling_shows_the_gpus_that_torch_shows(mask: str) -> None:
    here = [GPUS.index(gpu) for gpu in Machine(gpus=GPUS, mask=mask).visible_gpus]
    assert shown_by_torch(mask) in (None, here)
