"""The strides of elementwise operators' results are those that torch gives."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.ir.tensor_meta import is_dense
from shardwright.kernels.strides import result_strides


@st.composite
def operands(draw: st.DrawFn) -> list[torch.Tensor]:
    """Tensors that broadcast together, their dimensions permuted, sliced and expanded."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    made = []
    for _ in range(draw(st.integers(1, 3))):
        order = draw(st.permutations(range(len(shape))))
        back = sorted(range(len(shape)), key=lambda dim: order[dim])
        base = torch.empty([shape[dim] * draw(st.sampled_from([1, 1, 1, 2])) for dim in order])
        tensor = base.permute(back)[tuple(slice(0, size) for size in shape)]
        for dim in range(len(shape)):
            if draw(st.integers(0, 4)) == 0:
                tensor = tensor.narrow(dim, 0, 1)
        made.append(tensor[0] if tensor.shape[0] == 1 and draw(st.booleans()) else tensor)
    return made


@given(operands())
def test_strides_are_those_of_torch(tensors: list[torch.Tensor]) -> None:
    made = {
        1: lambda a: torch.neg(a),
        2: lambda a, b: a + b,
        3: lambda a, b, c: torch.addcmul(a, b, c),
    }[len(tensors)](*tensors)
    found = result_strides(made.shape, [(item.shape, item.stride()) for item in tensors])
    sized = [dim for dim, size in enumerate(made.shape) if size > 1]
    assert [found[dim] for dim in sized] == [made.stride(dim) for dim in sized]


def test_dense_is_one_block() -> None:
    x = torch.empty(3, 4)
    assert is_dense(x.shape, x.stride())
    assert is_dense(x.t().shape, x.t().stride())
    assert not is_dense(x[:, :2].shape, x[:, :2].stride())
    assert not is_dense((3, 4), (1, 0))
