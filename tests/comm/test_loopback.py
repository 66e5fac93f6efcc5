from __future__ import annotations

import pytest

from shardwright.comm.loopback import Loopback, LoopbackTransport
from shardwright.comm.transport import Membership
from tests.comm.cases import KINDS, Case, given, operation, same, table, wanted


@pytest.mark.parametrize("case", table(), ids=lambda case: f"{case.kind}-{case.dtype}")
def test_table(case: Case) -> None:
    transport = LoopbackTransport(Loopback())
    op, inputs = operation(case), given(case)
    pending = [transport.start(Membership(op, i), 0, tensor) for i, tensor in enumerate(inputs)]
    assert all(p.ready() for p in pending)
    outputs = [p.result() for p in pending]
    assert all(same(a, b) for a, b in zip(outputs, wanted(case, inputs), strict=True))
    assert all(p.interval() is not None for p in pending)
    for output, spec in zip(outputs, op.outputs, strict=True):
        assert spec is None or spec.strides is None or output.stride() == spec.strides


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_members_may_come_in_any_order(kind: str, order: tuple[int, ...]) -> None:
    case = Case(kind)
    transport = LoopbackTransport(Loopback())
    op, inputs = operation(case), given(case)
    pending = {}
    for member in order:
        pending[member] = transport.start(Membership(op, member), 0, inputs[member])
    expected = wanted(case, inputs)
    assert all(p.ready() and same(p.result(), expected[i]) for i, p in pending.items())


def test_a_receiver_waits_for_its_sender_and_a_sender_for_nobody() -> None:
    transport = LoopbackTransport(Loopback())
    op, inputs = operation(Case("send")), given(Case("send"))
    receiver = transport.start(Membership(op, 1), 0, None)
    assert not receiver.ready()
    sender = transport.start(Membership(op, 0), 0, inputs[0])
    assert sender.ready()
    assert receiver.ready()


def test_calls_are_kept_apart() -> None:
    transport = LoopbackTransport(Loopback())
    op = operation(Case("send"))
    for call in (0, 1):
        transport.start(Membership(op, 0), call, given(Case("send"), seed=call)[0])
    for call in (1, 0):
        found = transport.start(Membership(op, 1), call, None).result()
        assert same(found, given(Case("send"), seed=call)[0])
