import pytest

from shardwright.ir.quantities import format_bytes, seconds_text, tensor_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 µs"),
        (5e-6, "5 µs"),
        (0.00099999, "1 ms"),
        (0.0123, "12.3 ms"),
        (61.5, "61.5 s"),
        (1234.5, "1230 s"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (90_900_000, "90.9 MB"),
        (2_500_000_000, "2.5 GB"),
        (10**13, "10.0 TB"),
    ],
)
def test_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_types_of_tensors() -> None:
    assert tensor_text("f32", (8, 128)) == "f32[8, 128]"
    assert tensor_text("i64", ()) == "i64[]"
