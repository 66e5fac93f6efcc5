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
    return tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


CASES = {
    "torch.zeros(3, 4)": torch.zeros(3, 4),
    "torch.ones(2, dtype=torch.float64)": torch.ones(2, dtype=torch.float64),
    "torch.full((2, 3), 0.5)": torch.full((2, 3), 0.5),
    'torch.full((2,), float("-inf"))': torch.full((2,), -torch.inf),
    "torch.arange(512).reshape(1, 512)": torch.arange(512).expand(1, -1),
    "torch.arange(4, 9)": torch.arange(4, 9),
    "torch.arange(0, 12, 3)": torch.arange(0, 12, 3),
    "torch.tril(torch.ones(8, 8, dtype=torch.bool)).reshape(1, 1, 8, 8)": torch.ones(
        1, 1, 8, 8, dtype=torch.bool
    ).tril(),
    'torch.triu(torch.full((3, 3), float("-inf")), 1)': torch.full((3, 3), -torch.inf).triu(1),
    "1.0 / 10000.0 ** (torch.arange(0, 16, 2).float() / 16)": 1.0
    / (10000.0 ** (torch.arange(0, 16, 2, dtype=torch.int64).float() / 16)),
    "torch.tensor([0.1, 2.5], dtype=torch.float32)": torch.tensor([0.1, 2.5]),
    'torch.tensor([float("nan"), -0.0], dtype=torch.float32)': torch.tensor([torch.nan, -0.0]),
    "torch.tensor(3, dtype=torch.int64)": torch.tensor(3),
    "torch.tensor([True, False, True], dtype=torch.bool)": torch.tensor([True, False, True]),
}


@pytest.mark.parametrize("text", CASES)
def test_short_forms(text: str) -> None:
    assert contents(CASES[text]) == text
    assert bits(evaluated(text)) == bits(CASES[text])


INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
INTEGERS += [torch.uint16, torch.uint32, torch.uint64]
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
FLOATS += [torch.float8_e4m3fn, torch.float8_e5m2]
NUMBERS = st.floats(width=32, allow_nan=False)
"""One NaN is as good as another, and only one of them has a text."""


def assert_made_again(tensor: Tensor) -> None:
    text = contents(tensor)
    assert text is not None
    made = evaluated(text)
    assert (made.shape, made.dtype) == (tensor.shape, tensor.dtype)
    assert bits(made) == bits(tensor)


@given(st.lists(NUMBERS, min_size=1, max_size=8), st.sampled_from(FLOATS))
def test_whatever_is_given_makes_the_tensor_bit_for_bit(
    numbers: list[float], dtype: torch.dtype
) -> None:
    assert_made_again(torch.tensor(numbers, dtype=torch.float32).to(dtype))


@given(st.data(), st.sampled_from(INTEGERS))
def test_integers_of_every_width(data: st.DataObject, dtype: torch.dtype) -> None:
    info = torch.iinfo(dtype)
    start, step = data.draw(st.integers(info.min, info.max)), data.draw(st.integers(-4, 4))
    steps = [start + step * i for i in range(data.draw(st.integers(1, 6)))]
    numbers = data.draw(st.lists(st.integers(info.min, info.max), min_size=1, max_size=6))
    assert_made_again(torch.tensor(numbers, dtype=dtype))
    assert_made_again(torch.tensor([min(max(n, info.min), info.max) for n in steps], dtype=dtype))


@given(
    st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=5),
    st.sampled_from([torch.complex64, torch.complex128]),
)
def test_complex_numbers(numbers: list[tuple[float, float]], dtype: torch.dtype) -> None:
    tensor = torch.view_as_complex(torch.tensor(numbers, dtype=torch.float64)).to(dtype)
    assert_made_again(tensor)
    assert_made_again(tensor.conj())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([-(2**63), 0, 2**62]),
        torch.tensor([2**63 - 3, 2**63 - 2, 2**63 - 1]),
        torch.tensor([1e300, 2e300, 3e300], dtype=torch.float64),
        torch.tensor([0, 3e38, 3e38]),
        torch.tensor([0, 3e4, 6e4], dtype=torch.float16),
        torch.tensor([125, 126, 127], dtype=torch.int8),
        torch.tensor([2**64 - 1, 2**64 - 1], dtype=torch.uint64),
        torch.tensor([-1.0, 0.0, 1.0]).to(torch.float8_e5m2),
        torch.full((2, 2), torch.finfo(torch.float32).min),
    ],
)
def test_numbers_at_the_ends_of_their_range(tensor: Tensor) -> None:
    assert_made_again(tensor)


@pytest.mark.filterwarnings("ignore:.*quantiz", "ignore:.*deprecated")
def test_what_no_form_makes_has_no_text() -> None:
    assert contents(torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)) is None


def test_what_is_long_and_irregular_has_no_text() -> None:
    assert contents(torch.randn(100)) is None
    assert contents(torch.empty(3, device="meta")) is None


def test_options_stand_behind_the_arguments() -> None:
    assert contents(torch.zeros(2), ', device="cpu"') == 'torch.zeros(2, device="cpu")'
    assert empty((), torch.float32) == "torch.empty(())"
    assert empty((3, 4), torch.float64) == "torch.empty(3, 4, dtype=torch.float64)"
