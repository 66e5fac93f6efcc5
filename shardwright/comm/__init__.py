"""Communication between device slots: what each kind computes, and what carries it.

`operation` reads groups from a pipeline; `collectives` is their meaning in plain arithmetic;
`local` carries them within one process, `distributed` between processes: by `messages` in shared
memory (`shared`) or over sockets (`gloo`), or by a device's own library (`native`).
"""

from shardwright.comm.collectives import combine
from shardwright.comm.distributed import adopt_group, connect, gather_bytes, join_group
from shardwright.comm.local import LocalTransport, Switchboard
from shardwright.comm.operation import Membership, Operation, memberships, operations
from shardwright.comm.spec import TensorSpec
from shardwright.comm.store import make_store, open_store
from shardwright.comm.transport import Interval, Pending, Transport

__all__ = [
    "Interval",
    "LocalTransport",
    "Membership",
    "Operation",
    "Pending",
    "Switchboard",
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
