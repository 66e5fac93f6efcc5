"""The forms of one graph that are planned, each made once.

With fused products unfused, as a step of so many microbatches and data shards, as the forward
that is placed. A step is what `as_step` gives; where it would give the same for two numbers, it is
one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shardwright.costs.placed import Forward
from shardwright.ir import IRGraph, IRNode
from shardwright.ir.graph import is_step
from shardwright.planning.plan import fingerprint_graph
from shardwright.planning.predict import forward_of_step
from shardwright.planning.step import (
    PreparedStep,
    as_step,
    has_quotients,
    is_mixed_by_shards,
    mixing_nodes,
    notes_on,
)
from shardwright.planning.step_graph import forward_view
from shardwright.planning.unfuse import unfuse

Positions = tuple[int, ...]
"""Of the fused products that are unfused."""
_Key = tuple[Positions, int, int]
"""With numbers of microbatches and data shards; 1 where they do not matter."""


@dataclass(slots=True)
class GraphForms:
    """A graph's forms, as they are asked for."""

    graph: IRGraph
    training: bool = field(init=False)
    _fingerprint: str = ""
    _apart: dict[Positions, IRGraph] = field(default_factory=dict)
    _steps: dict[_Key, PreparedStep] = field(default_factory=dict)
    _forwards: dict[_Key, Forward] = field(default_factory=dict)
    _has_quotients: bool | None = None
    _mixed: dict[int, bool] = field(default_factory=dict)
    """By number of data shards."""
    _mixing: dict[Positions, tuple[IRGraph, list[IRNode]]] = field(default_factory=dict)
    """The forward of the graph unfused, and the nodes of it that mix the batch."""

    def __post_init__(self) -> None:
        self.training = is_step(self.graph)
        self._apart[()] = self.graph

    @property
    def fingerprint(self) -> str:
        """The graph's."""
        self._fingerprint = self._fingerprint or fingerprint_graph(self.graph)
        return self._fingerprint

    def note_apart(self, apart: IRGraph, positions: Positions) -> None:
        """Note the graph with these fused products unfused, which is known."""
        self._apart.setdefault(positions, apart)

    def apart(self, positions: Positions) -> IRGraph:
        """The graph with these fused products unfused."""
        if positions not in self._apart:
            self._apart[positions] = unfuse(self.graph, positions)
        return self._apart[positions]

    def step(self, positions: Positions, microbatches: int, shards: int) -> PreparedStep:
        """The step of so many microbatches, each split over data shards. Raises PlanError."""
        key = self._key(positions, microbatches, shards)
        if key not in self._steps:
            self._steps[key] = as_step(self.apart(positions), *key[1:])
        return self._steps[key]

    def forward(self, positions: Positions, microbatches: int, shards: int) -> Forward:
        """What is planned of that; of a model, which has neither, all of it."""
        key = self._key(positions, microbatches, shards)
        if key not in self._forwards:
            self._forwards[key] = self._made_ready(key)
        return self._forwards[key]

    def is_mixed(self, shards: int) -> bool:
        """Whether the number of data shards changes the graph: batch norms have each their own."""
        if shards not in self._mixed:
            self._mixed[shards] = self.training and is_mixed_by_shards(self.graph, shards)
        return self._mixed[shards]

    def mixing_notes(self, positions: Positions, microbatches: int, shards: int) -> list[str]:
        """What mixes the rows of a batch, as `planning.step` notes it."""
        if shards * microbatches == 1:
            return []
        if positions not in self._mixing:
            view = forward_view(self.apart(positions))
            self._mixing[positions] = view, mixing_nodes(view)
        view, mixing = self._mixing[positions]
        return notes_on(mixing, view, microbatches, shards)

    def _made_ready(self, key: _Key) -> Forward:
        if not self.training:
            return Forward(self.apart(key[0]), self.apart(key[0]))
        return forward_of_step(self.step(*key))

    def _key(self, positions: Positions, microbatches: int, shards: int) -> _Key:
        if self._has_quotients is None:
            self._has_quotients = self.training and has_quotients(self.graph)
        count = microbatches if self._has_quotients else 1
        return positions, count, shards if self.is_mixed(shards) else 1
