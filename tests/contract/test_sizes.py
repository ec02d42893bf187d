"""Sizes are printed for people."""

from __future__ import annotations

from headway.contract.sizes import size


def test_sizes_are_in_the_unit_that_fits() -> None:
    assert [size(one) for one in (7, 1536, 3 * 2**20, 70 * 2**30)] == [
        *("7 B", "1.5 KiB", "3.0 MiB", "70.00 GiB"),
    ]
