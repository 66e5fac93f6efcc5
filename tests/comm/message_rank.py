"""One of four ranks: runs the whole table over each kind of transport, prints what is wrong.

Its number and the store's port are torchrun's variables; prints JSON.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from shardwright.comm import Operation, Transport, adopt_group, connect, join_group, rendezvous
from shardwright.comm.distributed import TRANSPORT_VARIABLE
from shardwright.comm.nccl import NcclTransport, make_groups
from shardwright.comm.transport import Membership, PendingTransfer
from shardwright.launch.protocol import Mailbox
from tests.comm.cases import Case, given, operation, same, table, wanted

SIZE = 4
CALLS = 2
GLOO_HAS = {"f64", "f32", "f16", "i64", "i32", "i8", "bool"}
TRANSPORTS = {
    "gloo": ("gloo", lambda rank: "here"),
    "shared": ("auto", lambda rank: "here"),
    "mixed": ("auto", lambda rank: f"host {rank // 2}"),
}
"""What is asked for, and the host that each rank takes itself to be on."""


def connected(
    kind: str, store: Store, rank: int, operations: Sequence[Operation], mailbox: Mailbox
) -> Transport:
    os.environ[TRANSPORT_VARIABLE], host = TRANSPORTS[kind][0], TRANSPORTS[kind][1](rank)
    rendezvous.this_host = lambda: host
    return connect(
        PrefixStore(kind, store),
        rank,
        [torch.device("cpu")] * SIZE,
        operations,
        threads=1,
        notify=mailbox.notify,
        make_group=adopt_group,
    )


def by_messages(kind: str, store: Store, rank: int) -> list[str]:
    """Every case, started for two calls before any result is asked for."""
    cases = table()
    operations = [operation(case, tag) for tag, case in enumerate(cases)]
    mailbox = Mailbox()
    transport = connected(kind, store, rank, operations, mailbox)
    under_way: list[tuple[Case, int, int, PendingTransfer]] = []
    for call in range(CALLS):
        for case, op in zip(cases, operations, strict=True):
            if rank in case.ranks:
                member = case.ranks.index(rank)
                tensor = given(case, seed=call)[member]
                pending = transport.start(Membership(op, member), call, tensor)
                under_way.append((case, member, call, pending))
    wrong = [
        f"{kind} {case} call {call} member {member}"
        for case, member, call, pending in under_way
        if not finishes_right(case, member, call, pending, transport, mailbox)
    ]
    transport.close()
    return wrong


def finishes_right(
    case: Case,
    member: int,
    call: int,
    pending: PendingTransfer,
    transport: Transport,
    mailbox: Mailbox,
) -> bool:
    while not pending.ready() or pending.interval() is None:
        assert transport.wait(mailbox.wakeup, 20), f"{case}: nothing arrives"
        mailbox.drain()
    found = pending.result()
    if found is not None and case.strides is not None and found.stride() != case.strides:
        return False
    return same(found, wanted(case, given(case, seed=call))[member])


def over_native_collectives(rank: int) -> list[str]:
    """The code path of NCCL, with gloo as the library, as far as gloo has the collectives."""
    cases = [case for case in table() if gloo_has(case)]
    operations = [operation(case, tag) for tag, case in enumerate(cases)]
    transport = NcclTransport(make_groups(operations, "gloo"), torch.device("cpu"))
    wrong = []
    for case, op in zip(cases, operations, strict=True):
        if rank in case.ranks:
            member = case.ranks.index(rank)
            pending = transport.start(Membership(op, member), 0, given(case)[member])
            if not same(pending.result(), wanted(case, given(case))[member]):
                wrong.append(f"native {case} member {member}")
    transport.close()
    assert {case.kind for case in cases} >= {"send", "broadcast", "all_gather", "all_reduce"}
    return wrong


def gloo_has(case: Case) -> bool:
    """Even pieces, sums, common dtypes."""
    moves = case.kind in ("send", "broadcast")
    even = len(set(case.sizes)) == 1 and len(set(case.src_sizes)) == 1
    reducible = case.dtype in GLOO_HAS and case.reduce_op != "avg"
    return moves or (even and (reducible or case.kind in ("all_gather", "all_to_all")))


def busy_seconds_while_idle(kind: str, store: Store, rank: int) -> float:
    """Processor time that waiting for a message takes in a second."""
    op = operation(Case("send"))
    mailbox = Mailbox()
    transport = connected(kind, PrefixStore("idle", store), rank, [op], mailbox)
    start = time.process_time()
    if rank == 0:
        time.sleep(1)
        transport.start(Membership(op, 0), 0, given(Case("send"))[0])
    if rank == 1:
        pending = transport.start(Membership(op, 1), 0, None)
        while not pending.ready():
            transport.wait(mailbox.wakeup, 20)
            mailbox.drain()
    busy = time.process_time() - start
    transport.close()
    return busy


def main() -> None:
    torch.set_num_threads(1)
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0)
    join_group(store, rank, SIZE, ["cpu"])
    wrong = [found for kind in TRANSPORTS for found in by_messages(kind, store, rank)]
    wrong += over_native_collectives(rank)
    busy = max(busy_seconds_while_idle(kind, store, rank) for kind in ("gloo", "shared"))
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps({"wrong": wrong, "busy": busy}), flush=True)
