"""How many microbatches a pipeline rank holds at once, from their forward to their backward.

Input: a schedule and a rank. Output: `HeldMicrobatches`: numbers of microbatches of each of
its stages, in their order, that it holds at some time. A worker looks one action ahead: while a
backward waits, for the gradients of another stage or for other devices inside its own, the forward
behind it is done.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from shardwright.schedules.schedule import Schedule

Rows = tuple[tuple[int, ...], ...]
"""Numbers of microbatches of each stage, once for each time that counts."""

AHEAD = 0.5
"""How much of the next forward a slot has done that waits for others of its stage now and again. It
depends on who is late; in simulations of transformers it is a third to a half."""
ENOUGH_TO_WAIT = 0.01
"""Of what is kept so much is brought by communication where slots wait; a loss alone is less."""


class HeldMicrobatches(NamedTuple):
    """What a rank holds at once; where its slots wait for one another, ``waiting`` what then."""

    usual: Rows
    waiting: Rows | None = None

    def most(self, each: ArrayLike) -> float:
        """The most that a rank holds of which a microbatch has so much in each stage."""
        alone = max(np.dot(row, each) for row in self.usual)
        if self.waiting is None:
            return float(alone)
        ahead = max(np.dot(row, each) for row in self.waiting)
        return float(alone + AHEAD * (ahead - alone))


def held_at_once(
    schedule: Schedule, rank: int, *, inside: bool = False, least: bool = False
) -> Rows:
    """Numbers of microbatches held at once of a rank's stages, those less than others left out.

    ``inside`` is where each backward waits, for other devices of its own stage. Of ``least``
    no forward is done while a backward waits, and what only waits for weight gradients does not
    count: so many are held whole in any case.
    """
    stages = schedule.stages_of(rank)
    place = {stage: i for i, stage in enumerate(stages)}
    now, found = [0] * len(stages), set()
    for action, following in pairwise((*schedule.actions[rank], None)):
        assert action is not None
        waits = action.kind == "B" and (inside or action.stage < schedule.stages - 1)
        if waits and not least and following is not None and following.kind == "F":
            next_stage = place[following.stage]
            found.add(tuple(count + (i == next_stage) for i, count in enumerate(now)))
        if action.kind == "F":
            now[place[action.stage]] += 1
            if following is None or following.kind != "F":  # behind another forward it holds more
                found.add(tuple(now))
        elif action.kind == ("B" if least else schedule.works[-1]):
            now[place[action.stage]] -= 1
    return _largest(found)


def waits_inside(brought: float, kept: float) -> bool:
    """Whether slots of a stage wait for one another: bytes that they bring each other and keep."""
    return brought > ENOUGH_TO_WAIT * kept


def _largest(found: Collection[tuple[int, ...]]) -> Rows:
    """Of distinct rows of numbers those that no other has at least as much as in every place."""
    rows = np.array(sorted(found))
    within = (rows[:, None] <= rows).all(axis=2).sum(axis=1)  # each is within itself
    return tuple(tuple(row) for row in rows[within == 1].tolist())
