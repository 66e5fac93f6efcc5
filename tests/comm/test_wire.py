from __future__ import annotations

import torch
from hypothesis import given as draw
from hypothesis import strategies as st

from shardwright.comm.transport import TensorSpec
from shardwright.comm.wire import conform, memory_of, pack, unpack
from shardwright.ir.tensor_meta import DTYPES, torch_dtype
from tests.comm.cases import same


def numbered(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (
        (torch.arange(max(1, torch.Size(shape).numel())) % 7)[: torch.Size(shape).numel()]
        .to(dtype)
        .view(shape)
    )


def round_trip(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    content = pack(conform(tensor, spec), spec)
    assert content.dtype == torch.uint8
    assert content.numel() == spec.nbytes
    received = torch.empty_like(content).copy_(content)
    return unpack(received, spec)


@draw(
    shape=st.lists(st.integers(0, 4), max_size=4).map(tuple),
    dtype=st.sampled_from(list(DTYPES)),
    data=st.data(),
)
def test_any_strides_come_back(shape, dtype, data) -> None:
    strides = data.draw(st.none() | st.tuples(*[st.integers(0, 9)] * len(shape)))
    if strides is not None:
        # Indices that share an element hold equal values: take them from one memory.
        memory = numbered((64 * len(shape) + 1,), torch_dtype(dtype))
        tensor = memory.as_strided(shape, strides).clone(memory_format=torch.contiguous_format)
    else:
        tensor = numbered(shape, torch_dtype(dtype))
    spec = TensorSpec(shape, torch_dtype(dtype), strides)
    found = round_trip(tensor, spec)
    assert same(found, tensor)
    if 0 not in shape:
        wanted = spec.steps
        assert all(size == 1 or found.stride(i) == wanted[i] for i, size in enumerate(shape))


def test_dense_memory_travels_as_it_is() -> None:
    tensor = numbered((2, 3, 4, 5)).to(memory_format=torch.channels_last)
    spec = TensorSpec((2, 3, 4, 5), torch.float32, tensor.stride())
    assert pack(conform(tensor, spec), spec).data_ptr() == tensor.data_ptr()


def test_an_expanded_tensor_travels_once() -> None:
    spec = TensorSpec((8, 1000), torch.float32, (0, 1))
    assert spec.nbytes == 4000
    tensor = numbered((1, 1000)).expand(8, 1000)
    assert same(round_trip(tensor, spec), tensor)


def test_gaps_do_not_travel() -> None:
    spec = TensorSpec((4, 2), torch.float32, (1000, 1))
    assert spec.nbytes == 32
    found = round_trip(numbered((4, 2)), spec)
    assert found.stride() == (1000, 1)


def test_a_slice_sends_its_own_part_of_the_memory() -> None:
    whole = numbered((6, 4))
    spec = TensorSpec((2, 4), torch.float32)
    assert same(round_trip(whole[2:4], spec), whole[2:4])


def test_memory_is_shared() -> None:
    tensor = torch.zeros(3, dtype=torch.int32)
    memory_of(tensor)[4:8] = (7).to_bytes(4, "little")
    assert tensor.tolist() == [0, 7, 0]
    assert len(memory_of(torch.zeros(0))) == 0
