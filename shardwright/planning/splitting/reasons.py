"""Why each node is split as it is: what it would cost alone to split it otherwise.

Comes in: a model that was solved, and its choices. Goes out: a sentence a node: the seconds that
its own tables count where all other nodes stay as they are, and those of the next best split. What
always holds: values are brought anew where another split asks for other layouts; a node that
cannot be split says why; of equal nodes between equal neighbours it is worked out once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from shardwright.ops.catalog import why_whole
from shardwright.planning.plan import Split, Terms
from shardwright.planning.splitting.elimination import Factor, Table
from shardwright.planning.splitting.model import Model
from shardwright.planning.splitting.strategies import Choices


def reasons(model: Model, chosen: Sequence[int], axes: Sequence[str]) -> list[str]:
    """A sentence for each node; ``chosen`` is the choice of each variable."""
    return _Reasons(model, chosen, axes).run()


def says(splits: Choices, axes: Sequence[str]) -> str:
    """What the axes of a mesh do with a node, in words."""
    pairs = zip(splits, axes, strict=True)
    return ", ".join(f"{_what(s)} over {axis}" for s, axis in pairs if s is not None) or "whole"


def _what(split: Split | Terms) -> str:
    if isinstance(split, Terms):
        return "terms"
    return split.identifier if split.unit == 1 else f"{split.identifier} by {split.unit}"


@dataclass(slots=True)
class _Reasons:
    model: Model
    chosen: Sequence[int]
    axes: Sequence[str]
    touching: list[list[Factor]] = field(init=False)
    joints: frozenset[int] = field(init=False)
    known: dict[object, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.joints = frozenset(variable for variable, _ in self.model.joints.values())
        self.touching = [[] for _ in self.model.sizes]
        for factor in self.model.factors:
            for variable in factor.scope:
                self.touching[variable].append(factor)

    def run(self) -> list[str]:
        outline = self.model.outline
        found = []
        for position, (node, variable) in enumerate(
            zip(outline.view.nodes, self.model.nodes, strict=True)
        ):
            bound = outline.bound(position)
            if bound is None or not bound.identifiers:
                found.append(why_whole(outline.view, node) or "no annotation")
            else:
                found.append(self._reason(position, variable))
        return found

    def _reason(self, position: int, variable: int) -> str:
        joined = dict.fromkeys(
            other
            for factor in self.touching[variable]
            for other in factor.scope
            if other in self.joints
        )
        free = {variable, *joined}
        key = (
            id(self.model.domains[position]),
            self.chosen[variable],
            tuple(
                (id(f.table), *(-1 if v in free else self.chosen[v] for v in f.scope))
                for v in (variable, *joined)
                for f in self.touching[v]
            ),
        )
        if key not in self.known:
            self.known[key] = self._sentence(position, self._alone(variable, set(joined)))
        return self.known[key]

    def _alone(self, variable: int, joined: set[int]) -> Table:
        """Seconds of each strategy of a node where all other nodes stay as they are."""
        direct = [f for f in self.touching[variable] if not joined.intersection(f.scope)]
        total = np.zeros(self.model.sizes[variable])
        for factor in direct:
            total = total + self._slice(factor, [variable])
        for joint in joined:
            table = np.zeros((self.model.sizes[variable], self.model.sizes[joint]))
            for factor in self.touching[joint]:
                if variable in factor.scope:
                    both = self._slice(factor, [variable, joint])
                    table = table + (both if variable < joint else both.T)
                else:
                    table = table + self._slice(factor, [joint])[None, :]
            total = total + table.min(axis=1)
        return total

    def _slice(self, factor: Factor, free: Sequence[int]) -> Table:
        """A table where all but some variables stay as they are."""
        at = tuple(slice(None) if v in free else self.chosen[v] for v in factor.scope)
        found: Table = factor.table[at]
        return found

    def _sentence(self, position: int, seconds: Table) -> str:
        domain = self.model.domains[position]
        own = domain.strategies[self.chosen[self.model.nodes[position]]].splits
        least: dict[Choices, float] = {}
        for found, spent in zip(domain.strategies, seconds.tolist(), strict=True):
            least[found.splits] = min(spent, least.get(found.splits, np.inf))
        others = {s: spent for s, spent in least.items() if s != own and np.isfinite(spent)}
        said = f"{says(own, self.axes)}: {_micro(least[own])}"
        if not others:
            return f"{said}; it cannot be split otherwise here"
        other = min(others, key=lambda splits: others[splits])
        return f"{said}; next best {says(other, self.axes)}: {_micro(others[other])}"


def _micro(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} µs"
