import pytest

from shardwright.report.quantities import bytes_text, count_text, seconds_text, tensor_text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1536, "1.54 kB"), (90868376, "90.9 MB"), (3 * 10**9, "3 GB")],
)
def test_bytes(count: int, text: str) -> None:
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 µs"), (5e-6, "5.00 µs"), (0.0123, "12.3 ms"), (61.5, "61.5 s"), (1234.5, "1234 s")],
)
def test_seconds(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


def test_tensor_and_count() -> None:
    assert tensor_text("f32", (8, 128)) == "f32[8, 128]"
    assert tensor_text("i64", ()) == "i64[]"
    assert (count_text(1, "tensor"), count_text(2, "tensor")) == ("1 tensor", "2 tensors")
