"""One rank on a CUDA device: runs the table through `connect`, prints what is wrong.

Run as ``python -m tests.comm.cuda_rank RANK SIZE STORE``.
"""

from __future__ import annotations

import json
import sys

import torch

from shardwright.comm import Membership, connect, join_group, open_store
from tests.comm.cases import given, operation, same, table, wanted


def main(rank: int, size: int, descriptor: int) -> None:
    torch.cuda.set_device(rank)
    devices = [torch.device("cuda", i) for i in range(size)]
    store = open_store(descriptor)
    cases = [case for case in table() if max(case.ranks) < size]
    operations = [operation(case, tag) for tag, case in enumerate(cases)]
    transport = connect(
        store,
        rank,
        devices,
        operations,
        threads=1,
        notify=lambda: None,
        make_group=lambda: join_group(store, rank, size, ["cuda"]),
    )
    wrong = []
    for case, op in zip(cases, operations, strict=True):
        if rank in case.ranks:
            member = case.ranks.index(rank)
            tensor = given(case)[member]
            on_device = tensor.to(devices[rank]) if tensor is not None else None
            found = transport.start(Membership(op, member), 0, on_device).result()
            expected = wanted(case, given(case))[member]
            if not same(found.cpu() if found is not None else None, expected):
                wrong.append(str(case))
    transport.close()
    torch.distributed.destroy_process_group()
    print(json.dumps(wrong))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
