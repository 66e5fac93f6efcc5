from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwright.engine.timeline import Event
from shardwright.ir.tensor_meta import DTYPES, torch_dtype
from shardwright.launch.operators import OperatorSources, Script
from shardwright.launch.protocol import (
    CallFunction,
    Completed,
    Connection,
    EngineOptions,
    Failed,
    LoadProgram,
    Mailbox,
    RunStep,
    Stop,
    from_bytes,
    to_bytes,
)
from tests.comm.cases import same
from tests.runtime.linear_step import linear_step

Ends = tuple[Connection, Connection]


@pytest.fixture
def ends() -> Iterator[Ends]:
    pair = tuple(map(Connection, socket.socketpair()))
    yield pair
    for end in pair:
        end.close()


@pytest.mark.parametrize(
    "message",
    [
        RunStep(7, 1),
        CallFunction(7, "a:b", {"d0": ["w"]}),
        Stop(),
        Completed(7, {"n": 1}, [Event("d0", 0, 7, "t", "compute", 0.5, 1.5)]),
        Completed(7, error=Failed("ValueError", "no", "Traceback", "task", None)),
    ],
)
def test_messages_come_as_they_went(ends: Ends, message) -> None:
    ends[0].send(message)
    assert ends[1].receive() == (message, {})


def test_a_program_comes_as_it_went(ends: Ends) -> None:
    sources = OperatorSources(("a.b",), Script("a.py", "", ("a", "b")))
    step = linear_step(microbatches=2)
    message = LoadProgram(0, 1, step, "/d", None, {"w": "v"}, sources, EngineOptions(2, True, 3))
    ends[0].send(message)
    found, _ = ends[1].receive()
    fields = set(message.__struct_fields__) - {"document"}
    assert all(getattr(found, name) == getattr(message, name) for name in fields)
    names = found.document.__struct_fields__
    assert all(getattr(found.document, name) == getattr(step, name) for name in names)


@given(
    dtype=st.sampled_from(list(DTYPES)),
    shape=st.lists(st.integers(0, 3), max_size=4).map(tuple),
    data=st.data(),
)
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_tensors_keep_dtype_shape_and_strides(dtype, shape, data) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    tensor = torch.ones(shape).cumsum(0).to(torch_dtype(dtype)) if shape else torch.tensor(1.0)
    tensor = tensor.permute(order)
    sockets = socket.socketpair()
    with sockets[0], sockets[1]:
        Connection(sockets[0]).send(RunStep(0), {"x": tensor, "y": torch.arange(3)})
        _, tensors = Connection(sockets[1]).receive()
    assert list(tensors) == ["x", "y"]
    assert same(tensors["x"], tensor)
    strides = zip(tensor.shape, tensors["x"].stride(), tensor.stride(), strict=True)
    assert all(a == b for size, a, b in strides if size > 1 and tensor.numel())


def test_large_tensors_and_many_senders(ends: Ends) -> None:
    large = torch.arange(1_000_000)
    senders = [
        threading.Thread(target=ends[0].send, args=(RunStep(i), {"x": large + i})) for i in range(3)
    ]
    for sender in senders:
        sender.start()
    for _ in senders:
        message, tensors = ends[1].receive()
        assert torch.equal(tensors["x"], large + message.number)
    for sender in senders:
        sender.join()


def test_tensors_with_gaps_are_packed_in_memory_that_lives_until_it_is_sent() -> None:
    wide = torch.randn(8, 50, 12, dtype=torch.float64)
    given = {str(column): wide[:, :, column] for column in range(12)}
    _, found = from_bytes(to_bytes(Stop(), given))
    assert all(same(found[name], tensor) for name, tensor in given.items())


def test_the_end_is_noticed(ends: Ends) -> None:
    ends[0].close()
    with pytest.raises(EOFError):
        ends[1].receive()
    with pytest.raises(OSError, match="Broken pipe"):
        ends[1].send(Stop())


def test_a_message_cut_off_is_an_end(ends: Ends) -> None:
    ends[0]._socket.sendall(b"\x10\x00\x00")
    ends[0].close()
    with pytest.raises(EOFError):
        ends[1].receive()


def test_closing_wakes_who_reads(ends: Ends) -> None:
    closing = threading.Timer(0.1, ends[1].close)
    closing.start()
    with pytest.raises(EOFError):
        ends[1].receive()
    closing.join()


# --- between threads ------------------------------------------------------------------------------


def wakes(mailbox: Mailbox, timeout: float = 0) -> bool:
    return bool(select.select([mailbox.wakeup], [], [], timeout)[0])


def test_messages_come_in_order_and_wake() -> None:
    mailbox = Mailbox()
    assert mailbox.take() is None
    assert not wakes(mailbox)
    mailbox.put(RunStep(1))
    mailbox.put(Stop())
    assert wakes(mailbox)
    mailbox.drain()
    assert not wakes(mailbox)
    assert [mailbox.take() for _ in range(3)] == [(RunStep(1), {}), (Stop(), {}), None]


def test_notifying_never_blocks() -> None:
    mailbox = Mailbox()
    for _ in range(100_000):
        mailbox.notify()
    mailbox.drain()
    assert not wakes(mailbox)
    mailbox.notify()
    assert wakes(mailbox)


def test_another_thread_wakes_who_waits() -> None:
    mailbox = Mailbox()
    threading.Timer(0.1, mailbox.put, [Stop()]).start()
    assert wakes(mailbox, 20)
    assert mailbox.take() == (Stop(), {})
