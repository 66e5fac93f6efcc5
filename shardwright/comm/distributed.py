"""Ranks in processes of their own, on torch.distributed.

`join_group` makes this process one rank of a group of all; `DistributedTransport` sends each
operation the way its members' devices allow: between CUDA devices by NCCL (`native`), everything
else as messages over gloo (`gloo`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store, TCPStore

from shardwright.comm.gloo import GlooTransport
from shardwright.comm.native import NativeTransport, make_groups
from shardwright.comm.operation import Membership, Operation
from shardwright.comm.transport import Notify, Pending, Transport

_FOREVER = timedelta(days=365)
"""A resident worker may idle for long; who waits too long for what is for the worker to say."""


def join_group(
    store: Store, rank: int, size: int, device_kinds: Iterable[str]
) -> dist.ProcessGroup:
    """Make this process rank ``rank`` of the default process group; gives the group."""
    backend = "cpu:gloo,cuda:nccl" if "cuda" in device_kinds else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_FOREVER)
    group: dist.ProcessGroup | None = dist.group.WORLD
    assert group is not None, "the default group was just made"
    return group


def open_store(port: int = 0, *, host: bool = False) -> TCPStore:
    """Where the ranks of this machine meet: served on a free port by whoever is ``host``."""
    return TCPStore("127.0.0.1", port, is_master=host, wait_for_workers=False)


def adopt_group() -> dist.ProcessGroup:
    """A group of all ranks for host memory, where the program has made the default group itself."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=_FOREVER)
    return group


class DistributedTransport(Transport):
    """A rank's access to all others, by gloo and, where devices have it, by NCCL.

    ``group`` holds all ranks and carries host memory. Every rank makes a transport, with the
    operations of the whole pipeline in the same order.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        rank: int,
        devices: Sequence[torch.device],
        operations: Sequence[Operation],
        notify: Notify,
    ) -> None:
        self._rank = rank
        native = [o for o in operations if all(devices[r].type == "cuda" for r in o.ranks)]
        self._native_tags = {operation.tag for operation in native}
        others = [o for o in operations if o.tag not in self._native_tags]
        self._native = NativeTransport(make_groups(native, "nccl"), devices[rank])
        self._gloo = GlooTransport(group, rank, others, notify, devices[rank])
        self.in_order = any(rank in operation.ranks for operation in native)

    def start(self, membership: Membership, call: int, tensor: Tensor | None) -> Pending:
        """Start an operation on the library that its members share."""
        native = membership.operation.tag in self._native_tags
        transport: Transport = self._native if native else self._gloo
        return transport.start(membership, call, tensor)

    def close(self) -> None:
        """Let go of both."""
        self._native.close()
        self._gloo.close()

    def abort(self) -> None:
        """Cut both off."""
        self._native.abort()
        self._gloo.abort()
