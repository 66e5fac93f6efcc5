"""What buffers hold, as Python."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardwright.codegenerate.writing.contents import contents, empty


def evaluated(text: str) -> Tensor:
    made = eval(text, {"torch": torch})
    assert isinstance(made, Tensor)
    return made


def bits(tensor: Tensor) -> bytes:
    """What a tensor holds; one NaN is as good as another."""
    tensor = tensor.masked_fill(tensor.isnan(), 0.5) if tensor.is_floating_point() else tensor
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


CASES = {
    "torch.zeros(3, 4)": torch.zeros(3, 4),
    "torch.ones(2, dtype=torch.float64)": torch.ones(2, dtype=torch.float64),
    "torch.full((2, 3), 0.5, dtype=torch.float32)": torch.full((2, 3), 0.5),
    "torch.full((2,), -torch.inf, dtype=torch.float32)": torch.full((2,), -torch.inf),
    "torch.arange(512).reshape(1, 512)": torch.arange(512).expand(1, -1),
    "torch.arange(4, 9)": torch.arange(4, 9),
    "torch.arange(0, 12, 3)": torch.arange(0, 12, 3),
    "torch.arange(6).expand(3, 6).clone()": torch.arange(6).expand(3, 6),
    "torch.tril(torch.ones(8, 8, dtype=torch.bool)).reshape(1, 1, 8, 8)": torch.ones(
        1, 1, 8, 8, dtype=torch.bool
    ).tril(),
    "torch.triu(torch.full((3, 3), -torch.inf), 1)": torch.full((3, 3), -torch.inf).triu(1),
    "1.0 / 10000.0 ** (torch.arange(0, 16, 2).float() / 16)": 1.0
    / (10000.0 ** (torch.arange(0, 16, 2, dtype=torch.int64).float() / 16)),
    "torch.tensor([0.1, 2.5], dtype=torch.float32)": torch.tensor([0.1, 2.5]),
    "torch.tensor(3, dtype=torch.int64)": torch.tensor(3),
    "torch.tensor([True, False, True], dtype=torch.bool)": torch.tensor([True, False, True]),
}


@pytest.mark.parametrize("text", CASES)
def test_short_forms(text: str) -> None:
    assert contents(CASES[text]) == text
    assert bits(evaluated(text)) == bits(CASES[text])


@given(
    st.lists(st.floats(width=32), min_size=1, max_size=8),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_whatever_is_given_makes_the_tensor_bit_for_bit(
    numbers: list[float], dtype: torch.dtype
) -> None:
    tensor = torch.tensor(numbers, dtype=dtype)
    text = contents(tensor)
    assert text is not None
    made = evaluated(text)
    assert torch.equal(made.isnan(), tensor.isnan())
    assert (made.shape, made.dtype) == (tensor.shape, tensor.dtype)
    assert bits(made) == bits(tensor)


def test_what_is_long_and_irregular_has_no_text() -> None:
    assert contents(torch.randn(100)) is None
    assert contents(torch.empty(3, device="meta")) is None


def test_options_stand_behind_the_arguments() -> None:
    assert contents(torch.zeros(2), ', device="cpu"') == 'torch.zeros(2, device="cpu")'
    assert empty((), torch.float32) == "torch.empty(())"
    assert empty((3, 4), torch.float64) == "torch.empty(3, 4, dtype=torch.float64)"
