from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given as draw
from hypothesis import settings
from hypothesis import strategies as st

from shardwright.comm import (
    Loopback,
    LoopbackTransport,
    Membership,
    make_store,
    open_store,
    shared_memory,
)
from shardwright.comm.arena import Arena
from shardwright.comm.rendezvous import Rendezvous
from shardwright.comm.rounds import Address, Message
from shardwright.comm.shared_memory import SharedMemoryEndpoint
from shardwright.comm.transport import TensorSpec
from shardwright.errors import WorkerError
from shardwright.ir.tensor_meta import DTYPES
from shardwright.pipeline.rules import UNDEFINED
from tests.comm.cases import KINDS, Case, given, operation, same, table, wanted
from tests.comm.one_process import descriptors, finish, shared_posts, start_all, transports

CASES = table()


@pytest.mark.parametrize("large", [1, shared_memory.LARGE], ids=["in rooms", "by messages"])
def test_table(large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every case, two calls of it under way at once."""
    monkeypatch.setattr(shared_memory, "LARGE", large)
    with shared_posts(4) as endpoints:
        ranks = transports(endpoints)
        for tag, case in enumerate(CASES):
            op = operation(case, tag)
            under_way = [start_all(ranks, op, call, given(case, call)) for call in (0, 1)]
            for call in (1, 0):
                found = finish(under_way[call])
                for tensor, expected, spec in zip(
                    found, wanted(case, given(case, call)), op.outputs, strict=True
                ):
                    assert same(tensor, expected), case
                    assert spec is None or spec.strides is None or tensor.stride() == spec.strides
            assert all(part.interval() is not None for parts in under_way for part in parts)


@draw(
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(list(DTYPES)),
    reduce_op=st.sampled_from(["sum", "avg", "max", "min"]),
    sizes=st.lists(st.integers(0, 4), min_size=2, max_size=4).map(tuple),
    large=st.sampled_from([1, 100, shared_memory.LARGE]),
    seed=st.integers(0, 1000),
)
@settings(deadline=None)
def test_the_bits_are_those_of_one_process(kind, dtype, reduce_op, sizes, large, seed) -> None:
    """With contents whose sum depends on the order of the additions, and no negative zeros."""
    if dtype in UNDEFINED.get(reduce_op, ()):
        reduce_op = "sum"
    count = 2 if kind == "send" else len(sizes)
    case = Case(kind, dtype, (sum(sizes), 6), tuple(range(count)), reduce_op,
                sizes=sizes, src_sizes=(2,) * count, root=count - 1)  # fmt: skip
    op = operation(case)
    generator = torch.Generator().manual_seed(seed)
    inputs = [
        tensor * (torch.randn(tensor.shape, generator=generator) * 1e3).to(tensor.dtype) + 0.0
        if tensor is not None and tensor.dtype in (torch.float32, torch.float16, torch.bfloat16)
        else tensor
        for tensor in given(case, seed)
    ]
    board = LoopbackTransport(Loopback())
    local = [board.start(Membership(op, i), 0, tensor) for i, tensor in enumerate(inputs)]
    with pytest.MonkeyPatch.context() as patch, shared_posts(count) as endpoints:
        patch.setattr(shared_memory, "LARGE", large)
        found = finish(start_all(transports(endpoints), op, 0, inputs))
        assert all(same(a, b.result()) for a, b in zip(found, local, strict=True))


SPEC = TensorSpec((1000,), torch.float32)


def message(value: float, spec: TensorSpec = SPEC) -> Message:
    return Message(torch.full(spec.shape, value, dtype=spec.dtype), spec, (1,))


def test_what_was_sent_may_change_and_stays_what_it_was() -> None:
    with shared_posts(2) as (sender, receiver):
        parcel = message(1)
        sender.send([1], Address(0, 0, 0), parcel)
        parcel.tensor.zero_()
        assert receiver.has(0, Address(0, 0, 0))
        assert (receiver.take(0, Address(0, 0, 0), SPEC).tensor == 1).all()


def test_memory_is_used_again_when_no_view_of_a_message_is_left() -> None:
    with shared_posts(2) as (sender, receiver):

        def pass_on(turn: int) -> torch.Tensor:
            sender.send([1], Address(0, 0, turn), message(turn))
            assert receiver.has(0, Address(0, 0, turn))
            return receiver.take(0, Address(0, 0, turn), SPEC).tensor

        first = pass_on(1)
        place, view = first.data_ptr(), first[10:].view(-1, 2)
        del first
        second = pass_on(2)
        assert second.data_ptr() != place
        assert (view == 1).all()
        del view
        assert pass_on(3).data_ptr() == place


def test_many_messages_that_nobody_takes_yet() -> None:
    """More than sockets take, both ways: nothing blocks, and all arrive in order."""
    count = 2000
    with shared_posts(2) as endpoints:
        sent = []
        for turn in range(count):
            for rank in (0, 1):
                sent += endpoints[rank].send([1 - rank], Address(0, 0, turn), message(turn))
        assert any(part.end is None for part in sent), "the sockets are full"
        for turn in range(count):
            for rank in (0, 1):
                address = Address(0, 0, turn)
                while not endpoints[rank].has(1 - rank, address):
                    endpoints[1 - rank].wait(None, 0)
                found = endpoints[rank].take(1 - rank, address, SPEC).tensor
                assert found[-1] == turn
        assert all(part.end is not None for part in sent)


def test_messages_are_told_apart_by_address() -> None:
    with shared_posts(2) as (sender, receiver):
        addresses = [
            Address(tag, call, turn) for tag in (0, 1) for call in (0, 7) for turn in (0, 1)
        ]
        for value, address in enumerate(addresses):
            sender.send([1], address, message(value))
        for value, address in reversed(list(enumerate(addresses))):
            assert receiver.has(0, address)
            assert (receiver.take(0, address, SPEC).tensor == value).all()
        assert not receiver.has(0, Address(2, 0, 0))


def test_a_message_of_any_size() -> None:
    spec = TensorSpec((3 << 24,), torch.float32)
    with shared_posts(2) as (sender, receiver):
        parcel = message(1, spec)
        parcel.tensor[-1] = 2
        sender.send([1], Address(0, 0, 0), parcel)
        assert receiver.has(0, Address(0, 0, 0))
        assert torch.equal(receiver.take(0, Address(0, 0, 0), spec).tensor, parcel.tensor)


def test_waiting_ends_by_a_message_by_the_bell_and_by_time() -> None:
    bell, rope = os.pipe()
    with shared_posts(2, spin=1e-4) as (sender, receiver):
        start = time.monotonic()
        assert not receiver.wait(bell, 0.05)
        assert time.monotonic() - start >= 0.05
        for wake in (
            lambda: sender.send([1], Address(0, 0, 0), message(1)),
            lambda: os.write(rope, b"\0"),
        ):
            timer = threading.Timer(0.1, wake)
            timer.start()
            before = time.process_time()
            assert receiver.wait(bell, 20)
            assert time.process_time() - before < 0.05, "waiting must not use the processor"
            timer.join()
        assert receiver.has(0, Address(0, 0, 0))
    os.close(bell)
    os.close(rope)


def test_what_was_sent_before_the_end_arrives() -> None:
    with shared_posts(2) as (sender, receiver):
        sender.send([1], Address(0, 0, 0), message(1))
        receiver.send([0], Address(0, 0, 0), message(2))
        sender.close()
        assert receiver.has(0, Address(0, 0, 0))
        assert (receiver.take(0, Address(0, 0, 0), SPEC).tensor == 1).all()
        with pytest.raises(WorkerError, match="rank 0 is gone: it has ended its run"):
            receiver.has(0, Address(0, 0, 1))
        with pytest.raises(WorkerError, match="rank 0 is gone: it has ended its run"):
            receiver.send([0], Address(0, 0, 1), message(1))
        receiver.close()


def test_a_rank_that_is_gone_does_not_keep_others_awake() -> None:
    with shared_posts(3) as (first, second, third):
        third.abort()
        with pytest.raises(WorkerError, match="rank 2 is gone: its process has ended"):
            first.has(2, Address(0, 0, 0))
        assert not first.wait(None, 0.05)
        second.send([0], Address(0, 0, 0), message(1))
        assert first.wait(None, 5)
        assert first.has(1, Address(0, 0, 0))


def test_messages_that_can_not_leave_any_more() -> None:
    with shared_posts(2) as (sender, receiver):
        late = None
        while late is None or late.end is not None:
            (late,) = sender.send([1], Address(0, 0, 0), message(1))
        receiver.abort()
        sender.wait(None, 1)
        assert isinstance(late.error, WorkerError)


def mapped_without_names() -> list[str]:
    """Memory of this process that is mapped from files which nobody can open by a name any more."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "/memfd:" in line or "(deleted)" in line]


def test_nothing_is_left() -> None:
    gc.collect()
    before, files = descriptors(), os.listdir("/dev/shm")
    with shared_posts(2) as (sender, receiver):
        sender.send([1], Address(0, 0, 0), message(1))
        assert receiver.has(0, Address(0, 0, 0))
        tensor = receiver.take(0, Address(0, 0, 0), SPEC).tensor
        assert os.listdir("/dev/shm") == files
        sender.close()
        receiver.close()
    assert (tensor == 1).all(), "what a message showed stays"
    del sender, receiver, tensor
    gc.collect()
    assert descriptors() == before
    assert "shardwright" not in " ".join(mapped_without_names())


VICTIM = """
import sys, time
import torch
from shardwright.comm import open_store
from shardwright.comm.rendezvous import Rendezvous
from shardwright.comm.arena import Arena
from shardwright.comm.shared_memory import SharedMemoryEndpoint
from shardwright.comm.rounds import Address
from tests.comm.test_shared_memory import SPEC, message

arena = Arena(2)
meeting = Rendezvous(open_store(int(sys.argv[1])), 0, 2, sharing=True)
post = SharedMemoryEndpoint(0, arena, meeting.links([1], arena), 0)
for turn in range(100000):
    post.send([1], Address(0, 0, turn), message(turn))
"""


@pytest.mark.processes
def test_a_process_that_is_killed_in_the_middle_of_sending() -> None:
    files = os.listdir("/dev/shm")
    file = make_store()
    victim = subprocess.Popen(
        [sys.executable, "-c", VICTIM, str(file.fileno())],
        pass_fds=[file.fileno()],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
    )
    arena = Arena(2)
    meeting = Rendezvous(open_store(file.fileno()), 1, 2, sharing=True)
    post = SharedMemoryEndpoint(1, arena, meeting.links([0], arena), 1e-4)
    meeting.close()

    def hear(turn: int, end: int) -> None:
        while turn < end:
            if post.has(0, Address(0, 0, turn)):
                turn += 1
            else:
                post.wait(None, 20)

    try:
        hear(0, 500)
        victim.send_signal(signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(WorkerError, match="rank 0 is gone: its process has ended"):
            hear(500, 100000)
        assert time.monotonic() - start < 5
        assert (post.take(0, Address(0, 0, 499), SPEC).tensor == 499).all(), "what came is there"
        assert os.listdir("/dev/shm") == files
    finally:
        victim.kill()
        victim.wait()
        post.abort()
        file.close()
