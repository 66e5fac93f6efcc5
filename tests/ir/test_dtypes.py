import pytest
import torch

from shardwright.errors import GraphError
from shardwright.ir.dtypes import (
    DTYPES,
    SPECIFIED,
    describe_dtype,
    dtype_name,
    itemsize,
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
