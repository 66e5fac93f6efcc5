from __future__ import annotations

import pytest
import torch
from hypothesis import given as draw
from hypothesis import strategies as st

from shardwright.comm.rounds import combine
from shardwright.communication import even_sizes
from shardwright.ir.tensor_meta import DTYPES, torch_dtype
from shardwright.pipeline.rules import UNDEFINED
from tests.comm.cases import KINDS, Case, given, operation, same, table, wanted


@pytest.mark.parametrize("case", table(), ids=lambda case: f"{case.kind}-{case.dtype}")
def test_table(case: Case) -> None:
    inputs = given(case)
    outputs = combine(operation(case), inputs)
    assert all(same(a, b) for a, b in zip(outputs, wanted(case, inputs), strict=True))


sizes = st.integers(2, 4).flatmap(
    lambda count: st.tuples(
        *[st.lists(st.integers(0, 4), min_size=count, max_size=count).map(tuple)] * 2
    )
)


@draw(
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(list(DTYPES)),
    sizes=sizes,
    reduce_op=st.sampled_from(["sum", "avg", "max", "min"]),
    dims=st.permutations([0, 1, 2]),
    seed=st.integers(0, 1000),
)
def test_any_sizes(kind, dtype, sizes, reduce_op, dims, seed) -> None:
    if dtype in UNDEFINED.get(reduce_op, ()):
        reduce_op = "sum"
    count = 2 if kind == "send" else len(sizes[0])
    shape = [2, 3, 2]
    shape[dims[0]] = sum(sizes[0])
    case = Case(
        kind,
        dtype,
        tuple(shape),
        tuple(range(count)),
        reduce_op,
        dim=dims[0],
        sizes=sizes[0],
        src_dim=dims[1],
        src_sizes=sizes[1],
        root=count - 1,
    )
    inputs = given(case, seed)
    outputs = combine(operation(case), inputs)
    assert all(same(a, b) for a, b in zip(outputs, wanted(case, inputs), strict=True))


def test_sums_add_in_the_order_of_the_members() -> None:
    case = Case("all_reduce", ranks=(0, 1, 2), shape=(3,))
    inputs = [torch.full((3,), value) for value in (1e8, -1e8, 1.0)]
    assert combine(operation(case), inputs)[0].tolist() == [1.0] * 3
    assert combine(operation(case), [inputs[2], *inputs[:2]])[0].tolist() == [0.0] * 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_narrow_sums_round_once(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(64, generator=generator).to(dtype) for _ in range(4)]
    case = Case("all_reduce", ranks=(0, 1, 2, 3), shape=(64,))
    total = combine(operation(case), inputs)[0]
    expected = sum(tensor.float() for tensor in inputs).to(dtype)
    assert total.dtype == dtype
    assert same(total, expected)


def test_maximum_keeps_nan() -> None:
    case = Case("all_reduce", shape=(2,), reduce_op="max")
    outputs = combine(operation(case), [torch.tensor([1.0, float("nan")]), torch.tensor([2.0, 3])])
    assert outputs[0][0] == 2
    assert outputs[0][1].isnan()


def test_even_sizes_put_larger_pieces_first() -> None:
    assert even_sizes(10, 4) == [3, 3, 2, 2]
    assert even_sizes(2, 3) == [1, 1, 0]


@pytest.mark.parametrize("dtype", ["u8", "u16", "u32", "u64"])
@pytest.mark.parametrize(
    ("reduce_op", "expected"), [("sum", [0, 3, 0]), ("max", [-1, 2, -1]), ("min", [1, 1, 1])]
)
def test_unsigned_integers_wrap_around_and_keep_their_order(
    dtype: str, reduce_op: str, expected: list[int]
) -> None:
    """-1 is the largest number there is."""
    kind = torch_dtype(dtype)
    inputs = [torch.tensor(row).to(kind) for row in ([-1, 1, 1], [1, 2, -1])]
    case = Case("all_reduce", dtype, (3,), (0, 1), reduce_op)
    for found in combine(operation(case), inputs):
        assert found is not None
        assert torch.equal(found, torch.tensor(expected).to(kind))
