"""Sizes, token counts and times: what is written can be read again, and what has two meanings is refused."""

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxkv.core import units
from mlxkv.core.errors import UsageError
from mlxkv.core.units import GIB, KIB, MIB, TIB, format_bytes, format_seconds, parse_bytes, parse_tokens


def test_the_examples_in_the_docstrings_hold():
    results = doctest.testmod(units)
    assert results.attempted > 0
    assert results.failed == 0


@given(st.integers(0, 2**53))
def test_a_count_of_bytes_is_read_exactly(count):
    assert parse_bytes(f"{count}B") == count


@given(st.integers(0, 2**53))
def test_what_is_written_is_read_back_to_two_decimals(count):
    text = format_bytes(count)
    unit = {"TiB": TIB, "GiB": GIB, "MiB": MIB, "KiB": KIB, "B": 1}[text.split()[1]]
    assert abs(parse_bytes(text.replace(",", "")) - count) <= 0.005 * unit + 1


@given(st.integers(1, 2**60))
def test_only_binary_units_are_written_and_the_number_is_at_least_one(count):
    number, unit = format_bytes(count).split()
    assert unit in {"B", "KiB", "MiB", "GiB", "TiB"}
    assert float(number.replace(",", "")) >= 1


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("0.0", 0),
        ("8GiB", 8 * GIB),
        ("8gib", 8 * GIB),
        (" 8 GB ", 8 * 10**9),
        ("0.5KiB", 512),
        ("1TB", 10**12),
        ("2TiB", 2 * TIB),
        ("3MiB", 3 * MIB),
        ("7b", 7),
    ],
)
def test_a_size_means_what_it_says(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["8", "1.5", "8G", "8k", "GiB", "", "-1GiB", "1e9B", "8 GiB!", "٣GiB"])
def test_a_size_with_two_meanings_or_none_is_refused(text):
    with pytest.raises(UsageError):
        parse_bytes(text)


def test_a_size_without_a_unit_is_answered_with_what_to_write():
    with pytest.raises(UsageError, match="write 8GiB, 8MiB or 8B"):
        parse_bytes("8")


@given(st.integers(1, 2**40))
def test_a_count_of_tokens_is_read_exactly(count):
    assert parse_tokens(str(count)) == count


@pytest.mark.parametrize(("text", "count"), [("32k", 32768), ("32K", 32768), ("1m", 2**20), (" 7 ", 7)])
def test_a_count_of_tokens_means_what_it_says(text, count):
    assert parse_tokens(text) == count


@pytest.mark.parametrize("text", ["0", "0k", "-1", "1.5k", "k", "", "1g"])
def test_what_is_not_a_count_of_tokens_is_refused(text):
    with pytest.raises(UsageError):
        parse_tokens(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.00 ms"),
        (0.00042, "0.42 ms"),
        (0.001, "1 ms"),
        (0.0994, "99 ms"),
        (0.1, "0.10 s"),
        (1, "1.0 s"),
        (59.9, "59.9 s"),
        (60, "1 min 0 s"),
        (3725, "62 min 5 s"),
    ],
)
def test_a_time_is_written_in_the_unit_a_person_would_use(seconds, text):
    assert format_seconds(seconds) == text
