import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.errors import GraphError
from shardwright.ir.tensor_meta import (
    DTYPES,
    SPECIFIED,
    TensorMeta,
    contiguous_strides,
    describe_dtype,
    dtype_name,
    format_bytes,
    itemsize,
    seconds_text,
    strides_or_none,
    torch_dtype,
)


@pytest.mark.parametrize("name", DTYPES)
def test_names_and_dtypes_are_one_to_one(name: str):
    dtype = torch_dtype(name)
    assert dtype_name(dtype) == describe_dtype(dtype) == name
    assert itemsize(name) == torch.empty(1, dtype=dtype).element_size()


def test_the_file_knows_the_ten_names_of_the_format():
    names = ["f64", "f32", "f16", "bf16", "f8", "bool", "i64", "i32", "i16", "i8"]
    assert list(SPECIFIED) == names
    assert torch_dtype("f8") is torch.float8_e4m3fn


def test_what_is_not_in_the_table_is_refused():
    with pytest.raises(GraphError, match="unknown dtype 'float32'; known are f64, f32"):
        torch_dtype("float32")
    with pytest.raises(GraphError, match=r"torch\.complex32 is not supported"):
        dtype_name(torch.complex32)
    assert describe_dtype(torch.complex32) == "torch.complex32"


SHAPES = st.lists(st.integers(0, 4), max_size=4)


@given(SHAPES)
def test_contiguous_strides_are_those_of_torch(shape: list[int]):
    assert contiguous_strides(shape) == torch.empty(shape).stride()
    assert strides_or_none(shape, contiguous_strides(shape)) is None


@given(SHAPES, st.randoms())
def test_strides_stand_exactly_where_a_tensor_is_not_contiguous(shape: list[int], random):
    order = random.sample(range(len(shape)), len(shape))
    tensor = torch.empty(shape).permute(order)
    found = strides_or_none(tensor.shape, tensor.stride())
    assert found == (None if tensor.is_contiguous() else tensor.stride())


def test_the_meta_of_a_tensor():
    tensor = torch.empty(2, 3).t()
    meta = TensorMeta.of(tensor)
    assert meta == TensorMeta((3, 2), "f32", (1, 3))
    assert (meta.numel, meta.nbytes, meta.is_dense, str(meta)) == (6, 24, True, "f32[3, 2]")
    assert (meta.same_order((1, 3)), meta.same_order((2, 1))) == (True, False)
    assert TensorMeta.of(meta.empty()) == meta
    assert TensorMeta((), "i64").full_strides == ()


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
