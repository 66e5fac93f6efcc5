"""One of four ranks: runs the whole table over gloo, prints what came out wrong as JSON.

Run as ``python gloo_rank.py RANK PORT``.
"""

from __future__ import annotations

import json
import sys
import threading
import time

import torch
import torch.distributed as dist

from shardwright.comm.distributed import join_group
from shardwright.comm.gloo import GlooTransport
from shardwright.comm.native import NativeTransport, make_groups
from shardwright.comm.operation import Membership
from shardwright.comm.transport import Pending
from tests.comm.cases import Case, given, operation, same, table, wanted

SIZE = 4
CALLS = 2
GLOO_HAS = {"f64", "f32", "f16", "i64", "i32", "i8", "bool"}


def over_messages(rank: int) -> list[str]:
    """Every case, started for two calls before any result is asked for."""
    cases = table()
    operations = [operation(case, tag) for tag, case in enumerate(cases)]
    woken = threading.Semaphore(0)
    transport = GlooTransport(dist.group.WORLD, rank, operations, woken.release)
    under_way: list[tuple[Case, int, int, Pending]] = []
    for call in range(CALLS):
        for case, op in zip(cases, operations, strict=True):
            if rank in case.ranks:
                member = case.ranks.index(rank)
                tensor = given(case, seed=call)[member]
                pending = transport.start(Membership(op, member), call, tensor)
                under_way.append((case, member, call, pending))
    wrong = [
        f"{case} call {call} member {member}"
        for case, member, call, pending in under_way
        if not finishes_right(case, member, call, pending, woken)
    ]
    transport.close()
    return wrong


def finishes_right(
    case: Case, member: int, call: int, pending: Pending, woken: threading.Semaphore
) -> bool:
    while not pending.ready() or pending.interval() is None:
        assert woken.acquire(timeout=20), f"{case}: nothing arrives"
    found = pending.result()
    if found is not None and case.strides is not None and found.stride() != case.strides:
        return False
    return same(found, wanted(case, given(case, seed=call))[member])


def over_native_collectives(rank: int) -> list[str]:
    """The code path of NCCL, with gloo as the library, as far as gloo has the collectives."""
    cases = [case for case in table() if gloo_has(case)]
    operations = [operation(case, tag) for tag, case in enumerate(cases)]
    transport = NativeTransport(make_groups(operations, "gloo"), torch.device("cpu"))
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


def busy_seconds_while_idle(rank: int) -> float:
    """Processor time that waiting for a message takes in a second."""
    op = operation(Case("send"))
    if rank > 1:
        return 0.0
    woken = threading.Semaphore(0)
    transport = GlooTransport(dist.group.WORLD, rank, [op], woken.release)
    start = time.process_time()
    if rank == 0:
        time.sleep(1)
        transport.start(Membership(op, 0), 0, given(Case("send"))[0])
    else:
        pending = transport.start(Membership(op, 1), 0, None)
        while not pending.ready():
            woken.acquire(timeout=20)
    busy = time.process_time() - start
    transport.close()
    return busy


def main(rank: int, port: int) -> None:
    torch.set_num_threads(1)
    join_group(dist.TCPStore("127.0.0.1", port, is_master=False), rank, SIZE, ["cpu"])
    wrong = over_messages(rank)
    wrong += over_native_collectives(rank)
    busy = busy_seconds_while_idle(rank)
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps({"wrong": wrong, "busy": busy}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
