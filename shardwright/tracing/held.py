"""What the nodes of an exported program stand for, once they are translated.

A `Place` stands for a tensor, a list for several, None for nothing. Comes in: an argument of an fx
node, nested as it may be. Goes out: the same with each node in it replaced by what it stands for,
or by its value at this point of the program.
"""

from __future__ import annotations

from typing import Any

import torch.fx

from shardwright.tracing.memory import ProgramMemory


class TranslatedNodes:
    """Each translated node with what it stands for."""

    def __init__(self, memory: ProgramMemory) -> None:
        self._memory = memory
        self._by_node: dict[torch.fx.Node, Any] = {}

    def __setitem__(self, node: torch.fx.Node, item: Any) -> None:
        self._by_node[node] = item

    def standing_for(self, argument: Any) -> Any:
        """An fx argument with every node replaced by what it stands for."""
        if isinstance(argument, torch.fx.Node):
            return self._by_node[argument]
        if isinstance(argument, (list, tuple)):
            return [self.standing_for(item) for item in argument]
        return argument

    def value_of(self, argument: Any) -> Any:
        """An fx argument with every node replaced by its value at this point."""
        if isinstance(argument, torch.fx.Node):
            return self._memory.read(self._by_node[argument])
        if isinstance(argument, (list, tuple)):
            return [self.value_of(item) for item in argument]
        return argument


def is_node(item: Any) -> bool:
    """Whether an fx argument stands for a tensor, or for several."""
    return isinstance(item, torch.fx.Node)


def listed(value: Any) -> list[Any]:
    """A list as a list, anything else as a list of one."""
    return list(value) if isinstance(value, (list, tuple)) else [value]
