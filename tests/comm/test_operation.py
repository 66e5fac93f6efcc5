from __future__ import annotations

import torch

from shardwright.comm.transport import TensorSpec, memberships, operations
from shardwright.pipeline import TensorInfo
from tests.runtime.sketch import Sketch, chain, every_collective, identity


def test_a_pair_is_one_operation() -> None:
    parts = memberships(chain(3))
    assert sorted(parts) == ["recv.y0@d1", "recv.y1@d2", "send.y0@d1", "send.y1@d2"]
    send, recv = parts["send.y1@d2"], parts["recv.y1@d2"]
    assert send.operation is recv.operation
    assert (send.member, recv.member) == (0, 1)
    spec = TensorSpec((3, 4), torch.float32)
    operation = send.operation
    assert (operation.kind, operation.ranks) == ("send", (1, 2))
    assert (operation.inputs, operation.outputs) == ((spec, None), (None, spec))


def test_tags_number_the_groups() -> None:
    found = operations(every_collective(3))
    assert [operation.tag for operation in found] == list(range(len(found)))
    assert [operation.group for operation in found] == sorted(o.group for o in found)


def test_metadata() -> None:
    found = {operation.group: operation for operation in operations(every_collective(3))}
    assert (found["reduce"].reduce_op, found["reduce"].root) == ("sum", 2)
    assert found["broadcast"].root == 2
    assert (found["all_to_all"].cut, found["all_to_all"].join) == (0, 1)
    assert (found["reduce_scatter"].cut, found["reduce_scatter"].join) == (1, None)
    assert (found["all_gather"].cut, found["all_gather"].join) == (None, 0)
    assert (found["all_reduce"].cut, found["all_reduce"].join) == (None, None)


def test_members_stand_by_device_idx_wherever_they_run() -> None:
    sketch = Sketch(2)
    sketch.input("x", (2,), "d1")
    sent = sketch.send("x", "d1", "d0")
    sketch.fx("d0.0", "d0", [sent], ["y"], identity)
    (operation,) = operations(sketch.finish(["y"]))
    assert operation.ranks == (1, 0)


def test_a_spec_keeps_strides() -> None:
    assert TensorSpec.of(TensorInfo((2, 3), "bf16", strides=(1, 2))) == TensorSpec(
        (2, 3), torch.bfloat16, (1, 2)
    )
