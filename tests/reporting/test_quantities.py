import pytest

from shardwright.ir.tensor_meta import count_text
from shardwright.reporting.quantities import slots_text


def test_count() -> None:
    assert (count_text(1, "tensor"), count_text(2, "tensor")) == ("1 tensor", "2 tensors")
    assert (count_text(1, "batch"), count_text(0, "batch")) == ("1 batch", "0 batches")


@pytest.mark.parametrize(
    ("slots", "text"),
    [
        (["d0"], "d0"),
        (["d0", "d1", "d2"], "d0, d1, d2"),
        (["d1", "d2", "d3", "d4"], "d1 … d4"),
        (["d0", "d2", "d4", "d6"], "d0, d2, d4, d6"),
    ],
)
def test_slots(slots: list[str], text: str) -> None:
    assert slots_text(slots, [f"d{i}" for i in range(8)]) == text
