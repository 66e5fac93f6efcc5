"""Native embedding and its gradient against torch's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import ExecError
from tests.kernels.native.calls import native_call


@settings(deadline=None)
@given(
    rows=st.integers(1, 20),
    columns=st.one_of(st.integers(1, 5), st.integers(14, 70)),
    shape=st.lists(st.integers(1, 5), max_size=3),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    index_dtype=st.sampled_from([torch.int64, torch.int32]),
    turned=st.booleans(),
    gap=st.booleans(),
    padding=st.integers(-1, 3),
    bad=st.sampled_from([None, float("nan"), float("inf")]),
)
def test_embedding_and_its_gradient(
    rows: int,
    columns: int,
    shape: list[int],
    dtype: torch.dtype,
    index_dtype: torch.dtype,
    turned: bool,
    gap: bool,
    padding: int,
    bad: float | None,
) -> None:
    table = torch.randn(rows, columns + 2 * gap, dtype=dtype)[:, :columns]
    if bad is not None:
        table[0, 0] = bad
    index = torch.randint(0, rows, shape, dtype=index_dtype)
    if turned:
        index = index.permute(list(reversed(range(index.dim()))))
    taken = torch.empty(*index.shape, columns + gap, dtype=dtype)[..., :columns]
    native_call("embedding", {}, [table, index], [taken])
    torch.testing.assert_close(taken, table[index.long()], rtol=0, atol=0, equal_nan=True)

    dtable = torch.full_like(table, 7.0)
    native_call("embedding_bwd", {"padding": padding}, [taken, index], [dtable])
    expected = torch.ops.aten.embedding_dense_backward.default(
        taken.contiguous(), index.contiguous(), rows, padding, False
    )
    torch.testing.assert_close(dtable, expected, equal_nan=True)


def test_threads_change_no_bit() -> None:
    torch.manual_seed(0)
    table, index = torch.randn(50, 384), torch.randint(0, 50, (4, 300))
    dy = torch.randn(4, 300, 384)
    found = []
    for threads in (1, 2, 3):
        y, dtable = torch.empty_like(dy), torch.empty_like(table)
        native_call("embedding", {}, [table, index], [y], threads=threads)
        native_call("embedding_bwd", {}, [dy, index], [dtable], threads=threads)
        found.append((y, dtable))
    assert torch.equal(found[0][0], table[index])
    for y, dtable in found[1:]:
        assert torch.equal(y, found[0][0])
        assert torch.equal(dtable, found[0][1])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("wrong", [-1, 50, 2**40])
def test_an_index_out_of_range_is_an_error(wrong: int, threads: int) -> None:
    table, index = torch.zeros(50, 64), torch.zeros(1000, dtype=torch.int64)
    index[700] = wrong
    taken = torch.zeros(1000, 64)
    message = f"index {wrong} at place 700 is no row of a table of 50"
    with pytest.raises(ExecError, match=message):
        native_call("embedding", {}, [table, index], [taken], threads=threads)
    with pytest.raises(ExecError, match=message):
        native_call("embedding_bwd", {}, [taken, index], [table], threads=threads)


@pytest.mark.parametrize(
    ("table", "index", "why"),
    [
        (torch.zeros(4, 3).t(), torch.zeros(2, dtype=torch.int64), "apart"),
        (torch.zeros(3, 4), torch.zeros(2), "i64 or i32"),
        (torch.zeros(3, 4).half(), torch.zeros(2, dtype=torch.int64), "dtypes"),
        (torch.zeros(3, 5), torch.zeros(2, dtype=torch.int64), "columns"),
    ],
)
def test_what_the_kernel_does_not_do_is_refused(
    table: torch.Tensor, index: torch.Tensor, why: str
) -> None:
    with pytest.raises(ExecError, match=why):
        native_call("embedding", {}, [table, index], [torch.zeros(2, 4)])
