"""The best chain of cuts: dynamic programming over a table of what each stage would cost.

Comes in: `Tables`, square matrices over cuts 0 … n in which entry [i, j] is what the stage between
cut i and cut j would carry (the cuts of a sequence, or the down-sets of a graph). Goes out: the
chain of cuts from 0 to n. What always holds: of all chains with that many stages no other has a
smaller largest cost, and none of those with the same largest cost sends less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwright.errors import PlanError
from shardwright.planning.partitions.memory_limit import MemoryLimit

Table = NDArray[np.float64]
TOLERANCE = 1e-12
"""Costs this near to each other, relatively, are equal: sums in another order differ by less."""


@dataclass(frozen=True, slots=True)
class Tables:
    """What the stage between two cuts carries; ``seconds`` is infinite where there is none.

    ``sent`` are the seconds of what it receives, ``stored`` the bytes that it holds, ``kept`` those
    that it holds of each microbatch that is under way.
    """

    seconds: Table
    sent: Table
    stored: Table
    kept: Table

    def fitting(self, stage: int, stages: int, limit: MemoryLimit | None) -> Table:
        """The seconds, infinite where stage number ``stage`` would not fit in memory."""
        if limit is None:
            return self.seconds
        held = self.held(stage, stages, limit)
        return np.where(held <= limit.nbytes, self.seconds, np.inf)

    def held(self, stage: int, stages: int, limit: MemoryLimit) -> Table:
        """The bytes that stage number ``stage`` of so many would hold."""
        return self.stored + limit.under_way(stage, stages) * self.kept


def best_chain(
    tables: Tables, stages: int, limit: MemoryLimit | None = None, *, allowed: float = 0.0
) -> list[int]:
    """The cuts 0 = c0 < c1 < … = n between ``stages`` stages.

    Costs up to ``allowed`` are as good as smaller ones. Raises PlanError where no chain has that
    many stages that all fit in memory.
    """
    fitting = [tables.fitting(stage, stages, limit) for stage in range(stages)]
    bound = _walk(fitting, np.maximum)[0]
    if not np.isfinite(bound):
        raise PlanError(_too_full(tables, stages, limit))
    bound = max(bound * (1 + TOLERANCE), allowed)
    sending = [np.where(table <= bound, tables.sent, np.inf) for table in fitting]
    return _walk(sending, np.add)[1]


def _walk(tables: Sequence[Table], join: Any) -> tuple[float, list[int]]:
    """The least that stages come to, one table a stage, joined by sum or maximum, and the cuts."""
    best = tables[0][0]
    choices = []
    for table in tables[1:]:
        joined = join(best[:, None], table)
        choices.append(joined.argmin(0))
        best = joined.min(0)
    cuts = [len(best) - 1]
    for choice in reversed(choices):
        cuts.append(int(choice[cuts[-1]]))
    return float(best[-1]), [0, *reversed(cuts)]


def _too_full(tables: Tables, stages: int, limit: MemoryLimit | None) -> str:
    uncut = f"the graph cannot be cut in {stages} stages; ask for fewer"
    if limit is None:
        return uncut
    held = [
        np.where(np.isfinite(tables.seconds), tables.held(stage, stages, limit), np.inf)
        for stage in range(stages)
    ]
    least, cuts = _walk(held, np.maximum)
    if not np.isfinite(least):
        return uncut
    fullest = max(range(stages), key=lambda stage: held[stage][cuts[stage], cuts[stage + 1]])
    return limit.message(fullest, stages, least)
