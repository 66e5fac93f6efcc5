from __future__ import annotations

import torch
from hypothesis import given as draw
from hypothesis import strategies as st

from shardwright.comm.transport import TensorSpec


def places(spec: TensorSpec) -> list[int]:
    """Where each element lies, from the first."""
    grid = torch.zeros(spec.shape, dtype=torch.int64)
    for dim, step in enumerate(spec.steps):
        index = torch.arange(spec.shape[dim]) * step
        grid += index.view(-1, *[1] * (len(spec.shape) - dim - 1))
    return grid.flatten().tolist()


@draw(
    st.lists(st.integers(0, 4), max_size=4).flatmap(
        lambda shape: st.tuples(
            st.just(tuple(shape)), st.none() | st.tuples(*[st.integers(0, 9)] * len(shape))
        )
    )
)
def test_what_follows_from_strides(drawn) -> None:
    spec = TensorSpec(drawn[0], torch.float64, drawn[1])
    found = places(spec)
    distinct = len(set(found))
    assert spec.span == (max(found) + 1 if found else 0)
    if not spec.overlaps:
        assert distinct == len(found)
        assert spec.has_gaps == (spec.span > distinct)
        assert spec.nbytes == 8 * distinct
    else:
        assert not spec.has_gaps
        assert spec.nbytes == 8 * spec.span


def test_the_contiguous_spec() -> None:
    spec = TensorSpec((2, 3), torch.int16, (1, 2))
    assert spec.steps == (1, 2)
    assert spec.contiguous == TensorSpec((2, 3), torch.int16)
    assert spec.contiguous.steps == (3, 1)
    assert spec.nbytes == spec.contiguous.nbytes == 12
