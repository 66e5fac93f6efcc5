"""Outputs of steps on their way to rank 0."""

from __future__ import annotations

from shardwright.comm.transport import operations
from shardwright.launch.relays import relays, relays_of
from tests.runtime.linear_step import WIDTH, linear_step
from tests.runtime.sketch import chain


def test_each_output_that_is_elsewhere_is_sent_behind_the_files_own() -> None:
    pipeline = linear_step("gpipe", microbatches=2, data=2)
    found = relays(pipeline)
    assert list(found) == ["loss", "h2.0", "h2.1"]
    tags = [operation.tag for operation in found.values()]
    count = len(operations(pipeline))
    assert tags == [count, count + 1, count + 2]
    assert [operation.ranks for operation in found.values()] == [(2, 0), (2, 0), (3, 0)]
    spec = found["h2.1"].given(0)
    assert (spec.shape, found["h2.1"].gotten(1)) == ((2, 2, WIDTH), spec)
    assert found["loss"].given(0).shape == ()


def test_the_parts_of_ranks() -> None:
    found = relays(linear_step("gpipe", microbatches=2, data=2))
    assert [(r.tensor, r.gives) for r in relays_of(3, found)] == [("h2.1", True)]
    assert [(r.tensor, r.gives) for r in relays_of(0, found)] == [
        ("loss", False), ("h2.0", False), ("h2.1", False),
    ]  # fmt: skip
    assert relays_of(1, found) == {}


def test_outputs_that_are_there_stay() -> None:
    assert relays(linear_step(ranks=1)) == {}
    assert relays(chain(2)) == {}
