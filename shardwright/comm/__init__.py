"""Communication between device slots: what each kind computes, and what carries it.

`transport` reads groups from a pipeline; `rounds` says what their members send one another, and
`collectives` what they compute of it. `loopback` does so within one process, `distributed` between
processes: by messages in shared memory (`shared_memory`) or over sockets (`gloo`), or by a device's
own library (`nccl`).
"""

from shardwright.comm.distributed import adopt_group, connect, gather_bytes, join_group
from shardwright.comm.loopback import Loopback, LoopbackTransport
from shardwright.comm.rendezvous import make_store, open_store
from shardwright.comm.rounds import combine
from shardwright.comm.transport import (
    Interval,
    Membership,
    Operation,
    PendingTransfer,
    TensorSpec,
    Transport,
    memberships,
    operations,
)

__all__ = [
    "Interval",
    "Loopback",
    "LoopbackTransport",
    "Membership",
    "Operation",
    "PendingTransfer",
    "TensorSpec",
    "Transport",
    "adopt_group",
    "combine",
    "connect",
    "gather_bytes",
    "join_group",
    "make_store",
    "memberships",
    "open_store",
    "operations",
]
