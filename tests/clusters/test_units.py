from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.clusters.units import UNITS, parsed, written

QUANTITIES = st.sampled_from(sorted(UNITS))


@pytest.mark.parametrize(
    ("text", "quantity", "number"),
    [
        ("80 GB", "bytes", 80 * 10**9),
        ("80GiB", "bytes", 80 * 2**30),
        ("1e3", "bytes", 1000),
        ("5 us", "seconds", Decimal("5e-6")),
        ("5 µs", "seconds", Decimal("5e-6")),
        (".5 ms", "seconds", Decimal("5e-4")),
        ("312 TFLOP/s", "operations a second", 312 * 10**12),
        ("25 GB/s", "bytes a second", 25 * 10**9),
        ("200 Gbit/s", "bytes a second", 25 * 10**9),
        ("1 MiB/s", "bytes a second", 2**20),
    ],
)
def test_texts_with_units(text, quantity, number):
    assert parsed(text, quantity) == number


@pytest.mark.parametrize(
    ("number", "quantity", "text"),
    [
        (80 * 10**9, "bytes", "80 GB"),
        (1536, "bytes", "1.536 kB"),
        (5e-6, "seconds", "5 us"),
        (2.5e-10, "seconds", "0.25 ns"),
        (0.0, "seconds", "0 ns"),
        (312e12, "operations a second", "312 TFLOP/s"),
        (0.5e9, "bytes a second", "500 MB/s"),
        (float("inf"), "bytes a second", "inf TB/s"),
    ],
)
def test_numbers_in_the_unit_that_reads_best(number, quantity, text):
    assert written(number, quantity) == text


@given(st.floats(min_value=0, allow_nan=False), QUANTITIES)
def test_what_is_written_is_read_to_the_last_bit(number, quantity):
    assert float(parsed(written(number, quantity), quantity)) == number


@given(st.integers(0, 10**18), QUANTITIES)
def test_whole_numbers_stay_whole(number, quantity):
    assert parsed(written(number, quantity), quantity) == number


@pytest.mark.parametrize(
    ("text", "quantity", "message"),
    [
        (
            "fast",
            "bytes a second",
            "found 'fast', expected a number of bytes a second, as 2.5 GB/s",
        ),
        ("5 GB", "seconds", "found the unit 'GB', expected one for seconds: s, ms, us, µs, ns"),
        ("5 gb", "bytes", "found the unit 'gb'"),
        ("5 TFLOPS", "operations a second", "expected one for operations a second: FLOP/s"),
        ("", "bytes", "found '', expected a number"),
        ("1 2", "bytes", "found the unit '2'"),
        ("nan", "seconds", "found 'nan'"),
    ],
)
def test_what_is_no_such_quantity(text, quantity, message):
    with pytest.raises(ValueError, match=message):
        parsed(text, quantity)
