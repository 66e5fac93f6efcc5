"""What goes in and out of the forward of one module.

Comes in: a module of a stage that is called, and what the stage's modules do. Goes out: what each
item of its forward reads and makes, what the forward is given and gives, and how it reaches stored
values. What always holds: of the stage itself that is in the order of its ports; of other modules
each value comes once, in the order in which it is read or made.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.codegenerate.stage import Stage
from shardwright.codegenerate.writing.calls import Calls
from shardwright.codegenerate.writing.construction import Construction
from shardwright.codegenerate.writing.modules import Home, Module
from shardwright.codegenerate.writing.order import Call, Item
from shardwright.ir import IRNode


class Flow:
    """What one module's forward reads and makes.

    items
        What it does, in order.
    made
        How the modules that it calls are made.
    updates
        Buffers that it changes in the end, with the values that are then in them.
    stored
        How each stored value is reached that lies inside the module.
    arguments, results
        What it is given and gives, value ids.
    """

    def __init__(
        self, stage: Stage, calls: Calls, construction: Construction, module: Module
    ) -> None:
        self.stage = stage
        self.graph = stage.graph
        self.calls = calls
        self.construction = construction
        self.module = module
        self.items = calls.items[module]
        self.updates = calls.updates[module]
        self.made = {
            item.module: construction.made(item.module)
            for item in self.items
            if isinstance(item, Call)
        }
        self._reads = {id(item): self._operands(item) for item in self.items}
        self.stored = dict(self._stored())
        self.results = self._results()
        self.arguments = self._arguments()

    def reads(self, item: Item) -> tuple[int, ...]:
        """What an item reads, one an operand or argument."""
        return self._reads[id(item)]

    def makes(self, item: Item) -> tuple[int | None, ...]:
        """What an item makes; None for what its operator leaves out."""
        if isinstance(item, IRNode):
            return tuple(item.results)
        if item.layer is not None:
            return item.layer.results
        return self.made[item.module].results

    def buffer(self, value_id: int) -> str:
        """How a buffer that the forward changes is reached."""
        homes = self.calls.tree.homes[value_id]
        return self._reach(next(home for home in homes if self.module in home.module.upwards()))

    def _operands(self, item: Item) -> tuple[int, ...]:
        if isinstance(item, IRNode):
            return tuple(item.inputs)
        if item.layer is not None:
            return item.layer.arguments
        return self.made[item.module].arguments

    # --- what is stored -----------------------------------------------------------------------

    def _stored(self) -> Iterator[tuple[int, str]]:
        read = [v for reads in self._reads.values() for v in reads]
        returned = self.graph.outputs if not self.module.path else []
        for value_id in dict.fromkeys([*read, *self.updates, *returned]):
            for home in self.calls.tree.homes.get(value_id, ()):
                if self.module in home.module.upwards():
                    copied = ".clone()" if self._is_kept(value_id) else ""
                    yield value_id, f"{self._reach(home)}{copied}"
                    break

    def _reach(self, home: Home) -> str:
        return self.construction.tensor(self.module, home)

    def _is_kept(self, value_id: int) -> bool:
        """Whether somebody, or autograd, may keep what a buffer held before it is written to."""
        if value_id in self.calls.outliving:
            return True
        if value_id not in self.calls.written:
            return False
        own = [item for item in self.items if isinstance(item, IRNode) and value_id in item.inputs]
        others = {v for node in own for v in node.inputs} - {value_id}
        return any(self.graph.values[v].role not in ("buffer", "constant") for v in others)

    # --- what goes in and out -----------------------------------------------------------------

    def _results(self) -> tuple[int, ...]:
        if not self.module.path:
            return tuple(port.value for port in self.stage.outputs)
        elsewhere = self._new_elsewhere()
        made = (v for item in self.items for v in self.makes(item) if v is not None)
        return tuple(
            v for v in made if v in elsewhere or self.calls.is_read_outside(self.module, v)
        )

    def _new_elsewhere(self) -> set[int]:
        """Values that leave the stage, or replace what a buffer around this module holds."""
        inside = set(self.updates.values())
        for item in self.items:
            if isinstance(item, Call):
                inside |= self._changes(item)
        return {*self.graph.outputs, *(set(self.graph.updates.values()) - inside)}

    def _changes(self, call: Call) -> set[int]:
        """New contents that a called module keeps."""
        if call.layer is not None:
            own = set(call.layer.parameters.values())
            return {new for old, new in self.graph.updates.items() if old in own}
        found = set(self.calls.updates.get(call.module, {}).values())
        for item in self.calls.items.get(call.module, ()):
            if isinstance(item, Call):
                found |= self._changes(item)
        return found

    def _arguments(self) -> tuple[int, ...]:
        if not self.module.path:
            return tuple(port.value for port in self.stage.inputs)
        made = {v for item in self.items for v in self.makes(item)}
        read = [v for reads in self._reads.values() for v in reads]
        read += self.updates.values()
        return tuple(v for v in dict.fromkeys(read) if v not in made and v not in self.stored)
