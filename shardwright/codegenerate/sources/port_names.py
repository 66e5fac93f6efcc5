"""Names of ports: those of the model's inputs and outputs, and of what goes between stages."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from shardwright.ir import IRGraph


class PortNames:
    """Names of ports by value id in the whole graph, each given once."""

    def __init__(self, graph: IRGraph, inputs: Sequence[str]) -> None:
        self.graph = graph
        self.found: dict[int, str] = {}
        self._taken: set[str] = set()
        for value_id, name in zip(graph.inputs, inputs, strict=True):
            self._name(value_id, name)
        for value_id, name in zip(graph.outputs, graph.output_names, strict=True):
            self._name(value_id, name)

    def add(self, value_ids: set[int]) -> None:
        """Name what goes from stage to stage, in the order in which it is made."""
        for value in self.graph.stored():
            if value.id in value_ids:
                self._name(value.id, value.name)
        counts: Counter[tuple[str, str]] = Counter()
        for node in self.graph.nodes:
            for value_id in node.outputs:
                stem = _stem(self.graph.values[value_id].name)
                number = counts[node.scope, stem]
                counts[node.scope, stem] += 1
                if value_id in value_ids:
                    name = f"{stem}_{number}" if number else stem
                    self._name(value_id, f"{node.scope}/{name}" if node.scope else name)

    def _name(self, value_id: int, wanted: str) -> None:
        """Give a value without a name the wanted one, or the next free ``wanted__k``."""
        if value_id in self.found:
            return
        name, k = wanted, 1
        while name in self._taken:
            name, k = f"{wanted}__{k}", k + 1
        self._taken.add(name)
        self.found[value_id] = name


def _stem(name: str) -> str:
    """A value's name without the numbers that make it unique in its graph and in torch's."""
    return re.sub(r"(?<=\w)(_\d+)?(__\d+)?$", "", name)
