"""What is wired: the weights or nothing, never what macOS needs."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxkv.budget.machines import described_machine, table_sizes
from mlxkv.core.units import GIB
from mlxkv.engine.wiring import Metal, Wiring, decide_wiring, find_metal, most_wired, wire_weights

SIZES = st.integers(0, 600 * GIB)
METALS = st.builds(
    Metal,
    memory_bytes=SIZES.filter(bool),
    working_set_bytes=SIZES,
    macos=st.sampled_from([None, "13.6", "14.7.1", "15", "15.5", "26", "27.0"]),
)


def mac(gb: int, macos: str = "26") -> Metal:
    machine = described_machine(memory_bytes=gb * GIB, macos=macos)
    return Metal(machine.memory_bytes, machine.gpu_limit_bytes, macos)


@given(st.none() | METALS, SIZES, st.fractions(0, 1))
def test_what_is_wired_is_weights_within_the_working_set_and_leaves_macos_its_share(
    metal: Metal | None, active: int, kept: Fraction
) -> None:
    found = decide_wiring(metal, active, kept_share=float(kept))
    assert (found.wired_bytes == 0) == (found.reason is not None)
    if found.wired_bytes:
        assert metal is not None
        assert found.wired_bytes == min(active, metal.working_set_bytes)
        assert metal.memory_bytes - found.wired_bytes >= metal.memory_bytes * float(kept)
        assert metal.macos not in ("13.6", "14.7.1")
        assert found.wired_bytes <= most_wired(metal, kept_share=float(kept)).wired_bytes


@given(METALS, SIZES)
def test_with_fewer_weights_no_less_of_them_is_wired(metal: Metal, active: int) -> None:
    if decide_wiring(metal, active).wired_bytes == active > 0:
        assert decide_wiring(metal, active - 1).wired_bytes == active - 1


@pytest.mark.parametrize("gb", [size // GIB for size in table_sizes()])
def test_on_every_mac_a_model_of_half_its_memory_is_wired_and_one_of_three_quarters_is_not(gb: int) -> None:
    metal, half = mac(gb), gb * GIB // 2
    assert decide_wiring(metal, half) == Wiring(half)
    too_much = decide_wiring(metal, gb * GIB * 3 // 4)
    assert too_much.wired_bytes == 0 or metal.working_set_bytes <= gb * GIB * 2 / 3
    assert most_wired(metal).wired_bytes == min(metal.working_set_bytes, metal.memory_bytes * 2 // 3)


def test_the_reason_has_the_numbers() -> None:
    assert str(decide_wiring(mac(128), 95 * GIB)) == (
        "nothing wired: 95.00 GiB of weights would leave macOS less than 42.67 GiB of 128.00 GiB"
    )
    assert str(decide_wiring(mac(24), 4 * GIB)) == "4.00 GiB wired"
    assert decide_wiring(mac(24, "14.7"), 4 * GIB).reason == "macOS 14.7 wires nothing for MLX, 15 does"
    assert decide_wiring(mac(24), 0).reason == "no weights are loaded"


def test_without_metal_nothing_is_wired() -> None:
    if find_metal() is not None:
        pytest.skip("this machine has Metal")
    assert wire_weights() == decide_wiring(None, GIB) == Wiring(0, "MLX computes without Metal here")
