"""SLURM's lists are read as scontrol reads them."""

from __future__ import annotations

import pytest

from headway.launcher.clusters.slurm import read_nodelist, read_repeated


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("login", ["login"]),
        ("n1,n2", ["n1", "n2"]),
        ("n[1-3,7]", ["n1", "n2", "n3", "n7"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("gpu-[0-1]-ib,n5", ["gpu-0-ib", "gpu-1-ib", "n5"]),
        ("rack[1-2]n[03-04]", ["rack1n03", "rack1n04", "rack2n03", "rack2n04"]),
        ("127.0.0.[2-3]", ["127.0.0.2", "127.0.0.3"]),
        ("a[1,3],b[2]", ["a1", "a3", "b2"]),
    ],
)
def test_a_list_of_nodes_is_read_in_its_order(text: str, nodes: list[str]) -> None:
    assert read_nodelist(text) == nodes


@pytest.mark.parametrize("text", ["", "n1,", "n[1", "n1]", "n[2-1]", "n[a]", "n[1-9999999]", "n[]"])
def test_what_is_no_list_of_nodes_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not"):
        read_nodelist(text)


@pytest.mark.parametrize(
    ("text", "numbers"), [("1", [1]), ("2(x3),1", [2, 2, 2, 1]), ("1,2(x2)", [1, 2, 2])]
)
def test_numbers_for_each_node_are_read(text: str, numbers: list[int]) -> None:
    assert read_repeated(text) == numbers


@pytest.mark.parametrize("text", ["", "a", "2(x)", "2(x99999999)", "1,,2", "-1"])
def test_what_are_no_numbers_for_nodes_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not"):
        read_repeated(text)
