"""What the update of parameters takes once a step.

An update reads a parameter, its gradient and its state, and writes all but the gradient. What is
dealt out over slots (ZeRO) is put together again afterwards: a collective more than its gradient
takes, and a copy to where the parameter stands.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardwright.clusters import DeviceModel
from shardwright.costs.operations import STATE_PASSES, UPDATE_PASSES
from shardwright.costs.worker_time import worker_seconds
from shardwright.planning.prediction.source import Floats, Integers
from shardwright.planning.prediction.spread import Spread
from shardwright.planning.prediction.sums import added, distinct

COPY_PASSES = 2


def update_seconds(
    gradients: Floats, states: Floats, shards: int | Integers, device: DeviceModel
) -> Floats:
    """Of parameters of whole gradients and states of these bytes, dealt out over ``shards``."""
    over = np.asarray(shards)
    dealt_out = (over > 1) & (gradients > 0)
    moved = (UPDATE_PASSES * gradients + STATE_PASSES * states) / over
    moved = moved + COPY_PASSES * dealt_out * gradients
    return np.asarray(moved / device.bandwidth + worker_seconds(device) * dealt_out)


def rank_updates(
    spread: Spread, ranks: Integers, shards: Sequence[int], device: DeviceModel
) -> Floats:
    """Of each rank, with what workers need beside it and for the communication of gradients.

    ``ranks`` is that of each node.
    """
    held = distinct(spread.stored._replace(size=spread.gradient), ranks)
    states = distinct(spread.stored._replace(size=spread.state), ranks).size
    each = update_seconds(held.size, states, np.asarray(shards)[held.node], device)
    count = len(shards)
    supertasks = (added(held.node, held.size, count) > 0) + added(ranks, spread.gathered, count)
    return added(held.node, each, count) + worker_seconds(device) * supertasks
