"""Communication between device slots: what each kind computes, and what carries it.

`operation` reads groups from a pipeline; `collectives` is their meaning in plain arithmetic;
`local` carries them within one process, `distributed` between processes.
"""

from shardwright.comm.collectives import combine
from shardwright.comm.distributed import DistributedTransport, adopt_group, join_group, open_store
from shardwright.comm.local import LocalTransport, Switchboard
from shardwright.comm.operation import Membership, Operation, TensorSpec, memberships, operations
from shardwright.comm.transport import Interval, Pending, Transport

__all__ = [
    "DistributedTransport",
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
    "join_group",
    "memberships",
    "open_store",
    "operations",
]
