"""Limits of real and described machines, and where each figure comes from."""

import mlx.core as mx
import pytest

from mlxkv.budget import machines
from mlxkv.budget.machines import (
    METAL,
    METAL_WITH_NEURAL_ACCELERATORS,
    UNFUSED,
    described_machine,
    find_machine,
    machine_from_device,
    table_sizes,
    with_wired_limit,
)
from mlxkv.core.errors import UsageError
from mlxkv.core.units import GIB, MIB

M4_MAX = {
    "device_name": "Apple M4 Max",
    "architecture": "applegpu_g16s",
    "memory_size": 128 * GIB,
    "max_recommended_working_set_size": 115_448_725_504,
    "max_buffer_length": 86_586_540_032,
    "resource_limit": 499_000,
}


@pytest.mark.parametrize(
    ("gib", "macos", "limit"),
    [(24, "15", 17_179_869_184), (24, "26", 19_069_665_280), (24, "15.6.1", 17_179_869_184), (8, "26", 5_726_633_984),
     (16, "26", 12_713_120_000), (128, "26.6.1", 115_448_725_504), (512, "27", 498_216_206_336)],
)  # fmt: skip
def test_a_posted_limit_is_exact(gib, macos, limit):
    machine = described_machine(memory_bytes=gib * GIB, macos=macos)
    assert machine.gpu_limit_bytes == limit
    assert "gpu_limit_bytes" not in machine.estimated
    assert "limit from macs.json" in machine.source


@pytest.mark.parametrize(
    ("gib", "macos", "limit"),
    [(18, "15", 12 * GIB), (192, "15", 144 * GIB), (40, "15", 30 * GIB), (18, "26", 18 * 12_713_120_000 // 16),
     (96, "26", 96 * 55_662_788_608 // 64), (192, "26", 192 * 115_448_725_504 // 128)],
)  # fmt: skip
def test_a_gap_is_filled_by_the_rule_and_marked(gib, macos, limit):
    machine = described_machine(memory_bytes=gib * GIB, macos=macos)
    assert machine.gpu_limit_bytes == pytest.approx(limit, abs=1)
    assert "gpu_limit_bytes" in machine.estimated
    assert "estimated by the rule" in machine.source


@pytest.mark.parametrize("macos", ["15", "26"])
def test_more_memory_never_has_a_lower_limit(macos):
    sizes = sorted({*table_sizes(), *(gib * GIB for gib in range(8, 520, 8))})
    limits = [described_machine(memory_bytes=size, macos=macos).gpu_limit_bytes for size in sizes]
    assert limits == sorted(limits)


def test_the_default_is_a_mac_of_24_gb_under_macos_26():
    machine = described_machine()
    assert (machine.memory_bytes, machine.macos, machine.chip) == (24 * GIB, "26", "M4 Pro")
    assert machine.max_buffer_bytes / GIB == pytest.approx(13.3, abs=0.05)
    assert "assumed" in machine.source


@pytest.mark.skipif(mx.metal.is_available(), reason="a Mac answers for itself")
def test_off_a_mac_the_default_is_the_described_one():
    assert find_machine() == described_machine()


def test_this_mac_is_read_from_its_device():
    machine = machine_from_device(M4_MAX, macos="26.1")
    assert (machine.memory_bytes, machine.gpu_limit_bytes) == (128 * GIB, 115_448_725_504)
    assert (machine.max_buffer_bytes, machine.macos, machine.chip) == (86_586_540_032, "26.1", "M4 Max")
    assert machine.source == "this Mac, read with mx.device_info()"
    assert machine.estimated == ()
    assert machine.speed is not None


@pytest.mark.parametrize(
    ("read", "taken"),
    [("16.0", "26"), ("", "26"), ("26.1", "26.1"), ("27.0", "27.0"), ("15.5", "15.5"), ("99.1", "26"), ("x", "26")],
)
def test_a_version_of_macos_that_was_read_never_ends_a_command(read, taken):
    machine = machine_from_device(M4_MAX, macos=read)
    assert machine.macos == taken
    assert ("taken for" in machine.source) == (read != taken)
    assert described_machine(macos=machine.macos).macos == taken, "what a Mac says is good for a described one"


def test_a_mac_with_a_chip_nobody_listed_has_limits_and_no_rates():
    machine = machine_from_device(M4_MAX | {"device_name": "Apple M9 Nano"}, macos="30.0")
    assert (machine.chip, machine.speed) == ("M9 Nano", None)
    assert machine.gpu_limit_bytes == 115_448_725_504


def test_on_a_mac_what_is_not_given_is_this_mac_s(monkeypatch):
    monkeypatch.setattr(machines.mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(machines, "this_mac", lambda: machine_from_device(M4_MAX, macos="15.5"))
    assert find_machine().gpu_limit_bytes == 115_448_725_504
    assert find_machine(wired_limit_bytes=120 * GIB).gpu_limit_bytes == 120 * GIB
    described = find_machine(memory_bytes=24 * GIB)
    assert (described.macos, described.gpu_limit_bytes, described.chip) == ("15.5", 16 * GIB, "M4 Pro")
    assert find_machine(macos="26").memory_bytes == 128 * GIB


def test_a_wired_limit_replaces_the_gpu_limit_only():
    machine = with_wired_limit(described_machine(), 20480 * MIB)
    assert machine.gpu_limit_bytes == 20 * GIB
    assert machine.max_buffer_bytes == described_machine().max_buffer_bytes
    assert "--wired-limit" in machine.source
    assert with_wired_limit(described_machine(), 0) == described_machine()


def test_kernels_follow_chip_and_macos():
    assert described_machine(chip="M4 Max").kernels == METAL
    assert described_machine(chip="M5 Max").kernels == METAL_WITH_NEURAL_ACCELERATORS
    assert described_machine(chip="M5 Max", macos="15").kernels == METAL
    assert find_machine(chip="cpu").kernels == UNFUSED


def test_this_cpu_may_use_its_memory_and_has_no_longest_buffer():
    machine = find_machine(chip="CPU")
    assert machine.on_cpu
    assert machine.max_buffer_bytes is None
    assert machine.gpu_limit_bytes == machine.memory_bytes
    assert machine.speed is None


@pytest.mark.parametrize("name", ["M4 Pro", "m4 pro", "Apple M4  Pro", " M4 PRO "])
def test_a_chip_is_spelled_in_any_case(name):
    assert described_machine(chip=name).chip == "M4 Pro"


def test_every_chip_has_rates_in_order():
    for chip in machines._macs()["bandwidth_GBps"]:
        speed = described_machine(chip=chip).speed
        assert speed.worst.memory_bytes_per_s <= speed.typical.memory_bytes_per_s <= speed.best.memory_bytes_per_s
        assert speed.worst.ssd_bytes_per_s <= speed.typical.ssd_bytes_per_s <= speed.best.ssd_bytes_per_s
    assert set(machines._chips()) == set(machines._macs()["bandwidth_GBps"])


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"chip": "M7 Pro"}, "no chip 'M7 Pro' in the tables; did you mean M. Pro, M. Pro, M. Pro\\?"),
        ({"memory_bytes": 0}, "a Mac with 0 B of memory does not exist"),
        ({"memory_bytes": 2**60}, "does not exist"),
        ({"macos": "20"}, "there is no macOS '20'"),
        ({"macos": "Sequoia"}, "there is no macOS 'Sequoia'"),
        ({"macos": "9"}, "there is no macOS '9'"),
        ({"wired_limit_bytes": 25 * GIB}, "more than the machine's 24.00 GiB"),
    ],
)
def test_a_machine_that_cannot_be_is_refused(asked, words):
    with pytest.raises(UsageError, match=words):
        find_machine(**asked)
