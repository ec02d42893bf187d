"""The grammar of `devices`: what is written, which GPUs that means, and which it never means."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headway.machine.devices import ALL, DeviceSpec, Name, parse_devices
from headway.machine.facts import EXCLUSIVE, PROHIBITED, Gpu, GpuUse, Machine
from tests.launcher.plan.planning import plan, set_by

IDLE = GpuUse(4 * 2**20, 0, ())


def cards(count: int) -> tuple[Gpu, ...]:
    return tuple(
        Gpu("H100", f"GPU-{index:04x}beef", 80 * 2**30, (9, 0), use=IDLE) for index in range(count)
    )


EIGHT = cards(8)
names = st.one_of(
    st.integers(0, 12), st.sampled_from(["GPU-0002beef", "GPU-0007", "GPU-ffff", "MIG-a1/1/0"])
)
specs = st.one_of(
    st.just(ALL),
    st.integers(1, 9999).map(lambda count: DeviceSpec(first=count)),
    st.integers(1, 9999).map(lambda count: DeviceSpec(idle=count)),
    st.lists(names, min_size=1, unique=True).map(lambda named: DeviceSpec(named=tuple(named))),
)


@pytest.mark.parametrize(
    ("raw", "indices"),
    [
        ("3", [0, 1, 2]),
        ("-1", [0, 1, 2, 3, 4, 5, 6, 7]),
        (["0"], [0]),
        (["1", "3"], [1, 3]),
        ("1, 3", [1, 3]),
        ("1,", [1]),
        ("[3,1]", [3, 1]),
        ("0-3", [0, 1, 2, 3]),
        ("GPU-0005,1", [5, 1]),
        ("idle:2", [0, 1]),
    ],
)
def test_a_spec_means_these_gpus_of_eight(raw: str | list[str], indices: list[int]) -> None:
    selection = parse_devices(raw).select(EIGHT)
    assert (list(selection.indices), selection.problems) == (indices, ())


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ("9", "only 8 of 8 GPUs are usable"),
        ("7,8", "GPU 8 does not exist"),
        ("GPU-ffff", "GPU GPU-ffff does not exist"),
        ("GPU-00", "is a prefix of the UUIDs of 8 GPUs"),
        ("2,GPU-0002", "GPU 2 is listed twice"),
        ("idle:9", "only 8 of 8 GPUs are idle"),
    ],
)
def test_a_spec_that_eight_gpus_cannot_obey_says_why(raw: str, reason: str) -> None:
    assert reason in "; ".join(parse_devices(raw).select(EIGHT).problems)


def test_gpus_chosen_by_number_pass_over_those_that_nobody_can_use() -> None:
    gpus = (EIGHT[0]._replace(compute_mode=PROHIBITED), *EIGHT[1:4])
    for raw, indices in (("all", (1, 2, 3)), ("2", (1, 2)), ("idle:1", (1,))):
        selection = parse_devices(raw).select(gpus)
        assert selection.indices == indices
        assert selection.skipped[0] == "GPU 0: its compute mode is prohibited"
    assert "GPU 0 cannot be used: its compute mode is prohibited" in (
        parse_devices("0,").select(gpus).problems
    )


@pytest.mark.parametrize(
    ("gpu", "reason"),
    [
        (EIGHT[0]._replace(use=GpuUse(0, 0, (17, 18))), "used by processes 17, 18"),
        (EIGHT[0]._replace(use=GpuUse(5 * 2**30, 0, ())), "5.0 GiB of its memory is in use"),
        (EIGHT[0]._replace(use=GpuUse(0, 40, ())), "utilization is 40 %"),
        (EIGHT[0]._replace(use=None), "does not report its usage"),
        (EIGHT[0]._replace(claimed_by="another launch"), "claimed by another launch"),
        (
            EIGHT[0]._replace(compute_mode=EXCLUSIVE, use=GpuUse(0, 0, (17,))),
            "exclusive-process, and process 17 uses it",
        ),
    ],
)
def test_a_gpu_that_is_not_idle_is_passed_over_with_the_reason(gpu: Gpu, reason: str) -> None:
    selection = parse_devices("idle:1").select((gpu, EIGHT[1]))
    assert selection.indices == (1,)
    assert reason in selection.skipped[0]


def test_an_exclusive_gpu_that_nobody_uses_is_idle() -> None:
    gpu = EIGHT[0]._replace(compute_mode=EXCLUSIVE)
    assert parse_devices("idle:1").select((gpu,)).indices == (0,)


@given(specs)
@example(DeviceSpec(named=(1,)))
def test_every_spec_is_read_back_from_its_own_text(spec: DeviceSpec) -> None:
    assert parse_devices(str(spec)) == spec
    assert spec.describe()


@given(st.one_of(st.text(), st.text("0123456789-,/[]: GPUMIidle"), st.lists(st.text())))
@example("00")
def test_any_text_is_read_or_refused_with_a_reason(raw: str | list[str]) -> None:
    reason = "it was read"
    try:
        spec = parse_devices(raw)
    except ValueError as error:
        spec, reason = ALL, str(error)
    assert reason
    assert parse_devices(str(spec)) == spec


@settings(max_examples=60)
@given(st.one_of(st.none(), st.lists(st.integers(0, 7), min_size=1, unique=True)), st.data())
def test_a_selection_goes_through_an_existing_mask_and_never_around_it(
    mask: list[int] | None, data: st.DataObject
) -> None:
    by_uuid = data.draw(st.booleans())
    variable = None
    if mask is not None:
        variable = ",".join(EIGHT[index].uuid if by_uuid else str(index) for index in mask)
    machine = Machine(gpus=EIGHT, mask=variable)
    visible = machine.visible_gpus
    wanted: list[Name] = data.draw(
        st.lists(st.integers(0, len(visible) - 1), min_size=1, unique=True)
    )
    launch = plan(machine, devices=[str(name) for name in wanted])
    selected = launch.settings.devices.select(visible).indices
    assert launch.gpus == selected
    changes = set_by(launch)
    if "CUDA_VISIBLE_DEVICES" in changes:
        machine = machine._replace(mask=changes["CUDA_VISIBLE_DEVICES"])
    assert list(machine.visible_gpus) == [visible[index] for index in selected]
